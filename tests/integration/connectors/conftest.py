"""Simulated engines of every connector, a balancer in front of them, and prompts with one right answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

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


@pytest.fixture
def cases() -> dict[str, Case]:
    """All of them, by name."""
    return CASES


@pytest.fixture
def make_case() -> Callable[..., Case]:
    """For a test that wants another."""
    return Case


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    """Each of them."""
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
        return await self.http.post("/v1/completions", json=_body(number, **fields))

    async def until(self, is_so: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(20):
            while not await is_so():  # noqa: ASYNC110 - another process would be asked so, too
                await asyncio.sleep(0.005)

    async def until_state(self, name: str, key: str, value: int) -> None:
        async def is_so() -> bool:
            return bool((await self.state(name))[key] == value)

        await self.until(is_so)


def _body(number: int, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    first = 10_000 * (number + 1)
    prompt = [65 + (first + each * each) % 26 for each in range(tokens)]
    return {"model": "sim", "prompt": [number + 33, *prompt[1:]], "max_tokens": 5} | fields


@pytest.fixture
def make_stage() -> Callable[..., Stage]:
    """For a test that runs its own balancer."""
    return Stage


@pytest.fixture
def body() -> Callable[..., dict[str, Any]]:
    """A completion whose prompt shares nothing with one of another number."""
    return _body


@asynccontextmanager
async def _on_stage(
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
        _write_settings(path, entries, routing or {})
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


def _write_settings(path: Path, entries: list[dict[str, Any]], routing: dict[str, Any]) -> None:
    pd = {"force": "remote", "prefill_attempts": 2}
    probes = {"interval_s": 0.05, "unhealthy_after": 1}
    settings = {"instances": entries, "pd": pd, "probes": probes, "routing": routing}
    path.write_text(yaml.safe_dump(settings))


@pytest.fixture
def on_stage() -> Callable[..., AbstractAsyncContextManager[Stage]]:
    """Run engines and a balancer that was told of them in a file."""
    return _on_stage


@pytest.fixture
def expected_text() -> Callable[[int], str]:
    """What any engine says to this prompt that has computed or read it right."""

    def say(number: int) -> str:
        sampler = seed_answer(_body(number)["prompt"], 0)
        return tokenizer.decode([sampler.token_at(index, may_end=True) for index in range(5)])

    return say
