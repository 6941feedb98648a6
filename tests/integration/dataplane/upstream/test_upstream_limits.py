"""Silence has its limits: while connecting, before the first byte, between chunks."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from balancer.core.errors import ConnectTimeoutError, EngineTimeoutError, EngineUnreachableError
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.upstream import Upstream

Opened = Callable[..., AbstractAsyncContextManager[Upstream]]
Get = Callable[..., Coroutine[Any, Any, UpstreamAnswer]]
Script = Callable[[Any, Any], Awaitable[None]]

EngineFactory = Callable[..., AbstractAsyncContextManager[Any]]


async def test_nobody_listening_is_unreachable(opened: Opened) -> None:
    """A refused connection says that the engine saw nothing."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with opened() as upstream:
            with pytest.raises(EngineUnreachableError):
                await upstream.send(url, "GET", "/", (), b"")


async def test_connect_limit_is_a_retryable_timeout(opened: Opened) -> None:
    """A host that doesn't complete the handshake costs the connect limit."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with socket.socket() as one, socket.socket() as two:
            for each in (one, two):  # fill the accept queue: the next SYN gets no answer
                each.setblocking(False)
                each.connect_ex(address)
            async with opened(connect_timeout_s=0.1) as upstream:
                with pytest.raises(ConnectTimeoutError) as caught:
                    await upstream.send(f"http://127.0.0.1:{address[1]}", "GET", "/", (), b"")

    assert caught.value.retryable


async def test_first_byte_limit(
    engine: EngineFactory, opened: Opened, get: Get, stay_silent: Script
) -> None:
    """Silence before the answer ends in a timeout, and the engine sees the close."""
    async with engine(stay_silent) as fake, opened(first_byte_timeout_s=0.1) as upstream:
        with pytest.raises(EngineTimeoutError):
            await get(upstream, fake)

        await fake.wait_for_connections(0)


async def test_first_byte_limit_covers_silence_after_the_headers(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """Engines send a stream's headers before the prefill: the idle limit doesn't apply yet."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head()
        await asyncio.sleep(0.3)
        await wire.chunk(b"late")
        await wire.end()

    async with engine(script) as fake, opened(idle_timeout_s=0.1) as upstream:
        assert await (await get(upstream, fake)).read(10) == b"late"


async def test_idle_limit_between_chunks(engine: EngineFactory, opened: Opened, get: Get) -> None:
    """Silence in the middle of an answer ends in a timeout after what had arrived."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head()
        await wire.chunk(b"one")
        await received.gone.wait()

    async with engine(script) as fake, opened(idle_timeout_s=0.1) as upstream:
        answer = await get(upstream, fake)

        assert await answer.next_chunk() == b"one"
        with pytest.raises(EngineTimeoutError):
            await answer.next_chunk()
        await fake.wait_for_connections(0)


async def test_slow_stream_has_no_total_limit(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """A chunk now and then keeps an answer alive far beyond every limit (F49)."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head()
        for _ in range(30):
            await asyncio.sleep(0.05)
            await wire.chunk(b"x")
        await wire.end()

    # Twenty times a pause, so that a loaded machine doesn't make one too long.
    limits = {"first_byte_timeout_s": 1.0, "idle_timeout_s": 1.0}
    async with engine(script) as fake, opened(**limits) as upstream:
        assert await (await get(upstream, fake)).read(100) == b"x" * 30


async def test_time_that_the_consumer_takes_is_no_silence(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """A slow client holds its engine back; that is not the engine's silence."""
    body = b"x" * 4_000_000

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 4000000\r\n\r\n" + body)

    async with engine(script) as fake, opened(idle_timeout_s=0.1) as upstream:
        answer = await get(upstream, fake)
        first = await answer.next_chunk()
        await asyncio.sleep(0.4)

        assert first + await answer.read(len(body)) == body


async def test_slow_consumer_holds_the_engine_back(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """Not more than a bounded number of bytes waits in memory."""
    sent = 0

    async def script(received: Any, wire: Any) -> None:
        nonlocal sent
        await wire.head()
        for _ in range(1000):
            await wire.chunk(b"x" * 65536)
            sent += 65536
        await wire.end()

    async with engine(script) as fake, opened() as upstream:
        answer = await get(upstream, fake)
        before = -1
        async with asyncio.timeout(20):
            while before != sent:
                before = sent
                await asyncio.sleep(0.1)
        stalled_at = sent

        assert stalled_at < 30_000_000
        assert len(await answer.read(100_000_000)) == 65_536_000
