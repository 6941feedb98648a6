"""The same protocol where clients leave or are slow, and answers break off or are nonsense."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import pytest

from balancer.core.errors import ClientGoneError
from balancer.dataplane.exchange import Exchange

Connect = Callable[..., AbstractAsyncContextManager[tuple[Any, Any]]]
Answer = Callable[[Exchange], Awaitable[None]]
Post = Callable[..., bytes]

LIMIT_BYTES = 1_000_000


async def test_client_that_leaves_cancels_the_work(connected: Connect, post: Post) -> None:
    """At once, wherever it waits."""

    async def answer(exchange: Exchange) -> None:
        await exchange.read_body(LIMIT_BYTES)
        await exchange.while_present(asyncio.sleep(60))

    async with connected(answer) as (client, plane):
        client.send(post(b""))
        await plane.begun()
        client.writer.transport.abort()

        assert isinstance(await plane.next_end(), ClientGoneError)


async def test_client_that_leaves_before_the_work_begins(connected: Connect, post: Post) -> None:
    """The work isn't even started."""

    async def work() -> None:
        raise AssertionError("not to be run")

    async def answer(exchange: Exchange) -> None:
        await exchange.read_body(LIMIT_BYTES)
        with suppress(ClientGoneError):
            await exchange.while_present(asyncio.sleep(60))
        await exchange.while_present(work())

    async with connected(answer) as (client, plane):
        client.send(post(b""))
        await plane.begun()
        client.writer.transport.abort()

        assert isinstance(await plane.next_end(), ClientGoneError)


async def test_client_that_leaves_with_half_a_body(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """Half a body is no request."""
    async with connected(echo) as (client, plane):
        client.send(post(b"abc")[:-1])
        await plane.begun()
        client.writer.transport.abort()

        assert isinstance(await plane.next_end(), ClientGoneError)


async def test_client_that_leaves_takes_waiting_requests_with_it(
    connected: Connect, post: Post
) -> None:
    """The one that is answered ends, those behind it never begin."""

    async def answer(exchange: Exchange) -> None:
        await exchange.read_body(LIMIT_BYTES)
        await exchange.while_present(asyncio.sleep(60))

    async with connected(answer) as (client, plane):
        client.send(post(b"") * 2)
        await plane.begun()
        client.writer.transport.abort()

        assert isinstance(await plane.next_end(), ClientGoneError)
        assert len(plane.seen) == 1


async def test_work_ends_well_when_the_client_stays(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """What it raises comes out as it is."""

    async def work() -> None:
        raise LookupError

    async def answer(exchange: Exchange) -> None:
        with pytest.raises(LookupError):
            await exchange.while_present(work())
        await echo(exchange)

    async with connected(answer) as (client, plane):
        client.send(post(b"abc"))
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")

        assert await plane.next_end() is None


async def test_slow_client_is_waited_for(connected: Connect, post: Post) -> None:
    """`push` says so; `drain` returns when it has read on. Nothing is lost."""
    piece = b"x" * 65536
    pushed = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.start(200, ((b"content-length", str(len(piece) * 400).encode()),))
        for _ in range(400):
            if not exchange.push(piece):
                pushed.set()
                await exchange.drain()
        await exchange.finish()

    async with connected(answer) as (client, plane):
        client.send(post(b""))
        async with asyncio.timeout(20):
            await pushed.wait()
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 26214400\r\n\r\n")
        async with asyncio.timeout(20):
            assert len(await client.reader.readexactly(400 * len(piece))) == 400 * len(piece)

        assert await plane.next_end() is None


async def test_slow_client_that_leaves_is_not_waited_for(connected: Connect, post: Post) -> None:
    """`drain` tells."""
    piece = b"x" * 65536
    is_full = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.start(200, ())
        while exchange.push(piece):
            pass
        is_full.set()
        await exchange.drain()

    async with connected(answer) as (client, plane):
        client.send(post(b""))
        async with asyncio.timeout(20):
            await is_full.wait()
        client.writer.transport.abort()

        assert isinstance(await plane.next_end(), ClientGoneError)


async def test_unfinished_answer_breaks_the_connection(connected: Connect, post: Post) -> None:
    """A chunked one without its last chunk; even if nothing of the body came."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start(200, ())
        await exchange.abort()

    async with connected(answer) as (client, _):
        client.send(post(b""))

        assert await client.read_rest() == (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        )


async def test_unfinished_answer_to_an_old_client_is_reset(connected: Connect, post: Post) -> None:
    """An orderly end would be the answer's."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start(200, ())
        await exchange.write(b"some of it")
        await exchange.abort()

    async with connected(answer) as (client, _):
        client.send(post(b"", version=b"1.0"))

        assert await client.is_reset()


async def test_answer_shorter_than_it_said_breaks_the_connection(
    connected: Connect, post: Post
) -> None:
    """Its end must not look like one."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start(200, ((b"content-length", b"5"),))
        await exchange.write(b"abc")
        await exchange.finish()

    async with connected(answer) as (client, _):
        client.send(post(b""))

        assert await client.read_rest() == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc"


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\rb"])
async def test_header_with_a_line_break_is_not_sent(
    connected: Connect, value: bytes, post: Post
) -> None:
    """Whoever made it up."""

    async def answer(exchange: Exchange) -> None:
        with pytest.raises(ValueError, match="line break"):
            await exchange.start(200, ((b"a", value),))

    async with connected(answer) as (client, _):
        client.send(post(b""))

        assert await client.read_rest() == b""


async def test_nonsense_is_refused(connected: Connect, echo: Answer) -> None:
    """By uvicorn, as before."""
    async with connected(echo) as (client, _):
        client.send(b"NONSENSE\r\n\r\n")

        assert (await client.read_rest()).startswith(b"HTTP/1.1 400 ")
