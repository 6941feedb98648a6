"""Every connector end to end: kvlb's own process over simulated engines that insist on its fields."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
import zmq

from balancer.core.settings.control import TokensSettings
from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from simulator.core import tokenizer
from simulator.core.generation import seed_answer
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet

TOKENS = 600
FAST = EngineSettings(
    inter_token_ms=1.0, prefill_tokens_per_s=1e5, transfer_tokens_per_s=1e6, num_blocks=1024
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of handing over."""

    connector: str
    engine: dict[str, Any] = field(default_factory=dict)
    transfer: Callable[[RunningEngine], dict[str, Any]] = lambda _: {}
    simulated: Any = None
    """The simulator's name of it, where it is another."""
    loads_all: bool = True
    """All but the last token come from the prefill engine."""
    keeps: bool = True
    """The prefill engine holds blocks until they have been fetched."""

    def settings(self, **more: Any) -> EngineSettings:
        name = self.simulated or self.connector
        return msgspec.structs.replace(FAST, kv_connector=name, **(self.engine | more))


def mooncake(engine: RunningEngine) -> dict[str, Any]:
    return {"bootstrap_port": engine.bootstrap_port}


def addressed(engine: RunningEngine) -> dict[str, Any]:
    return {"zmq_address": engine.zmq_address}


def in_ids(engine: RunningEngine) -> dict[str, Any]:
    return {"zmq_address": engine.zmq_address, "addresses": "request_id"}


def reading(engine: RunningEngine) -> dict[str, Any]:
    return {"zmq_address": engine.zmq_address, "mode": "READ"}


def peer(engine: RunningEngine) -> dict[str, Any]:
    return {"p2p_host": "127.0.0.1", "p2p_port": engine.side_port}


CASES = {
    "nixl": Case(connector="nixl"),
    "nixl-0.20": Case(connector="nixl", engine={"version": "0.20.0"}),
    "nixl-two-ways": Case(
        connector="nixl",
        engine={"bidirectional": True},
        transfer=lambda _: {"bidirectional": True},
        keeps=False,  # so does the decode engine, for the next turn
    ),
    "nixl-push": Case(connector="nixl_push"),
    "nixl-push-0.34": Case(connector="nixl_push", engine={"version": "0.34.0"}),
    "nixl-push-ranks": Case(connector="nixl_push", engine={"dp_size": 2}),
    "mooncake": Case(connector="mooncake", transfer=mooncake),
    "mooncake-ranks": Case(connector="mooncake", transfer=mooncake, engine={"dp_size": 2}),
    "moriio-write": Case(connector="moriio", transfer=addressed),
    "moriio-ids": Case(connector="moriio", transfer=in_ids),
    "moriio-ranks": Case(connector="moriio", transfer=addressed, engine={"dp_size": 2}),
    "moriio-read": Case(connector="moriio", transfer=reading, engine={"reads": True}),
    "p2p-nccl": Case(
        connector="p2p_nccl",
        transfer=addressed,
        engine={"version": "0.23.0", "randomizes_ids": False},
    ),
    "p2p-nccl-0.13": Case(connector="p2p_nccl", transfer=addressed, engine={"version": "0.13.0"}),
    "example": Case(connector="example", loads_all=False),
    "lmcache": Case(connector="lmcache", loads_all=False),
    "offloading": Case(connector="offloading", transfer=peer),
    "offloading-decoder-first": Case(
        connector="offloading", transfer=lambda each: {**peer(each), "decoder_first": True}
    ),
    "multi": Case(
        connector="multi",
        simulated="mooncake",
        transfer=lambda each: {"children": {"mooncake": mooncake(each), "lmcache": {}}},
    ),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Engines, and a client of the balancer in front of them."""

    fleet: RunningFleet
    http: httpx.AsyncClient
    direct: httpx.AsyncClient

    def engine(self, name: str) -> RunningEngine:
        return next(each for each in self.fleet.engines if each.name == name)

    async def state(self, name: str) -> dict[str, Any]:
        """Figures of an engine, summed over its ranks."""
        answer = (await self.direct.get(f"{self.engine(name).url}/simulator/state")).json()
        summed: dict[str, Any] = {}
        for rank in answer["ranks"]:
            for key, value in rank.items():
                if isinstance(value, int):
                    summed[key] = summed.get(key, 0) + value
        return summed

    async def complete(self, number: int = 0, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json=body(number, **fields))

    async def until(self, is_so: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(20):
            while not await is_so():  # noqa: ASYNC110 - another process would be asked so, too
                await asyncio.sleep(0.005)

    async def until_state(self, name: str, key: str, value: int) -> None:
        async def is_so() -> bool:
            return bool((await self.state(name))[key] == value)

        await self.until(is_so)


def body(number: int, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    first = 10_000 * (number + 1)
    prompt = [65 + (first + each * each) % 26 for each in range(tokens)]
    return {"model": "sim", "prompt": [number + 33, *prompt[1:]], "max_tokens": 5} | fields


@asynccontextmanager
async def on_stage(
    case: Case, fleet: str, path: Path, *, routing: dict[str, Any] | None = None, **engine: Any
) -> AsyncIterator[Stage]:
    """Run engines and a balancer that was told of them in a file."""
    async with running_fleet(FleetSpec.parse(fleet), engine=case.settings(**engine)) as engines:
        entries = [
            {
                "url": each.url,
                "alias": each.name,
                "role": each.role,
                "connector": case.connector,
                "transfer": case.transfer(each),
                "ranks": each.settings.dp_size,
            }
            for each in engines.engines
        ]
        write_settings(path, entries, routing or {})
        settings = msgspec.structs.replace(
            load_settings(path, Overrides(port=0), {}), tokens=TokensSettings(deadline_s=10.0)
        )
        async with (
            running_kvlb(settings) as kvlb,
            httpx.AsyncClient(base_url=kvlb.url, trust_env=False, timeout=20) as http,
            httpx.AsyncClient(trust_env=False, timeout=20) as direct,
        ):
            stage = Stage(fleet=engines, http=http, direct=direct)

            async def is_ready() -> bool:
                status = (await http.get("/status")).json()
                return all(each["healthy"] for each in status["instances"])

            await stage.until(is_ready)
            yield stage


def write_settings(path: Path, entries: list[dict[str, Any]], routing: dict[str, Any]) -> None:
    pd = {"force": "remote", "prefill_attempts": 2}
    probes = {"interval_s": 0.05, "unhealthy_after": 1}
    settings = {"instances": entries, "pd": pd, "probes": probes, "routing": routing}
    path.write_text(yaml.safe_dump(settings))


async def test_two_legs_say_what_one_engine_says(case: Case, tmp_path: Path) -> None:
    """The prompt is computed once, on the prefill engine; nothing stays pinned, nothing is corrupt."""
    async with on_stage(case, "1p1d", tmp_path / "kvlb.yaml") as stage:
        answers = [await stage.complete(number, stream=number == 1) for number in range(3)]
        prefill, decode = await stage.state("p0"), await stage.state("d0")

    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    assert {answer.headers["x-kvlb-prefill"] for answer in answers} == {"p0"}
    assert answers[2].json()["choices"][0]["text"] == expected_text(2)
    assert answers[2].json()["usage"]["completion_tokens"] == 5
    assert prefill["computed_prompt_tokens"] == 3 * TOKENS
    if case.loads_all:
        assert decode["computed_prompt_tokens"] == 3
    else:
        assert decode["computed_prompt_tokens"] < TOKENS
    assert prefill["reservations_unreleased"] == 0
    assert (decode["corrupt_reads"], decode["failed_loads"]) == (0, 0)


def expected_text(number: int) -> str:
    """What any engine says to this prompt that has computed or read it right."""
    sampler = seed_answer(body(number)["prompt"], 0)
    return tokenizer.decode([sampler.token_at(index, may_end=True) for index in range(5)])


async def test_a_prefill_engine_killed_during_its_leg_is_replaced(
    case: Case, tmp_path: Path
) -> None:
    """The client gets its answer; the decode engine isn't left waiting."""
    slow: dict[str, Any] = {"prefill_tokens_per_s": 1500.0}
    async with on_stage(case, "2p1d", tmp_path / "kvlb.yaml", **slow) as stage:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(stage.complete())
            victim = await running_prefill(stage)
            await stage.fleet.stop(victim)
        answer = asked.result()
        await stage.until_state("d0", "in_flight", 0)
        decode = await stage.state("d0")

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvlb-prefill"] != victim.name
    assert answer.json()["choices"][0]["text"] == expected_text(0)
    assert decode["corrupt_reads"] == 0


async def running_prefill(stage: Stage) -> RunningEngine:
    """Wait until one of the prefill engines computes; it is that one."""
    sources = [each for each in stage.fleet.engines if each.role == "prefill"]
    async with asyncio.timeout(20):
        while True:
            for each in sources:
                if any(rank.in_flight for rank in each.engine.ranks):
                    return each
            await asyncio.sleep(0.002)


async def test_a_decode_engine_killed_before_its_first_byte_is_replaced(
    case: Case, tmp_path: Path
) -> None:
    """Both legs run again, since the transfer may be spent; the client gets its answer."""
    slow: dict[str, Any] = {"transfer_latency_ms": 400.0}
    async with on_stage(case, "1p2d", tmp_path / "kvlb.yaml", **slow) as stage:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(stage.complete())
            victim = await loading_decode(stage)
            await stage.fleet.stop(victim)
        answer = asked.result()

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvlb-instance"] != victim.name
    assert answer.json()["choices"][0]["text"] == expected_text(0)


async def loading_decode(stage: Stage) -> RunningEngine:
    """Wait until one of the decode engines has the request; it is that one."""
    targets = [each for each in stage.fleet.engines if each.role == "decode"]
    async with asyncio.timeout(20):
        while True:
            for each in targets:
                if any(rank.in_flight for rank in each.engine.ranks):
                    return each
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("name", ["nixl", "nixl-push", "mooncake", "moriio-write", "p2p-nccl"])
async def test_without_a_prefill_engine_left_it_is_a_503(name: str, tmp_path: Path) -> None:
    """Before anybody knows that they are gone, and after; streamed and not."""
    async with on_stage(CASES[name], "2p2d", tmp_path / "kvlb.yaml") as stage:
        for each in stage.fleet.engines:
            if each.role == "prefill":
                await stage.fleet.stop(each)
        answers = [await stage.complete(number, stream=number % 2 == 1) for number in range(4)]

    assert [answer.status_code for answer in answers] == [503] * 4
    codes = [answer.json()["error"]["code"] for answer in answers]
    assert set(codes) <= {"prefill_failed", "no_instance"}
    assert codes[-1] == "no_instance"


async def test_a_prefill_engine_killed_after_its_leg_is_replaced(
    case: Case, tmp_path: Path
) -> None:
    """What the decode engine was about to read is gone: both legs run again, or a storage has it."""
    slow: dict[str, Any] = {"transfer_latency_ms": 400.0}
    async with on_stage(case, "2p1d", tmp_path / "kvlb.yaml", **slow) as stage:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(stage.complete())
            victim = await finished_prefill(stage)
            await stage.fleet.stop(victim)
        answer = asked.result()
        await stage.until_state("d0", "in_flight", 0)
        decode = await stage.state("d0")

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text(0)
    assert decode["corrupt_reads"] == 0


async def finished_prefill(stage: Stage) -> RunningEngine:
    """Wait until one of the prefill engines has computed while decode is still reading."""
    sources = [each for each in stage.fleet.engines if each.role == "prefill"]
    decode = stage.engine("d0").engine
    async with asyncio.timeout(20):
        while True:
            done = [each for each in sources if has_answered(each)]
            if done and any(rank.in_flight for rank in decode.ranks):
                return done[0]
            await asyncio.sleep(0.002)


def has_answered(engine: RunningEngine) -> bool:
    """It has sampled a token and has nothing to do any more."""
    ranks = engine.engine.ranks
    tokens = sum(rank.core.statistics.generation_tokens for rank in ranks)
    return tokens > 0 and not any(rank.in_flight for rank in ranks)


async def test_a_decode_engine_killed_behind_its_first_byte_ends_its_stream_with_an_error(
    case: Case, tmp_path: Path
) -> None:
    """Nothing looks like an end; the prefill engine keeps nothing for it beyond what it had read."""
    slow: dict[str, Any] = {"inter_token_ms": 20.0}
    asked = body(0, stream=True, max_tokens=400, ignore_eos=True)
    async with on_stage(case, "1p2d", tmp_path / "kvlb.yaml", **slow) as stage:
        lines: list[str] = []
        with suppress(httpx.RemoteProtocolError):  # behind the event the connection breaks
            async with stage.http.stream("POST", "/v1/completions", json=asked) as answer:
                victim = stage.engine(answer.headers["x-kvlb-instance"])
                async for line in answer.aiter_lines():
                    if not lines:
                        await stage.fleet.stop(victim)
                    lines += [line.removeprefix("data: ")] if line else []
        prefill = await stage.state("p0")

    *events, last = lines
    assert answer.status_code == 200
    assert set(msgspec.json.decode(last)["error"]) >= {"message", "type", "code"}
    assert [choice["finish_reason"] for choice in choices_of(events)] == [None] * len(events)
    assert prefill["reservations_unreleased"] == 0


def choices_of(events: list[str]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(event)["choices"][0] for event in events]


@pytest.mark.parametrize("name", ["mooncake", "nixl-push"])
async def test_a_prefill_engine_that_restarts_is_known_anew(name: str, tmp_path: Path) -> None:
    """Its engine id is another one, which is asked for with the next probe."""
    async with on_stage(CASES[name], "1p1d", tmp_path / "kvlb.yaml") as stage:
        before = await stage.complete(0)
        engine = stage.engine("p0")
        old = engine.engine.engine_id
        await stage.fleet.restart(engine)
        assert engine.engine.engine_id != old
        await stage.until(lambda: answers(stage))
        decode = await stage.state("d0")

    assert before.status_code == 200
    assert decode["computed_prompt_tokens"] >= 2


async def answers(stage: Stage) -> bool:
    return (await stage.complete(1)).status_code == 200


async def test_shared_storage_is_not_used_where_it_would_mix_tenants_up(tmp_path: Path) -> None:
    """A salted prompt, and the length the engine dies of, are computed where they decode."""
    async with on_stage(CASES["example"], "1p1d", tmp_path / "kvlb.yaml") as stage:
        answers = [
            await stage.complete(0),
            await stage.complete(0, cache_salt="tenant"),
            await stage.complete(1, tokens=320 + 1),
        ]
        health = await stage.direct.get(f"{stage.engine('d0').url}/health")

    assert [each.headers["x-kvlb-reason"] for each in answers] == [
        "forced_remote",
        "not_splittable",
        "not_splittable",
    ]
    assert health.status_code == 200


BOUND = [
    pytest.param("/v1/completions", {"prompt": "a" * 900, "n": 2}, id="not-splittable"),
    pytest.param(
        "/v1/messages", {"messages": [{"role": "user", "content": "a" * 900}]}, id="whole"
    ),
    pytest.param("/v1/chat/completions/batch", {"messages": []}, id="whole-and-not-scored"),
]


@pytest.mark.parametrize(("path", "body"), BOUND)
async def test_engine_that_waits_for_blocks_gets_no_request_without_a_prefill_leg(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    """In READ mode it would answer from blocks that nobody filled."""
    async with on_stage(CASES["moriio-read"], "1p1d", tmp_path / "kvlb.yaml") as stage:
        answer = await stage.http.post(path, json={"model": "sim", "max_tokens": 2, **body})
        decode = await stage.state("d0")

    assert answer.status_code == 503, answer.text
    assert "without a prefill leg" in answer.text
    assert decode["computed_prompt_tokens"] == 0


async def test_an_idle_engine_fetches_what_another_holds(tmp_path: Path) -> None:
    """The index names the peer; what was there isn't computed again."""
    case = Case(
        connector="offloading", transfer=lambda each: {**peer(each), "pull_min_tokens": 256}
    )
    routing = {"policy": "round_robin", "lookup_timeout_s": 1.0}
    async with on_stage(case, "2", tmp_path / "kvlb.yaml", routing=routing) as stage:
        first = await stage.complete()
        holder = first.headers["x-kvlb-instance"]

        async def is_indexed() -> bool:
            status = (await stage.http.get("/status")).json()
            held = [
                rank["index"]["held_blocks"]
                for each in status["instances"]
                for rank in each["ranks"]
                if each["alias"] == holder and rank["index"]
            ]
            return bool(held and held[0] >= TOKENS // 16)

        await stage.until(is_indexed)
        second = await stage.complete()
        states = {name: await stage.state(name) for name in ("m0", "m1")}

    other = second.headers["x-kvlb-instance"]
    assert other != holder
    assert second.json()["choices"][0]["text"] == expected_text(0)
    assert states[other]["computed_prompt_tokens"] <= 16


async def test_the_next_turn_reads_what_decode_computed(tmp_path: Path) -> None:
    """The last turn's blocks come from the decode engine, though the prefill engine has died."""
    chat = {"model": "sim", "max_tokens": 200, "conversation_id": "c", "ignore_eos": True}
    first = [{"role": "user", "content": "tell me of it " * 60}]
    async with on_stage(
        CASES["nixl-two-ways"], "2p1d", tmp_path / "kvlb.yaml", inter_token_ms=0.2
    ) as stage:
        await stage.complete()  # from now on the block size is known
        said = await stage.http.post("/v1/chat/completions", json={**chat, "messages": first})
        text = said.json()["choices"][0]["message"]["content"]
        turn = [
            *first,
            {"role": "assistant", "content": text},
            {"role": "user", "content": "and more of it " * 40},
        ]
        source = said.headers["x-kvlb-prefill"]
        await stage.fleet.stop(stage.engine(source))
        other = "p1" if source == "p0" else "p0"
        before = await stage.state(other)
        again = await stage.http.post("/v1/chat/completions", json={**chat, "messages": turn})
        after, decode = await stage.state(other), await stage.state("d0")

    assert (said.status_code, again.status_code) == (200, 200), again.text
    prompt = again.json()["usage"]["prompt_tokens"]
    answered = said.json()["usage"]["prompt_tokens"]
    computed = after["computed_prompt_tokens"] - before["computed_prompt_tokens"]
    assert computed <= prompt - answered
    assert (after["corrupt_reads"], decode["corrupt_reads"]) == (0, 0)
    assert decode["reservations_released"] == 1


@pytest.mark.parametrize("name", ["moriio-write", "moriio-read", "p2p-nccl"])
async def test_engines_that_register_themselves_need_no_description(
    name: str, tmp_path: Path, unused_port: int
) -> None:
    """Address, sizes and mode are as they announce them."""
    case, path = CASES[name], tmp_path / "kvlb.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "registration": {"port": unused_port},
                "pd": {"force": "remote"},
                "probes": {"interval_s": 0.05},
            }
        )
    )
    settings = msgspec.structs.replace(
        load_settings(path, Overrides(port=0), {}), tokens=TokensSettings(deadline_s=10.0)
    )
    async with (
        running_fleet(FleetSpec.parse("1p1d"), engine=case.settings()) as engines,
        running_kvlb(settings) as kvlb,
        httpx.AsyncClient(base_url=kvlb.url, trust_env=False, timeout=20) as http,
        httpx.AsyncClient(trust_env=False, timeout=20) as direct,
    ):
        stage = Stage(fleet=engines, http=http, direct=direct)

        async def is_ready() -> bool:
            announce(engines, case, unused_port)
            status = (await http.get("/status")).json()
            return [each["healthy"] for each in status["instances"]] == [True, True]

        await stage.until(is_ready)
        answer = await stage.complete()
        decode = await stage.state("d0")

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text(0)
    assert decode["computed_prompt_tokens"] == 1


def announce(engines: RunningFleet, case: Case, port: int) -> None:
    """One beat of every engine, as its first worker sends it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    for each in engines.engines:
        message: dict[str, Any] = {
            "type": "P" if each.role == "prefill" else "D",
            "http_address": each.url.removeprefix("http://"),
            "zmq_address": each.zmq_address,
        }
        if case.connector == "moriio":
            mode = "READ" if each.settings.reads else "WRITE"
            message |= {"dp_size": 1, "tp_size": 1, "transfer_mode": mode}
        with context.socket(zmq.DEALER) as beat:
            beat.setsockopt(zmq.LINGER, 1000)
            if case.connector == "p2p_nccl":
                beat.setsockopt(zmq.IDENTITY, each.zmq_address.encode())
            beat.connect(f"tcp://127.0.0.1:{port}")
            beat.send(msgspec.msgpack.encode(message))


@pytest.fixture
def unused_port(reserved: Any) -> int:
    port: int = reserved.port()
    return port


REFUSED: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": "five"},
    {"max_tokens": 5, "min_tokens": 6},
    {"n": 0},
]


@pytest.mark.parametrize("case", ["p2p-nccl", "moriio-read"])
async def test_engine_that_waits_for_blocks_refuses_in_its_own_words(
    case: str, tmp_path: Path
) -> None:
    """What is wrong with a request is told as 4xx, though it can't run over two legs."""
    async with on_stage(CASES[case], "1p1d", tmp_path / "kvlb.yaml") as stage:
        told, expected = [], []
        for body in REFUSED:
            asked = {"model": "sim", "prompt": "a" * 900, **body}
            answer = await stage.http.post("/v1/completions", json=asked)
            engine = await stage.direct.post(f"{stage.engine('d0').url}/v1/completions", json=asked)
            told.append((answer.status_code, answer.json()))
            expected.append((engine.status_code, engine.json()))
        computed = [(await stage.state(name))["computed_prompt_tokens"] for name in ("p0", "d0")]

    assert {status for status, _ in told} == {400}
    assert told == expected
    assert computed == [0, 0]
