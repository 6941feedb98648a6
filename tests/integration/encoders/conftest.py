"""Simulated encode engines and those that they encode for, a balancer, and chats with one right answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from simulator.core import tokenizer
from simulator.core.chat_template import render_chat
from simulator.core.generation import seed_answer
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet

FAST = EngineSettings(
    inter_token_ms=1.0, prefill_tokens_per_s=1e5, transfer_tokens_per_s=1e6, encode_ms=1.0
)
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Engines, and a client of the balancer in front of them."""

    fleet: RunningFleet
    http: httpx.AsyncClient

    def engine(self, name: str) -> RunningEngine:
        return next(each for each in self.fleet.engines if each.name == name)

    def counts(self, role: str) -> dict[str, int]:
        """What the encoders of all engines of a role did."""
        summed: dict[str, int] = {}
        for each in self.fleet.engines:
            if each.role == role and each.is_running:
                counts = each.engine.encoder.counts
                for name in ("runs", "loaded", "aborted", "lost"):
                    summed[name] = summed.get(name, 0) + getattr(counts, name)
        return summed

    def legs(self, name: str) -> list[dict[str, Any]]:
        """Bodies of the chats that an engine was sent."""
        received = self.engine(name).engine.received
        return [msgspec.json.decode(each.body) for each in received if each.path == CHAT]

    async def ask(self, *images: str, **fields: Any) -> httpx.Response:
        return await self.http.post(CHAT, json=_body(*images, **fields))

    async def last(self) -> dict[str, Any]:
        """The newest entry of the decision log."""
        answer = await self.http.get("/explain/recent")
        newest: dict[str, Any] = answer.json()["decisions"][0]
        return newest

    async def until(self, is_so: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(20):
            while not await is_so():  # noqa: ASYNC110 - another process would be asked so, too
                await asyncio.sleep(0.005)


def _body(*images: str, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what do you see? " * 40}]
    parts += [{"type": "image_url", "image_url": {"url": f"data:,{each}"}} for each in images]
    chat = {"model": "sim", "messages": [{"role": "user", "content": parts}], "max_tokens": 5}
    return chat | fields


@pytest.fixture
def body() -> Callable[..., dict[str, Any]]:
    """A chat about these images."""
    return _body


@pytest.fixture
def expected_text() -> Callable[..., str]:
    """What any engine says to this chat."""

    def say(*images: str) -> str:
        text = render_chat(_body(*images)["messages"], takes_media=True)
        sampler = seed_answer(tokenizer.encode(text, add_special_tokens=False), 0)
        return tokenizer.decode([sampler.token_at(index, may_end=True) for index in range(5)])

    return say


@pytest.fixture
def text_of() -> Callable[[httpx.Response], Any]:
    """What an answer says."""

    def read(answer: httpx.Response) -> Any:
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    return read


@asynccontextmanager
async def _on_stage(
    fleet: str,
    connector: str,
    path: Path,
    *,
    encode: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[Stage]:
    """Run engines and a balancer that was told of them in a file."""
    settings = msgspec.structs.replace(FAST, ec_connector=connector, **engine)
    async with running_fleet(FleetSpec.parse(fleet), engine=settings) as engines:
        entries = [
            {"url": each.url, "alias": each.name, "role": each.role}
            | ({"connector": f"ec_{connector}"} if each.role == "encode" else {})
            | ({"ec_zmq_addrs": list(each.ec_zmq_addrs)} if each.ec_zmq_addrs else {})
            for each in engines.engines
        ]
        told = {
            "instances": entries,
            "pd": {"force": "remote"},
            "probes": {"interval_s": 0.05, "unhealthy_after": 1},
            "encode": encode or {},
        }
        _write(path, told | (more or {}))
        async with (
            running_kvlb(load_settings(path, Overrides(port=0), {})) as kvlb,
            httpx.AsyncClient(base_url=kvlb.url, trust_env=False, timeout=20) as http,
        ):
            stage = Stage(fleet=engines, http=http)

            async def is_ready() -> bool:
                status = (await http.get("/status")).json()
                return all(each["healthy"] for each in status["instances"])

            await stage.until(is_ready)
            yield stage


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(settings))


@pytest.fixture
def on_stage() -> Callable[..., AbstractAsyncContextManager[Stage]]:
    """Run engines and a balancer that was told of them in a file."""
    return _on_stage
