"""`kvlb doctor` against simulated engines started wrongly, over real HTTP and ZMQ: one fault each."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import yaml
import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from typer.testing import CliRunner, Result

from kvlb.cli import app
from kvlb.doctor.core.examination import examine
from kvlb.doctor.core.facts import FleetFacts
from kvlb.doctor.core.findings import Finding, Level
from kvlb.doctor.gather import Patience, gather_facts
from kvlb.running import running_kvlb
from kvlb.settings import KvlbSettings, Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings
from simulator.core.tokenizer import SPECIAL_TOKENS
from simulator.service import RunningEngine

WELL = EngineSettings(inter_token_ms=1.0)
QUICK = Patience(connect_s=1.0, event_s=1.0, replay_s=0.5)
IDLE_S = 0.1
"""Our pool's keep-alive in these tests: as long as a healthy engine is waited for."""
TOKENIZER = Path(__file__).parents[1] / "tokenizer"


def engine_like(**changes: Any) -> EngineSettings:
    return msgspec.structs.replace(WELL, **changes)


def told(*instances: str, keep_alive_s: float = IDLE_S, **changes: Any) -> KvlbSettings:
    """Settings as the command reads them, with a short keep-alive."""
    settings = load_settings(None, Overrides(instances=instances), {})
    dataplane = msgspec.structs.replace(settings.dataplane, keep_alive_s=keep_alive_s)
    return msgspec.structs.replace(settings, dataplane=dataplane, **changes)


@asynccontextmanager
async def engines(*fleets: tuple[str, EngineSettings]) -> AsyncIterator[list[RunningEngine]]:
    async with AsyncExitStack() as stack:
        running: list[RunningEngine] = []
        for spec, settings in fleets:
            fleet = await stack.enter_async_context(simulated_fleet(parse_fleet(spec), settings))
            running += fleet.engines
        yield running


async def diagnose(settings: KvlbSettings, **options: Any) -> tuple[FleetFacts, list[Finding]]:
    facts = await gather_facts(settings, nonce="test", patience=QUICK, **options)
    return facts, examine(facts)


async def found(*fleets: tuple[str, EngineSettings], more: str = "") -> list[Finding]:
    """Diagnose engines by their addresses alone; `more` is added to each option."""
    async with engines(*fleets) as running:
        options = [
            f"{each.url},alias=e{number}{_role(each)}{more}" for number, each in enumerate(running)
        ]
        return (await diagnose(told(*options)))[1]


def _role(engine: RunningEngine) -> str:
    return "" if engine.role == "mixed" else f",role={engine.role}"


async def test_nothing_is_found_of_a_fleet_that_is_well() -> None:
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
    name: str, level: Level, change: str, fleet: tuple[str, EngineSettings]
) -> None:
    """That finding, no other, and what to change."""
    (finding,) = {each.name: each for each in await found(fleet)}.values()

    assert (finding.name, finding.level) == (name, level)
    assert change in finding.change


async def test_engine_that_is_not_healthy_is_named() -> None:
    """It answers, and its engine core is dead, or it drains."""
    async with engines(("1", WELL)) as running:
        running[0].engine.is_draining = True
        _, (finding,) = await diagnose(told(running[0].url))

    assert finding.name == "unhealthy"
    assert "503" in finding.seen


async def test_seeded_xxhash_and_unshared_blocks_are_no_fault() -> None:
    """The same seed everywhere; or another one, where nobody looks for another's blocks."""
    seeded = engine_like(hash_algorithm="xxhash", kv_offloading=True, hash_seed="0")
    alone = engine_like(hash_algorithm="xxhash")

    assert await found(("2", seeded)) == []
    assert await found(("2", alone)) == []


async def test_ports_that_clash_are_found_by_asking_the_engine() -> None:
    """Rank 0 replays where rank 1 should publish, so rank 1 is mute."""
    findings = await found(("1", engine_like(dp_size=2, replay_distance=1)))

    clash = next(each for each in findings if each.name == "ports_clash")
    assert "replay of rank 0 and events of rank 1" in clash.seen
    assert "at least 2 away" in clash.change


async def test_ports_that_clash_are_found_in_the_file() -> None:
    """The engine isn't there: vLLM ends when a port is taken."""
    settings = told(
        "http://127.0.0.1:9,events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558,ranks=2"
    )
    _, findings = await diagnose(settings)

    assert [each.name for each in findings] == ["ports_clash", "unreachable"]


async def test_wrong_model_is_named_beside_the_right_one() -> None:
    """The file says one, /v1/models another."""
    async with engines(("1", WELL)) as running:
        settings = told(running[0].url)
        (entry,) = settings.instances
        entry = msgspec.structs.replace(entry, model="llama")
        settings = msgspec.structs.replace(settings, instances=(entry,))
        _, (finding,) = await diagnose(settings)

    assert finding.name == "wrong_model"
    assert "`model: sim`" in finding.change


async def test_key_of_the_engine_is_used() -> None:
    """With it everything can be seen; it is in no finding."""
    async with engines(("1", engine_like(api_key="s3cret", events=False))) as running:
        settings = load_settings(
            None, Overrides(instances=[running[0].url]), {"KVLB_ENGINE_API_KEY": "s3cret"}
        )
        _, findings = await diagnose(settings)

    assert [each.name for each in findings] == ["events_off"]
    assert "s3cret" not in str(findings)


async def test_short_keep_alive_is_measured() -> None:
    """The engine hangs up before our pool would."""
    async with engines(("1", engine_like(keep_alive_s=1))) as running:
        _, (finding,) = await diagnose(told(running[0].url, keep_alive_s=2.0))

    assert finding.name == "keep_alive_too_short"
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" in finding.change


async def test_block_sizes_of_a_model_are_compared() -> None:
    """As their events tell them."""
    (finding,) = await found(("1", WELL), ("1", engine_like(block_size=32)))

    assert finding.name == "block_sizes_differ"
    assert "16: e0; 32: e1" in finding.seen


async def test_rank_that_events_name_is_compared() -> None:
    """The file counts from 3, the engine from 0."""
    async with engines(("1", WELL)) as running:
        (host, _, port) = running[0].events_endpoint.rpartition(":")
        (_, _, replay) = (running[0].replay_endpoint or "").rpartition(":")
        sockets = f"events={host}:{int(port) - 3},replay={host}:{int(replay) - 3}"
        _, (finding,) = await diagnose(told(f"{running[0].url},ranks=1,rank_base=3,{sockets}"))

    assert finding.name == "wrong_rank"
    assert "name rank 0" in finding.seen
    assert "`rank_base`" in finding.change


async def test_port_that_nobody_serves_is_found() -> None:
    """A mapped port that was written down wrongly, for events and for replay."""
    async with engines(("1", WELL)) as running:
        settings = told(f"{running[0].url},events=tcp://127.0.0.1:9,replay=tcp://127.0.0.1:9")
        _, findings = await diagnose(settings)

    assert [each.name for each in findings] == ["events_unconnected", "replay_silent"]


async def test_silent_engine_is_found_by_a_request() -> None:
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


async def test_connection_that_a_running_indexer_holds_is_said() -> None:
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


async def test_prefill_engine_without_a_connector_hands_nothing_over() -> None:
    """`role: prefill` alone makes no transfer."""
    async with engines(("2", WELL)) as running:
        settings = told(f"{running[0].url},role=prefill", f"{running[1].url},role=decode")
        _, (finding,) = await diagnose(settings)

    assert (finding.name, finding.instance) == ("no_transfer", "p0")
    assert "--kv-transfer-config" in finding.change


async def test_transfer_leaves_no_reserved_blocks() -> None:
    """The decode leg fetches what the prefill leg kept."""
    async with engines(("1p1d", WELL)) as running:
        await diagnose(told(*map(instance_option, running)))
        kept = running[0].engine.ranks[0].core.reservations
        assert (kept.open, kept.released) == (0, 1)


async def test_nothing_is_sent_unless_wanted() -> None:
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


async def test_tokenizer_of_another_model_is_found(simulated_tokenizer: Path) -> None:
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


@pytest.fixture
def default_logs() -> Iterator[None]:
    """Commands set up logs for their process; other tests keep theirs."""
    kept = structlog.get_config()
    yield
    structlog.configure(**kept)


def run_kvlb(*arguments: str) -> Result:
    """The command in this thread."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


@pytest.mark.usefixtures("default_logs")
def test_command_prints_findings_and_exits_1(
    engines_beside: Callable[..., list[str]], tmp_path: Path
) -> None:
    """As a table for people, as JSON for programs."""
    options = [*engines_beside("1", engine_like(events=False)), *engines_beside("1")]
    config = tmp_path / "kvlb.yaml"
    instances = [{"url": each.partition(",")[0]} for each in options]
    keep_alive = {"keep_alive_s": IDLE_S}
    config.write_text(yaml.safe_dump({"instances": instances, "dataplane": keep_alive}))
    table = run_kvlb("doctor", "--config", str(config))
    printed = run_kvlb("doctor", "--config", str(config), "--format", "json")

    read = json.loads(printed.stdout)
    assert (table.exit_code, printed.exit_code, read["errors"]) == (1, 1, 1)
    assert [each["name"] for each in read["findings"]] == ["events_off"]
    assert "events_off" in table.stdout
    assert "--kv-events-config" in table.stdout


@pytest.mark.usefixtures("default_logs")
def test_command_exits_0_if_all_is_well(engines_beside: Callable[..., list[str]]) -> None:
    """And says what it looked at; a warning alone is no failure."""
    well = run_kvlb("doctor", "--instance", *engines_beside("1"))
    warned = run_kvlb("doctor", "--instance", *engines_beside("1", engine_like(replay=False)))

    assert (well.exit_code, well.stdout.strip()) == (0, "1 instance: m0. Nothing to change.")
    assert (warned.exit_code, "no_replay" in warned.stdout) == (0, True)


@pytest.mark.usefixtures("default_logs")
def test_command_without_engines_says_what_to_name() -> None:
    """Something to change before anything can be looked at."""
    assert "--instance" in str(run_kvlb("doctor").exception)


Pages = Mapping[str, tuple[int, object]]


@asynccontextmanager
async def canned(pages: Pages) -> AsyncIterator[str]:
    """A server that answers paths with what it was given, and hangs where that is None."""
    connections: list[tuple[asyncio.StreamWriter, asyncio.Task[None]]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        connections.append((writer, task))
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(length[1]) if length else 0)
                status, body = pages.get(head.split()[1].decode(), (404, {}))
                if body is None:
                    continue
                content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode()
                    + content
                )
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer, task in connections:
            writer.close()
            task.cancel()
        if connections:
            await asyncio.wait([task for _, task in connections])


MODELS = (200, {"data": [{"id": "sim"}]})


@pytest.mark.parametrize(
    ("pages", "name", "seen"),
    [
        ({"/health": (200, None)}, "unreachable", "no answer in time"),
        ({"/v1/models": (200, None)}, "unreachable", "no answer in time"),
        ({"/v1/models": (500, {})}, "not_vllm", "answered 500"),
        ({"/v1/models": (200, "hello")}, "not_vllm", "list `data`"),
        ({"/v1/models": (200, {"data": []})}, "not_vllm", "no base model"),
    ],
)
async def test_what_is_no_engine_is_named(pages: Pages, name: str, seen: str) -> None:
    """It hangs, it fails, or it is another program."""
    async with canned({"/health": (200, ""), **pages}) as url:
        facts = await gather_facts(told(url), nonce="test", patience=replace(QUICK, http_s=0.3))
    (finding,) = examine(facts)

    assert finding.name == name
    assert seen in finding.seen


async def test_a_balancer_in_an_engines_place_is_named() -> None:
    """Its model list is as an engine's, and it would get nothing."""
    async with engines(("1", WELL)) as running:
        settings = load_settings(None, Overrides(instances=(running[0].url,), port=0), {})
        async with running_kvlb(settings) as kvlb:
            _, (finding,) = await diagnose(told(kvlb.url))

    assert finding.name == "not_vllm"
    assert "kvlb balancer" in finding.seen


async def test_engine_that_says_little_is_judged_by_what_it_says() -> None:
    """A build without a version, sources that can't be read, no metrics, no tokens."""
    sources = {
        "0": "x",
        "1": {"endpoint": "nonsense"},
        "2": {"endpoint": "tcp://*:5557", "enable_kv_cache_events": False},
        "3": {"endpoint": "tcp://*:5557", "publisher": "null"},
    }
    pages: dict[str, tuple[int, object]] = {
        "/health": (200, ""),
        "/v1/models": MODELS,
        "/version": (200, {"version": "0.1.dev1+g1234567"}),
        "/kv_event_sources": (200, sources),
        "/tokenize": (200, {"tokens": "x"}),
    }
    async with canned(pages) as url:
        facts, (finding,) = await diagnose(told(url))

    assert (facts.instances[0].version, facts.instances[0].declared) == (None, {})
    assert finding.name == "events_off"


async def test_request_that_fails_is_a_finding() -> None:
    """The engine lists its model and answers nothing."""
    pages: dict[str, tuple[int, object]] = {
        "/health": (200, ""),
        "/v1/models": MODELS,
        "/kv_event_sources": (200, {}),
        "/tokenize": (200, {"tokens": list(range(300))}),
    }
    broken = {**pages, "/v1/completions": (500, {})}
    silent = {**pages, "/v1/completions": (200, None)}
    said = []
    for each in (broken, silent):
        async with canned(each) as url:
            facts = await gather_facts(told(url), nonce="test", patience=replace(QUICK, http_s=0.3))
        said += [finding.seen for finding in examine(facts) if finding.name == "request_failed"]

    assert said == [
        "a completion of one token: status 500",
        "a completion of one token: no answer in time",
    ]


@pytest.mark.parametrize(
    ("completions", "seen"),
    [
        ((500, {}), "status 500"),
        ((200, "no json"), "status 200"),
        ((200, None), "no answer in time"),
        ((200, {"kv_transfer_params": None}), "names no blocks"),
    ],
)
async def test_prefill_leg_that_fails_says_how(completions: tuple[int, object], seen: str) -> None:
    """Whatever comes back in place of an address."""
    pages: dict[str, tuple[int, object]] = {
        "/health": (200, ""),
        "/v1/models": MODELS,
        "/kv_event_sources": (200, {}),
        "/tokenize": (200, {"tokens": list(range(300))}),
        "/v1/completions": completions,
    }
    async with canned(pages) as url:
        facts = await gather_facts(
            told(f"{url},role=prefill"), nonce="test", patience=replace(QUICK, http_s=0.3)
        )
    (finding,) = (each for each in examine(facts) if each.name == "no_transfer")

    assert seen in finding.seen


async def test_address_that_swallows_connections_is_out_of_reach() -> None:
    """Nobody says no, nobody answers."""
    async with engines(("1p", engine_like(side_channel_host="192.0.2.1"))) as running:
        _, findings = await diagnose(told(instance_option(running[0])))

    assert {each.name for each in findings} == {"nixl_unreachable", "role_alone"}
