"""Our side of a connection to a fake engine, and what such an engine does when it is well."""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.upstream import Upstream


@pytest.fixture
def opened() -> Callable[..., AbstractAsyncContextManager[Upstream]]:
    """Connections to engines that are closed with the `async with` block."""

    @asynccontextmanager
    async def start(**limits: Any) -> AsyncIterator[Upstream]:
        usual = {"connect_timeout_s": 2.0, "first_byte_timeout_s": 5.0, "idle_timeout_s": 5.0}
        upstream = Upstream(**usual | limits)
        try:
            yield upstream
        finally:
            await upstream.close()

    return start


@pytest.fixture
def get() -> Callable[..., Coroutine[Any, Any, UpstreamAnswer]]:
    """Ask a fake engine for something."""

    async def ask(upstream: Upstream, engine: Any, method: str = "GET") -> UpstreamAnswer:
        return await upstream.send(engine.url, method, "/x", (), b"")

    return ask


@pytest.fixture
def answer_ok() -> Callable[[Any, Any], Awaitable[None]]:
    """A script that says over which connection it was asked."""

    async def script(received: Any, wire: Any) -> None:
        await wire.json({"connection": received.connection})

    return script


@pytest.fixture
def stay_silent() -> Callable[[Any, Any], Awaitable[None]]:
    """A script that never answers."""

    async def script(received: Any, wire: Any) -> None:
        await received.gone.wait()

    return script
