"""`kvlb doctor` against simulated engines started wrongly, over real HTTP and ZMQ: one fault each."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kvlb.doctor.core.facts import FleetFacts
from kvlb.doctor.core.findings import Finding, Level
from kvlb.settings import KvlbSettings, Overrides, load_settings
from kvlb.simulated import instance_option
from simulator.core.settings import EngineSettings
from simulator.core.tokenizer import SPECIAL_TOKENS
from simulator.service import RunningEngine

Settings = Callable[..., KvlbSettings]
Engines = Callable[..., AbstractAsyncContextManager[list[RunningEngine]]]
Diagnose = Callable[..., Awaitable[tuple[FleetFacts, list[Finding]]]]
Found = Callable[..., Awaitable[list[Finding]]]

WELL = EngineSettings(inter_token_ms=1.0)

TOKENIZER = Path(__file__).parents[2] / "tokenizer"


def engine_like(**changes: Any) -> EngineSettings:
    return msgspec.structs.replace(WELL, **changes)


@pytest.fixture
def found(engines: Engines, diagnose: Diagnose, told: Settings) -> Found:
    """Diagnose engines by their addresses alone; `more` is added to each option."""

    async def run(*fleets: tuple[str, EngineSettings], more: str = "") -> list[Finding]:
        async with engines(*fleets) as running:
            options = [
                f"{each.url},alias=e{number}{_role(each)}{more}"
                for number, each in enumerate(running)
            ]
            return (await diagnose(told(*options)))[1]

    return run


def _role(engine: RunningEngine) -> str:
    return "" if engine.role == "mixed" else f",role={engine.role}"


async def test_nothing_is_found_of_a_fleet_that_is_well(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """Two prefill and two decode instances, one of two ranks, one of an old release."""
    async with engines(("1p2d", WELL), ("1", engine_like(dp_size=2))) as running:
        facts, findings = await diagnose(told(*map(instance_option, running[:3]), running[3].url))

    assert findings == []
    assert [len(each.streams) for each in facts.instances] == [1, 1, 1, 2]
    assert facts.instances[0].transfer is not None
    assert all(stream.batches for each in facts.instances for stream in each.streams)


PLANTED: list[tuple[str, Level, str, tuple[str, EngineSettings]]] = [
    ("events_off", Level.ERROR, "enable_kv_cache_events", ("1", engine_like(events=False))),
    ("no_replay", Level.WARNING, '"replay_endpoint": "tcp://*:', ("1", engine_like(replay=False))),
    (
        "publisher_connects",
        Level.ERROR,
        '"endpoint": "tcp://*:',
        ("1", engine_like(events_host="0.0.0.0")),  # noqa: S104 - the fault
    ),
    (
        "prefix_caching_off",
        Level.ERROR,
        "--enable-prefix-caching",
        ("1", engine_like(prefix_caching=False)),
    ),
    (
        "token_details_off",
        Level.WARNING,
        "--enable-prompt-tokens-details",
        ("1", engine_like(prompt_tokens_details=False)),
    ),
    (
        "nixl_unreachable",
        Level.ERROR,
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        ("1p1d", engine_like(side_channel_host="127.0.0.2")),
    ),
    (
        "nixl_unreachable",
        Level.ERROR,
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        ("1p1d", engine_like(side_channel_host="no-such-host.invalid")),
    ),
    (
        "hash_seed_differs",
        Level.ERROR,
        "PYTHONHASHSEED",
        ("2", engine_like(hash_algorithm="xxhash", kv_offloading=True)),
    ),
    ("unauthorized", Level.ERROR, "KVLB_ENGINE_API_KEY", ("1", engine_like(api_key="k"))),
    ("events_unknown", Level.ERROR, "`events: tcp://", ("1", engine_like(version="0.20.0"))),
    ("release_untested", Level.INFO, "newer kvlb", ("1", engine_like(version="0.99.0"))),
]


@pytest.mark.parametrize(
    ("name", "level", "change", "fleet"),
    PLANTED,
    ids=[f"{n}-{each[0]}" for n, each in enumerate(PLANTED)],
)
async def test_planted_fault_is_named_with_its_remedy(
    name: str, level: Level, change: str, fleet: tuple[str, EngineSettings], found: Found
) -> None:
    """That finding, no other, and what to change."""
    (finding,) = {each.name: each for each in await found(fleet)}.values()

    assert (finding.name, finding.level) == (name, level)
    assert change in finding.change


async def test_engine_that_is_not_healthy_is_named(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """It answers, and its engine core is dead, or it drains."""
    async with engines(("1", WELL)) as running:
        running[0].engine.is_draining = True
        _, (finding,) = await diagnose(told(running[0].url))

    assert finding.name == "unhealthy"
    assert "503" in finding.seen


async def test_seeded_xxhash_and_unshared_blocks_are_no_fault(found: Found) -> None:
    """The same seed everywhere; or another one, where nobody looks for another's blocks."""
    seeded = engine_like(hash_algorithm="xxhash", kv_offloading=True, hash_seed="0")
    alone = engine_like(hash_algorithm="xxhash")

    assert await found(("2", seeded)) == []
    assert await found(("2", alone)) == []


async def test_ports_that_clash_are_found_by_asking_the_engine(found: Found) -> None:
    """Rank 0 replays where rank 1 should publish, so rank 1 is mute."""
    findings = await found(("1", engine_like(dp_size=2, replay_distance=1)))

    clash = next(each for each in findings if each.name == "ports_clash")
    assert "replay of rank 0 and events of rank 1" in clash.seen
    assert "at least 2 away" in clash.change


async def test_ports_that_clash_are_found_in_the_file(told: Settings, diagnose: Diagnose) -> None:
    """The engine isn't there: vLLM ends when a port is taken."""
    settings = told(
        "http://127.0.0.1:9,events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558,ranks=2"
    )
    _, findings = await diagnose(settings)

    assert [each.name for each in findings] == ["ports_clash", "unreachable"]


async def test_wrong_model_is_named_beside_the_right_one(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """The file says one, /v1/models another."""
    async with engines(("1", WELL)) as running:
        settings = told(running[0].url)
        (entry,) = settings.instances
        entry = msgspec.structs.replace(entry, model="llama")
        settings = msgspec.structs.replace(settings, instances=(entry,))
        _, (finding,) = await diagnose(settings)

    assert finding.name == "wrong_model"
    assert "`model: sim`" in finding.change


async def test_key_of_the_engine_is_used(engines: Engines, diagnose: Diagnose) -> None:
    """With it everything can be seen; it is in no finding."""
    async with engines(("1", engine_like(api_key="s3cret", events=False))) as running:
        settings = load_settings(
            None, Overrides(instances=[running[0].url]), {"KVLB_ENGINE_API_KEY": "s3cret"}
        )
        _, findings = await diagnose(settings)

    assert [each.name for each in findings] == ["events_off"]
    assert "s3cret" not in str(findings)


async def test_short_keep_alive_is_measured(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """The engine hangs up before our pool would."""
    async with engines(("1", engine_like(keep_alive_s=1))) as running:
        _, (finding,) = await diagnose(told(running[0].url, keep_alive_s=2.0))

    assert finding.name == "keep_alive_too_short"
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" in finding.change


async def test_block_sizes_of_a_model_are_compared(found: Found) -> None:
    """As their events tell them."""
    (finding,) = await found(("1", WELL), ("1", engine_like(block_size=32)))

    assert finding.name == "block_sizes_differ"
    assert "16: e0; 32: e1" in finding.seen


async def test_rank_that_events_name_is_compared(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """The file counts from 3, the engine from 0."""
    async with engines(("1", WELL)) as running:
        (host, _, port) = running[0].events_endpoint.rpartition(":")
        (_, _, replay) = (running[0].replay_endpoint or "").rpartition(":")
        sockets = f"events={host}:{int(port) - 3},replay={host}:{int(replay) - 3}"
        _, (finding,) = await diagnose(told(f"{running[0].url},ranks=1,rank_base=3,{sockets}"))

    assert finding.name == "wrong_rank"
    assert "name rank 0" in finding.seen
    assert "`rank_base`" in finding.change


async def test_port_that_nobody_serves_is_found(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """A mapped port that was written down wrongly, for events and for replay."""
    async with engines(("1", WELL)) as running:
        settings = told(f"{running[0].url},events=tcp://127.0.0.1:9,replay=tcp://127.0.0.1:9")
        _, findings = await diagnose(settings)

    assert [each.name for each in findings] == ["events_unconnected", "replay_silent"]


async def test_silent_engine_is_found_by_a_request(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """Its socket is there, its answers too, its events not."""
    async with engines(("1", engine_like(events=False))) as running:
        context = zmq.Context()
        mute = context.socket(zmq.PUB)
        mute.linger = 0
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        try:
            settings = told(f"{running[0].url},events=tcp://127.0.0.1:{port}")
            _, findings = await diagnose(settings)
        finally:
            mute.close()
            context.term()

    assert {"events_silent", "no_replay"} <= {each.name for each in findings}


async def test_connection_that_a_running_indexer_holds_is_said(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """Two can't bind one port; nothing is claimed of what comes there."""
    async with engines(("1", engine_like(events_host="127.0.0.1"))) as running:
        context = zmq.Context()
        taken = context.socket(zmq.SUB)
        taken.bind(running[0].events_endpoint)
        try:
            _, findings = await diagnose(told(running[0].url))
        finally:
            taken.close(0)
            context.term()

    assert [each.name for each in findings] == ["publisher_connects", "events_unseen"]


async def test_prefill_engine_without_a_connector_hands_nothing_over(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """`role: prefill` alone makes no transfer."""
    async with engines(("2", WELL)) as running:
        settings = told(f"{running[0].url},role=prefill", f"{running[1].url},role=decode")
        _, (finding,) = await diagnose(settings)

    assert (finding.name, finding.instance) == ("no_transfer", "p0")
    assert "--kv-transfer-config" in finding.change


async def test_transfer_leaves_no_reserved_blocks(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """The decode leg fetches what the prefill leg kept."""
    async with engines(("1p1d", WELL)) as running:
        await diagnose(told(*map(instance_option, running)))
        kept = running[0].engine.ranks[0].core.reservations
        assert (kept.open, kept.released) == (0, 1)


async def test_nothing_is_sent_unless_wanted(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """Then that is said, and what needs no request is still found."""
    async with engines(("1", engine_like(replay=False))) as running:
        _, findings = await diagnose(told(running[0].url), sends_requests=False)
        asked = [each.path for each in running[0].engine.received]

    assert [each.name for each in findings] == ["no_replay", "not_probed"]
    assert "/v1/completions" not in asked


@pytest.fixture(scope="module")
def simulated_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulator's tokenizer and chat template, as files a model ships."""
    folder = tmp_path_factory.mktemp("tokenizer")
    characters = _byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(SPECIAL_TOKENS, key=SPECIAL_TOKENS.__getitem__)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    begin = "<|begin_of_text|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, SPECIAL_TOKENS[begin])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return folder


def _byte_characters() -> Sequence[str]:
    """The character that stands for each byte in byte-level vocabularies."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


async def test_tokenizer_of_another_model_is_found(
    simulated_tokenizer: Path, told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """Its own tokenizer agrees on every probe text; another one doesn't."""
    async with engines(("1", WELL)) as running:
        settings = told(running[0].url)
        right = replace_tokenizer(settings, simulated_tokenizer)
        wrong = replace_tokenizer(settings, TOKENIZER)
        facts, agreed = await diagnose(right)
        _, (finding,) = await diagnose(wrong)

    assert facts.instances[0].tokenized is not None
    assert agreed == []
    assert finding.name == "tokenizer_differs"
    assert "`tokens.models`" in finding.change


def replace_tokenizer(settings: KvlbSettings, folder: Path) -> KvlbSettings:
    tokens = msgspec.structs.replace(settings.tokens, models={"sim": str(folder)})
    return msgspec.structs.replace(settings, tokens=tokens)
