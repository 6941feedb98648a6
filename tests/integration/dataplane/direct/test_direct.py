"""The server protocol of the proxied paths, byte by byte on real sockets: framing, order, bodies."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from balancer.core.errors import BodyTooLargeError
from balancer.core.http.body import whole
from balancer.dataplane.bounded_http import MAX_HELD_BYTES
from balancer.dataplane.exchange import Exchange

Connect = Callable[..., AbstractAsyncContextManager[tuple[Any, Any]]]
Answer = Callable[[Exchange], Awaitable[None]]
Post = Callable[..., bytes]

LIMIT_BYTES = 1_000_000


async def test_connection_serves_one_request_after_another(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """Proxied or not, in any order; status, headers and framing are exact."""
    async with connected(echo) as (client, plane):
        client.send(post(b"abc", path=b"/v1/x?q=1"))
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")
        client.send(post(b"hi", path=b"/other%20path?q=2"))
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 18\r\n\r\n/other path?q=2 hi")
        client.send(post(b"", path=b"/v1/%78"))
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        assert [(each.path, each.query) for each in plane.seen] == [
            ("/v1/x", b"q=1"),
            ("/v1/x", b""),
        ]


async def test_answer_without_a_length_is_chunked(
    connected: Connect, stream: Answer, post: Post
) -> None:
    """Piece by piece; an empty piece isn't the end."""
    async with connected(stream) as (client, _):
        client.send(post(b""))

        await client.read(
            b"HTTP/1.1 200 OK\r\na: b\r\ntransfer-encoding: chunked\r\n\r\n"
            b"3\r\none\r\n4\r\ntwo!\r\n0\r\n\r\n"
        )


async def test_old_client_gets_no_chunks(connected: Connect, stream: Answer, post: Post) -> None:
    """HTTP/1.0 knows none: the connection's end is the answer's."""
    async with connected(stream) as (client, _):
        client.send(post(b"", version=b"1.0"))

        assert await client.read_rest() == (
            b"HTTP/1.1 200 OK\r\na: b\r\nconnection: close\r\n\r\nonetwo!"
        )


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        pytest.param(((b"content-length", b"3"),), b"content-length: 3\r\n\r\nabc", id="length"),
        pytest.param((), b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", id="chunked"),
    ],
)
async def test_answer_that_is_here_as_a_whole(
    connected: Connect, headers: Any, told: bytes, post: Post
) -> None:
    """In one call, framed as in three; the connection goes on."""

    async def answer(exchange: Exchange) -> None:
        await exchange.read_body(LIMIT_BYTES)
        await exchange.answer(200, headers, b"abc")

    async with connected(answer) as (client, _):
        for _ in range(2):
            client.send(post(b""))
            await client.read(b"HTTP/1.1 200 OK\r\n" + told)


async def test_whole_answer_shorter_than_its_length_breaks(connected: Connect, post: Post) -> None:
    """It can't be taken for complete."""

    async def answer(exchange: Exchange) -> None:
        await exchange.answer(200, ((b"content-length", b"9"),), b"abc")

    async with connected(answer) as (client, _):
        client.send(post(b""))

        assert await client.read_rest() == b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"


async def test_idle_connection_is_closed_in_the_end(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """After the time of silence that the server was given, counted from the last answer."""
    async with connected(echo, timeout_keep_alive=1.0) as (client, _):
        for _ in range(3):
            client.send(post(b"abc"))
            await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")
            await asyncio.sleep(0.4)

        assert await client.read_rest() == b""


async def test_connection_that_is_busy_is_not_idle(connected: Connect, post: Post) -> None:
    """A long answer, or a request that takes long to come, outlives the time of silence."""

    async def slow(exchange: Exchange) -> None:
        body = await exchange.read_body(LIMIT_BYTES)
        if body.size_bytes == 1:
            await asyncio.sleep(0.7)
        await exchange.answer(200, ((b"content-length", b"0"),), b"")

    empty = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    async with connected(slow, timeout_keep_alive=0.5) as (client, _):
        client.send(post(b""))
        await client.read(empty)
        client.send(post(b"a"))
        await client.read(empty)
        client.send(post(b"abc")[:-1])
        await asyncio.sleep(0.7)
        client.send(b"c")
        await client.read(empty)


async def test_client_that_asks_for_it_is_closed(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """After its answer."""
    async with connected(echo) as (client, _):
        client.send(post(b"abc", b"connection: close"))

        assert await client.read_rest() == (
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\nabc"
        )


async def test_answer_that_says_so_closes_the_connection(connected: Connect, post: Post) -> None:
    """What a refused body still sends is nobody's."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start(413, ((b"connection", b"close"), (b"content-length", b"2")))
        await exchange.write(b"no")
        await exchange.finish()

    async with connected(answer) as (client, _):
        client.send(post(b"abc", b"expect: 100-continue")[:-3])

        assert (await client.read_rest()).endswith(
            b"\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"
        )


@pytest.mark.parametrize("status", [204, 304])
async def test_bodiless_answer_has_no_framing(connected: Connect, status: int, post: Post) -> None:
    """The next answer follows at once."""

    async def answer(exchange: Exchange) -> None:
        await exchange.read_body(LIMIT_BYTES)
        await exchange.start(status, ())
        await exchange.write(b"nobody reads this")
        await exchange.finish()

    async with connected(answer) as (client, _):
        client.send(post(b"") + post(b"hi", path=b"/other"))
        head = b"HTTP/1.1 204 No Content" if status == 204 else b"HTTP/1.1 304 Not Modified"
        await client.read(head + b"\r\n\r\n")

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n/other? hi")


async def test_head_request_gets_the_length_alone(connected: Connect) -> None:
    """And the next answer isn't mistaken for its body."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start(200, ((b"content-length", b"5"),))
        await exchange.finish()

    async with connected(answer) as (client, _):
        client.send(b"HEAD /v1/x HTTP/1.1\r\nhost: x\r\n\r\n" * 2)

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n" * 2)


async def test_requests_before_their_turn_are_answered_in_order(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """Pipelined ones, proxied and not."""
    async with connected(echo) as (client, _):
        client.send(post(b"one") + post(b"two", path=b"/other") + post(b"three"))

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none")
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n/other? two")
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nthree")


async def test_body_is_asked_for_when_it_is_wanted(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """`Expect: 100-continue`."""
    async with connected(echo) as (client, _):
        whole = post(b"abc", b"expect: 100-continue")
        client.send(whole[:-3])
        await client.read(b"HTTP/1.1 100 Continue\r\n\r\n")
        client.send(b"abc")

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")


async def test_large_body_is_put_together(connected: Connect, echo: Answer, post: Post) -> None:
    """In as many pieces as it comes; chunked ones, too."""
    body = b"x" * 700_000
    async with connected(echo) as (client, _):
        client.send(post(body))
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 700000\r\n\r\n" + body)
        client.send(b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        client.send(b"2\r\nbc\r\n0\r\n\r\n")

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")


async def test_body_over_the_limit_is_refused_while_it_comes(
    connected: Connect, post: Post
) -> None:
    """Nobody said how long it would be."""

    async def answer(exchange: Exchange) -> None:
        with pytest.raises(BodyTooLargeError):
            await exchange.read_body(10)
        await exchange.start(413, ((b"content-length", b"0"),))
        await exchange.finish()

    async with connected(answer) as (client, _):
        client.send(b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b"b\r\nabcdefghijk\r\n")
        await client.read(b"HTTP/1.1 413 ")
        client.send(b"0\r\n\r\n" + post(b"hi", path=b"/other"))

        async with asyncio.timeout(20):
            assert await client.reader.readuntil(b"/other? hi")


async def test_what_comes_while_another_is_answered_waits(connected: Connect, post: Post) -> None:
    """It is answered in its turn, however it was cut."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        body = whole(await exchange.read_body(LIMIT_BYTES))
        asked.set()
        await go_on.wait()
        await exchange.answer(200, ((b"content-length", b"1"),), body)

    second = post(b"b")
    async with connected(answer) as (client, plane):
        client.send(post(b"a") + second[:20])
        async with asyncio.timeout(20):
            await asked.wait()
        client.send(second[20:] + post(b"c"))
        go_on.set()
        for body in (b"a", b"b", b"c"):
            await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n" + body)

    assert len(plane.seen) == 3


async def test_too_much_before_its_turn_is_not_kept(
    connected: Connect, post: Post, eventually: Any
) -> None:
    """The answer says that it is the last; what came behind its request was not begun."""
    go_on = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.read_body(LIMIT_BYTES)
        await go_on.wait()
        await exchange.answer(200, ((b"content-length", b"1"),), b"a")

    async with connected(answer) as (client, plane):
        client.send(post(b""))
        await plane.begun()
        client.send(post(b"x" * MAX_HELD_BYTES)[: MAX_HELD_BYTES + 1])
        await eventually(lambda: not plane.seen[0].keep_alive)
        go_on.set()

        assert await client.read_rest() == (
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nconnection: close\r\n\r\na"
        )
        assert len(plane.seen) == 1
