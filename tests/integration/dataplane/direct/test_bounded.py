"""The server protocol against clients that send too much, too slowly, or ask for another protocol."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from balancer.core.errors import RequestLateError
from balancer.dataplane.exchange import Exchange

Connect = Callable[..., AbstractAsyncContextManager[tuple[Any, Any]]]
Answer = Callable[[Exchange], Awaitable[None]]
Post = Callable[..., bytes]

LIMIT_BYTES = 1_000_000
CHUNKED = b"POST /v1/x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def is_refusal(answer: bytes, status: int) -> bool:
    """Whether it is that, and says that it is the connection's last."""
    return answer.startswith(b"HTTP/1.1 %d " % status) and b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 2000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 200 + b"\r\n", 431),
        (b"GET /v1/x HTTP/1.1\r\n" + b"x: a\r\n" * 200 + b"\r\n", 431),
        (b"GET /v1/" + b"a" * 2000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
    ],
    ids=["one-header", "many-headers", "many-headers-of-a-proxied-path", "target"],
)
async def test_head_over_the_limit_is_refused(
    connected: Connect, echo: Answer, sent: bytes, status: int
) -> None:
    """Before anybody is asked to answer it."""
    async with connected(echo, limits={"max_head_bytes": 1000}) as (client, plane):
        client.send(sent)

        assert is_refusal(await client.read_rest(), status)
        assert plane.seen == []


@pytest.mark.parametrize(
    ("begin", "status"),
    [(b"GET / HTTP/1.1\r\nx: ", 431), (b"GET /", 414)],
    ids=["header", "target"],
)
async def test_head_without_an_end_is_refused_on_the_way(
    connected: Connect, echo: Answer, begin: bytes, status: int
) -> None:
    """No more of it is kept than the limit and one piece."""
    async with connected(echo, limits={"max_head_bytes": 1000}) as (client, _):
        client.send(begin)
        for _ in range(12):
            client.send(b"a" * 100)
            await asyncio.sleep(0.002)

        assert is_refusal(await client.read_rest(), status)


async def test_head_of_the_limit_before_a_large_body_passes(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """What comes with a head isn't counted as head."""
    body = b"b" * 5000
    async with connected(echo, limits={"max_head_bytes": 1000}) as (client, _):
        client.send(post(body, b"x: " + b"a" * 800))

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + body)


async def test_trailers_without_an_end_are_refused(connected: Connect, echo: Answer) -> None:
    """They are headers that nobody asked for."""
    async with connected(echo, limits={"max_head_bytes": 1000}) as (client, _):
        client.send(CHUNKED + b"1\r\na\r\n0\r\nx: ")
        for _ in range(12):
            client.send(b"a" * 100)
            await asyncio.sleep(0.002)

        assert is_refusal(await client.read_rest(), 431)


@pytest.mark.parametrize("path", [b"/v1/x", b"/other"])
@pytest.mark.parametrize("cut", [0, 3, 600])
async def test_trailers_over_the_limit_are_refused(
    connected: Connect, echo: Answer, path: bytes, cut: int
) -> None:
    """However they come: all in one piece, too."""
    sent = CHUNKED.replace(b"/v1/x", path) + b"1\r\na\r\n0\r\nx: " + b"a" * 1100 + b"\r\n\r\n"
    async with connected(echo, limits={"max_head_bytes": 1000}) as (client, _):
        client.send(sent[: len(sent) - cut])
        await asyncio.sleep(0.005)
        client.send(sent[len(sent) - cut :])

        assert is_refusal(await client.read_rest(), 431)


async def test_trailers_within_the_limit_pass(connected: Connect, echo: Answer) -> None:
    """The head isn't counted again."""
    head = CHUNKED[:-2] + b"x: " + b"a" * 800 + b"\r\n\r\n"
    async with connected(echo, limits={"max_head_bytes": 1000}) as (client, _):
        client.send(head + b"3\r\nabc\r\n0\r\nx: " + b"a" * 800 + b"\r\n\r\n")

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")


@pytest.mark.parametrize(("begin", "status"), [(b"GET / HTTP/1.1\r\nx: ", 431), (b"GET /", 414)])
@pytest.mark.parametrize("is_first", [True, False])
async def test_piece_of_a_head_over_the_limit_is_enough(
    connected: Connect, echo: Answer, post: Post, begin: bytes, status: int, is_first: bool
) -> None:
    """Nothing else has to come."""
    async with connected(echo, limits={"max_head_bytes": 1000}) as (client, _):
        if not is_first:
            client.send(post(b"abc"))
            await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")
        client.send(begin + b"a" * 1100)

        assert is_refusal(await client.read_rest(), status)


async def test_large_body_in_small_chunks_passes(connected: Connect, echo: Answer) -> None:
    """Whatever there is of chunk heads, also where those come alone."""
    async with connected(echo, limits={"max_head_bytes": 100}) as (client, _):
        client.send(CHUNKED)
        for _ in range(60):
            client.send(b"1\r\n")
            await asyncio.sleep(0.001)
            client.send(b"a\r\n")
            await asyncio.sleep(0.001)
        client.send(b"0\r\n\r\n")

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 60\r\n\r\n" + b"a" * 60)


async def test_connection_without_a_first_byte_is_closed(connected: Connect, echo: Answer) -> None:
    """Without a word, as nothing was asked."""
    async with connected(echo, limits={"head_timeout_s": 0.2}) as (client, _):
        assert await client.read_rest() == b""


@pytest.mark.parametrize("is_first", [True, False])
async def test_half_a_head_is_not_waited_for(
    connected: Connect, echo: Answer, post: Post, is_first: bool
) -> None:
    """However its bytes drip."""
    async with connected(echo, limits={"head_timeout_s": 0.2}) as (client, _):
        if not is_first:
            client.send(post(b""))
            await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        client.send(b"GET /v1/x HTTP/1.1\r\nx: ")
        async with asyncio.TaskGroup() as group:
            dripping = group.create_task(drip(client))
            answer = await client.read_rest()
            dripping.cancel()

        assert is_refusal(answer, 408)


async def drip(client: Any) -> None:
    while True:
        client.send(b"a")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", [b"/v1/x", b"/other"])
async def test_half_a_body_is_not_waited_for(connected: Connect, post: Post, path: bytes) -> None:
    """Over ASGI neither. What answers learns why."""
    late: list[Exception] = []

    async def answer(exchange: Exchange) -> None:
        try:
            await exchange.read_body(LIMIT_BYTES)
        except RequestLateError as error:
            late.append(error)
            await exchange.answer(408, ((b"connection", b"close"), (b"content-length", b"0")), b"")

    async with connected(answer, limits={"body_idle_timeout_s": 0.2}) as (client, _):
        client.send(post(b"abc", path=path)[:-1])

        assert is_refusal(await client.read_rest(), 408)
        assert len(late) == (path == b"/v1/x")


async def test_body_that_goes_on_is_waited_for(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """For longer than it may be silent."""
    request = post(b"a" * 40)
    async with connected(echo, limits={"body_idle_timeout_s": 0.2}) as (client, _):
        client.send(request[:-40])
        for _ in range(40):
            client.send(b"a")
            await asyncio.sleep(0.02)

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n" + b"a" * 40)


async def test_rest_of_a_refused_body_is_not_waited_for(connected: Connect, post: Post) -> None:
    """Its request has its answer: no other follows."""

    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(404, ((b"content-length", b"0"),), b"")

    async with connected(refuse, limits={"body_idle_timeout_s": 0.2}) as (client, _):
        client.send(post(b"abc")[:-1])

        answer = await client.read_rest()
        assert answer == b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize("connection", [b"Upgrade, HTTP2-Settings", b"Upgrade"])
@pytest.mark.parametrize("cut", [0, 20, 1])
async def test_upgrade_to_another_protocol_is_ignored(
    connected: Connect, echo: Answer, post: Post, connection: bytes, cut: int
) -> None:
    """Java's HTTP client asks for HTTP/2 with each request: body and connection go on."""
    asks = (b"connection: " + connection, b"upgrade: h2c", b"http2-settings: AAMAAABk")
    request = post(b"abc", *asks)
    async with connected(echo) as (client, plane):
        for sent in (request, request, post(b"def")):
            client.send(sent[: len(sent) - cut])
            await asyncio.sleep(0.005)
            client.send(sent[len(sent) - cut :])
            await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n" + sent[-3:])

    assert b"upgrade" not in dict(plane.seen[0].headers)


async def test_upgrade_of_other_paths_is_ignored(connected: Connect, echo: Answer) -> None:
    """Those of an application, too."""
    async with connected(echo) as (client, _):
        client.send(b"POST /other HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n")
        client.send(b"content-length: 3\r\n\r\nabc")

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n/other? abc")


async def test_refused_expectation_ends_the_connection(connected: Connect, post: Post) -> None:
    """Nobody knows then whether the body comes."""

    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(404, ((b"content-length", b"0"),), b"")

    async with connected(refuse) as (client, _):
        client.send(post(b"abc", b"expect: 100-continue")[:-3])

        assert is_refusal(await client.read_rest(), 404)


async def test_what_is_no_http_behind_a_request_is_told_in_its_place(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """The connection ends; what was asked before isn't answered with somebody else's error."""
    async with connected(echo) as (client, _):
        client.send(post(b"abc"))
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")
        client.send(b"NONSENSE\r\n\r\n")

        assert is_refusal(await client.read_rest(), 400)


MALFORMED = [
    pytest.param(b"NONSENSE\r\n\r\n", 400, id="nonsense"),
    pytest.param(b"GET / HTTP/1.1\r\nx: " + b"a" * 2000 + b"\r\n\r\n", 431, id="large-head"),
    pytest.param(CHUNKED + b"x\r\n", 400, id="chunk"),
    pytest.param(b"POST /other" + CHUNKED[len(b"POST /v1/x") :] + b"x\r\n", 400, id="other-path"),
]


@pytest.mark.parametrize("path", [b"/v1/x", b"/other"])
@pytest.mark.parametrize(("sent", "status"), MALFORMED)
async def test_what_is_malformed_in_the_same_piece_is_told_in_its_turn(
    connected: Connect, echo: Answer, post: Post, sent: bytes, status: int, path: bytes
) -> None:
    """The requests before it are good ones, and get their answers first."""
    request = post(b"abc", path=path)
    async with connected(echo, limits={"max_head_bytes": 1000}) as (client, _):
        client.send(request + request + sent)
        for _ in range(2):
            said = b"abc" if path == b"/v1/x" else b"/other? abc"
            await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(said) + said)

        assert is_refusal(await client.read_rest(), status)


async def test_half_a_body_does_not_hold_up_a_server_that_stops(
    connected: Connect, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given a moment to come, not all the time of the drain."""
    monkeypatch.setattr("balancer.dataplane.bounded_http.STOPPING_BODY_S", 0.1)
    late: list[Exception] = []

    async def answer(exchange: Exchange) -> None:
        try:
            await exchange.read_body(LIMIT_BYTES)
        except RequestLateError as error:
            late.append(error)

    async with connected(answer) as (client, plane):
        client.send(post(b"abc")[:-1])
        await plane.begun()
        plane.seen[0]._owner.shutdown()

        await client.read_rest()
        assert len(late) == 1
