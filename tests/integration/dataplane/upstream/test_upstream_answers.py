"""Answers that are cut, endless, empty, too large, or none at all."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from balancer.core.errors import BalancerError, EngineProtocolError, StreamCutError
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.upstream import Upstream

Opened = Callable[..., AbstractAsyncContextManager[Upstream]]
Get = Callable[..., Coroutine[Any, Any, UpstreamAnswer]]
Script = Callable[[Any, Any], Awaitable[None]]

EngineFactory = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        pytest.param(
            b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", StreamCutError, id="length"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
            StreamCutError,
            id="chunked",
        ),
    ],
)
async def test_cut_body_is_an_error_after_its_bytes(
    engine: EngineFactory, sent: bytes, error: type[BalancerError], opened: Opened, get: Get
) -> None:
    """What came is handed out, then the cut is told."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(sent)
        wire.close()

    async with engine(script) as fake, opened() as upstream:
        answer = await get(upstream, fake)

        assert await answer.next_chunk() == b"half"
        with pytest.raises(error):
            await answer.next_chunk()


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


async def test_event_stream_is_handed_out_with_its_first_bytes(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """Its headers alone say nothing, so nobody is woken for them."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(STREAM_HEAD)
        await asyncio.sleep(0.05)
        await wire.raw(b"4\r\n: a\n\r\n0\r\n\r\n")

    async with engine(script) as fake, opened() as upstream:
        answer = await get(upstream, fake)

        assert (answer.status, answer.piece) == (200, b": a\n")


async def test_event_stream_that_ends_at_its_headers_is_handed_out(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """With what became of it, which its reader is told."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(STREAM_HEAD)
        wire.close()

    async with engine(script) as fake, opened() as upstream:
        answer = await get(upstream, fake)

        assert answer.status == 200
        with pytest.raises(StreamCutError):
            await answer.next_chunk()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"SSH-2.0-OpenSSH\r\n", id="not-http"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-le", id="cut-headers"),
        pytest.param(b"HTTP/1.1 700 Odd\r\ncontent-length: 0\r\n\r\n", id="odd-status"),
        pytest.param(b"HTTP/1.1 099 Odd\r\ncontent-length: 0\r\n\r\n", id="status-below-100"),
        pytest.param(
            b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            id="upgrade",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 300_000 + b"\r\n\r\n", id="header-bomb"),
    ],
)
async def test_bytes_that_are_no_answer_are_a_protocol_error(
    engine: EngineFactory, sent: bytes, opened: Opened, get: Get
) -> None:
    """What can't be understood is told, not waited for."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(sent)
        wire.close()

    async with engine(script) as fake, opened() as upstream:
        with pytest.raises(EngineProtocolError):
            await get(upstream, fake)


async def test_answer_without_length_ends_with_the_connection(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """HTTP/1.0 style: the end of the connection is the end of the body."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nall of it")
        wire.close()

    async with engine(script) as fake, opened() as upstream:
        assert await (await get(upstream, fake)).read(100) == b"all of it"


async def test_reset_is_no_end_of_an_answer_without_length(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """A reset connection never counts as complete."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\npart")
        await go_on.wait()
        wire.reset()

    go_on = asyncio.Event()
    async with engine(script) as fake, opened() as upstream:
        answer = await get(upstream, fake)
        await answer.next_chunk()
        go_on.set()

        with pytest.raises(StreamCutError):
            await answer.next_chunk()


@pytest.mark.parametrize(
    ("method", "head"),
    [
        pytest.param("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", id="head"),
        pytest.param("GET", b"HTTP/1.1 204 No Content\r\n\r\n", id="204"),
        pytest.param("GET", b"HTTP/1.1 304 Same\r\ncontent-length: 5\r\n\r\n", id="304"),
    ],
)
async def test_answer_without_body_is_complete_at_its_headers(
    engine: EngineFactory, method: str, head: bytes, opened: Opened, get: Get
) -> None:
    """Nothing is waited for, and the next request is answered right."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(head)

    async with engine(script) as fake, opened() as upstream:
        for _ in range(2):
            answer = await get(upstream, fake, method)
            assert await answer.read(10) == b""
            assert answer.is_complete


async def test_informational_answers_are_skipped(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
    """A 103 before the answer is not the answer."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await answer_ok(received, wire)

    async with engine(script) as fake, opened() as upstream:
        answer = await get(upstream, fake)

        assert answer.status == 200
        assert (b"link", b"x") not in answer.headers


async def test_answer_over_the_limit_is_refused(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
    """`read` doesn't fill memory with what nobody wants."""
    async with engine(answer_ok) as fake, opened() as upstream:
        answer = await get(upstream, fake)

        with pytest.raises(EngineProtocolError):
            await answer.read(3)
