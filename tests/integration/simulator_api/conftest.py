"""One simulated engine over HTTP, and a client for it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, running_fleet


class Api:
    """One engine and a client for it."""

    def __init__(self, engine: RunningEngine, client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.client = client

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=named)

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", {"prompt": "hello", "max_tokens": 4} | body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def chat(self, *contents: str, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content} for content in contents]
        response = await self.post("/v1/chat/completions", {"messages": messages} | body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, path: str, body: Any) -> list[Any]:
        """Return the events of a stream, the end marker as it is."""
        response = await self.post(path, body | {"stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    async def state(self) -> dict[str, Any]:
        """Return the state of rank 0."""
        answer: dict[str, Any] = (await self.client.get("/simulator/state")).json()["ranks"][0]
        return answer

    async def wait_until(self, **expected: int) -> None:
        """Wait until the state of rank 0 has these values."""
        async with asyncio.timeout(20):
            while True:
                state = await self.state()
                if all(state[name] == value for name, value in expected.items()):
                    return
                await asyncio.sleep(0.005)


@asynccontextmanager
async def _started_engine(**settings: Any) -> AsyncIterator[Api]:
    fast = {"prefill_tokens_per_s": 1e6, "inter_token_ms": 0.5, "num_blocks": 512}
    engine = EngineSettings(**(fast | settings))
    async with (
        running_fleet(FleetSpec.parse("1"), engine=engine) as fleet,
        httpx.AsyncClient(base_url=fleet.engines[0].url) as client,
    ):
        yield Api(fleet.engines[0], client)


@pytest.fixture
def started_engine() -> Callable[..., AbstractAsyncContextManager[Api]]:
    """Start an engine with these settings, for `async with`."""
    return _started_engine


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """An engine with one adapter."""
    async with _started_engine(adapters=("sql",)) as api:
        yield api
