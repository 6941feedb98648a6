"""The server protocol of the proxied paths, byte by byte on real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Any, Protocol

import pytest
import uvicorn

from balancer.core.errors import BodyTooLargeError, ClientGoneError
from balancer.core.http.body import whole
from balancer.dataplane.direct import direct_protocol
from balancer.dataplane.exchange import Exchange

Answer = Callable[[Exchange], Awaitable[None]]
LIMIT_BYTES = 1_000_000


class FakePlane:
    """Answers `/v1/...` with what a test says; remembers how each exchange ended."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.ended: asyncio.Queue[BaseException | None] = asyncio.Queue()
        self.seen: list[Exchange] = []
        self._has_begun = asyncio.Event()

    def proxies(self, path: str) -> bool:
        return path.startswith("/v1/")

    async def handle(self, exchange: Exchange) -> None:
        self.seen.append(exchange)
        self._has_begun.set()
        try:
            await self._answer(exchange)
        except BaseException as error:
            self.ended.put_nowait(error)
            if not isinstance(error, ClientGoneError | BodyTooLargeError):
                raise
        else:
            self.ended.put_nowait(None)

    async def begun(self) -> None:
        """A first request is answered."""
        async with asyncio.timeout(20):
            await self._has_begun.wait()

    async def next_end(self) -> BaseException | None:
        async with asyncio.timeout(20):
            return await self.ended.get()


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self, data: bytes) -> None:
        """Expect exactly these bytes next."""
        async with asyncio.timeout(20):
            assert await self.reader.readexactly(len(data)) == data

    async def read_rest(self) -> bytes:
        """Everything up to the end of the connection."""
        async with asyncio.timeout(20):
            return await self.reader.read()

    async def is_reset(self) -> bool:
        try:
            await self.read_rest()
        except ConnectionResetError:
            return True
        return False


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()
        self.accepts = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.accepts.set()

    async def main_loop(self) -> None:
        await self.leave.wait()

    @contextmanager
    def capture_signals(self) -> Any:
        yield


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers every other path."""
    message = await receive()
    body = scope["path"].encode() + b"?" + scope["query_string"] + b" " + message["body"]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


class Connect(Protocol):
    """Starts a server, and connects to it."""

    def __call__(
        self, answer: Answer, **options: Any
    ) -> AbstractAsyncContextManager[tuple[Client, FakePlane]]: ...


@pytest.fixture
def connected() -> Connect:
    """Factory of a client connected to a server whose proxied paths get the given answer."""

    @asynccontextmanager
    async def connect(answer: Answer, **options: Any) -> AsyncIterator[tuple[Client, FakePlane]]:
        plane = FakePlane(answer)
        server = _Server(
            uvicorn.Config(
                hello,
                port=0,
                loop="none",
                http=direct_protocol(plane),
                lifespan="off",
                log_config=None,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=1,
                **options,
            )
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve())
            await server.accepts.wait()
            port = server.servers[0].sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                yield Client(reader, writer), plane
            finally:
                writer.transport.abort()
                server.leave.set()

    return connect


async def echo(exchange: Exchange) -> None:
    """The request's body, with its length."""
    body = await exchange.read_body(LIMIT_BYTES)
    await exchange.start(200, ((b"content-length", str(body.size_bytes).encode()),))
    await exchange.write(whole(body))
    await exchange.finish()


async def stream(exchange: Exchange) -> None:
    """Two pieces, without a length."""
    await exchange.read_body(LIMIT_BYTES)
    await exchange.start(200, ((b"a", b"b"),))
    await exchange.write(b"one")
    await exchange.write(b"")
    await exchange.write(b"two!")
    await exchange.finish()


def post(body: bytes, *headers: bytes, version: bytes = b"1.1", path: bytes = b"/v1/x") -> bytes:
    lines = [b"POST %b HTTP/%b" % (path, version), b"host: x", *headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


async def test_connection_serves_one_request_after_another(connected: Connect) -> None:
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


async def test_answer_without_a_length_is_chunked(connected: Connect) -> None:
    """Piece by piece; an empty piece isn't the end."""
    async with connected(stream) as (client, _):
        client.send(post(b""))

        await client.read(
            b"HTTP/1.1 200 OK\r\na: b\r\ntransfer-encoding: chunked\r\n\r\n"
            b"3\r\none\r\n4\r\ntwo!\r\n0\r\n\r\n"
        )


async def test_old_client_gets_no_chunks(connected: Connect) -> None:
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
    connected: Connect, headers: Any, told: bytes
) -> None:
    """In one call, framed as in three; the connection goes on."""

    async def answer(exchange: Exchange) -> None:
        await exchange.read_body(LIMIT_BYTES)
        await exchange.answer(200, headers, b"abc")

    async with connected(answer) as (client, _):
        for _ in range(2):
            client.send(post(b""))
            await client.read(b"HTTP/1.1 200 OK\r\n" + told)


async def test_whole_answer_shorter_than_its_length_breaks(connected: Connect) -> None:
    """It can't be taken for complete."""

    async def answer(exchange: Exchange) -> None:
        await exchange.answer(200, ((b"content-length", b"9"),), b"abc")

    async with connected(answer) as (client, _):
        client.send(post(b""))

        assert await client.read_rest() == b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"


async def test_idle_connection_is_closed_in_the_end(connected: Connect) -> None:
    """After the time of silence that the server was given, counted from the last answer."""
    async with connected(echo, timeout_keep_alive=1.0) as (client, _):
        for _ in range(3):
            client.send(post(b"abc"))
            await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")
            await asyncio.sleep(0.4)

        assert await client.read_rest() == b""


async def test_connection_that_is_busy_is_not_idle(connected: Connect) -> None:
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


async def test_client_that_asks_for_it_is_closed(connected: Connect) -> None:
    """After its answer."""
    async with connected(echo) as (client, _):
        client.send(post(b"abc", b"connection: close"))

        assert await client.read_rest() == (
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\nabc"
        )


async def test_answer_that_says_so_closes_the_connection(connected: Connect) -> None:
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
async def test_bodiless_answer_has_no_framing(connected: Connect, status: int) -> None:
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


async def test_requests_before_their_turn_are_answered_in_order(connected: Connect) -> None:
    """Pipelined ones, proxied and not."""
    async with connected(echo) as (client, _):
        client.send(post(b"one") + post(b"two", path=b"/other") + post(b"three"))

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none")
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n/other? two")
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nthree")


async def test_body_is_asked_for_when_it_is_wanted(connected: Connect) -> None:
    """`Expect: 100-continue`."""
    async with connected(echo) as (client, _):
        whole = post(b"abc", b"expect: 100-continue")
        client.send(whole[:-3])
        await client.read(b"HTTP/1.1 100 Continue\r\n\r\n")
        client.send(b"abc")

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")


async def test_large_body_is_put_together(connected: Connect) -> None:
    """In as many pieces as it comes; chunked ones, too."""
    body = b"x" * 700_000
    async with connected(echo) as (client, _):
        client.send(post(body))
        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 700000\r\n\r\n" + body)
        client.send(b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        client.send(b"2\r\nbc\r\n0\r\n\r\n")

        await client.read(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")


async def test_body_over_the_limit_is_refused_while_it_comes(connected: Connect) -> None:
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


async def test_client_that_leaves_cancels_the_work(connected: Connect) -> None:
    """At once, wherever it waits."""

    async def answer(exchange: Exchange) -> None:
        await exchange.read_body(LIMIT_BYTES)
        await exchange.while_present(asyncio.sleep(60))

    async with connected(answer) as (client, plane):
        client.send(post(b""))
        await plane.begun()
        client.writer.transport.abort()

        assert isinstance(await plane.next_end(), ClientGoneError)


async def test_client_that_leaves_before_the_work_begins(connected: Connect) -> None:
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


async def test_client_that_leaves_with_half_a_body(connected: Connect) -> None:
    """Half a body is no request."""
    async with connected(echo) as (client, plane):
        client.send(post(b"abc")[:-1])
        await plane.begun()
        client.writer.transport.abort()

        assert isinstance(await plane.next_end(), ClientGoneError)


async def test_client_that_leaves_takes_waiting_requests_with_it(connected: Connect) -> None:
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


async def test_work_ends_well_when_the_client_stays(connected: Connect) -> None:
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


async def test_slow_client_is_waited_for(connected: Connect) -> None:
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


async def test_slow_client_that_leaves_is_not_waited_for(connected: Connect) -> None:
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


async def test_unfinished_answer_breaks_the_connection(connected: Connect) -> None:
    """A chunked one without its last chunk; even if nothing of the body came."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start(200, ())
        await exchange.abort()

    async with connected(answer) as (client, _):
        client.send(post(b""))

        assert await client.read_rest() == (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        )


async def test_unfinished_answer_to_an_old_client_is_reset(connected: Connect) -> None:
    """An orderly end would be the answer's."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start(200, ())
        await exchange.write(b"some of it")
        await exchange.abort()

    async with connected(answer) as (client, _):
        client.send(post(b"", version=b"1.0"))

        assert await client.is_reset()


async def test_answer_shorter_than_it_said_breaks_the_connection(connected: Connect) -> None:
    """Its end must not look like one."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start(200, ((b"content-length", b"5"),))
        await exchange.write(b"abc")
        await exchange.finish()

    async with connected(answer) as (client, _):
        client.send(post(b""))

        assert await client.read_rest() == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc"


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\rb"])
async def test_header_with_a_line_break_is_not_sent(connected: Connect, value: bytes) -> None:
    """Whoever made it up."""

    async def answer(exchange: Exchange) -> None:
        with pytest.raises(ValueError, match="line break"):
            await exchange.start(200, ((b"a", value),))

    async with connected(answer) as (client, _):
        client.send(post(b""))

        assert await client.read_rest() == b""


async def test_nonsense_is_refused(connected: Connect) -> None:
    """By uvicorn, as before."""
    async with connected(echo) as (client, _):
        client.send(b"NONSENSE\r\n\r\n")

        assert (await client.read_rest()).startswith(b"HTTP/1.1 400 ")
