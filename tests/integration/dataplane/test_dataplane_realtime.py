"""WebSocket sessions between a real client and real engines."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.client_socket import ClientSocket
from balancer.dataplane.realtime import _pass_to_engine, _Waiting

Session = Callable[[ServerConnection], Awaitable[None]]


@dataclass
class SocketEngine:
    """An engine that speaks WebSocket, and the ends of its sessions."""

    url: str = ""
    sessions: list[ServerConnection] = field(default_factory=list)
    closed: list[tuple[int, str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_closed(self, count: int = 1) -> list[tuple[int, str]]:
        async with asyncio.timeout(20):
            while len(self.closed) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.closed


SocketEngineFactory = Callable[..., AbstractAsyncContextManager[SocketEngine]]


@pytest.fixture
def socket_engine() -> SocketEngineFactory:
    """Factory of engines whose sessions are played by a script."""

    @asynccontextmanager
    async def start(session: Session, **options: Any) -> AsyncIterator[SocketEngine]:
        engine = SocketEngine()

        async def play(connection: ServerConnection) -> None:
            engine.sessions.append(connection)
            try:
                await session(connection)
            except ConnectionClosed:
                pass
            finally:
                await connection.wait_closed()
                engine.closed.append((connection.close_code or 0, connection.close_reason or ""))
                engine.changed.set()

        async with serve(play, "127.0.0.1", 0, compression=None, **options) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            engine.url = f"http://127.0.0.1:{port}"
            yield engine

    return start


async def echo(connection: ServerConnection) -> None:
    await connection.send('{"type":"session.created"}')
    async for message in connection:
        await connection.send(message)


def opened(proxy: Any, query: str = "?model=m", **options: Any) -> connect:
    url = f"ws://127.0.0.1:{proxy.port}/v1/realtime{query}"
    return connect(url, proxy=None, compression=None, **options)


async def receive(client: ClientConnection) -> str | bytes:
    async with asyncio.timeout(20):
        return await client.recv()


async def ended(client: ClientConnection) -> tuple[int | None, str | None]:
    async with asyncio.timeout(20):
        await client.wait_closed()
    return client.close_code, client.close_reason


async def test_messages_pass_both_ways_as_they_are(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """Text and binary, small and large, in order."""
    messages: list[str | bytes] = ["{}", "ü\U0001f600", b"\0\xff", "", b"", "x" * 3_000_000]
    async with (
        socket_engine(echo, max_size=None) as engine,
        balancer(instance(engine.url)) as proxy,
        opened(proxy, max_size=None) as client,
    ):
        assert await receive(client) == '{"type":"session.created"}'
        for message in messages:
            await client.send(message)
        assert [await receive(client) for _ in messages] == messages


async def test_handshake_carries_headers_query_and_subprotocol(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """Ours are added, the engine's key takes the client's place."""
    options = {"subprotocols": [Subprotocol("realtime")]}
    async with (
        socket_engine(echo, **options) as engine,
        balancer(instance(engine.url), engine_key=lambda _: "k1") as proxy,
        opened(
            proxy,
            "?model=m&a=b",
            subprotocols=[Subprotocol("other"), Subprotocol("realtime")],
            additional_headers={"authorization": "Bearer user", "x-request-id": "mine"},
        ) as client,
    ):
        request = engine.sessions[0].request
        assert request is not None
        assert request.path == "/v1/realtime?model=m&a=b"
        assert request.headers.get_all("authorization") == ["Bearer k1"]
        assert request.headers["x-request-id"] == "mine"
        assert client.subprotocol == "realtime"
        assert client.response is not None
        assert client.response.headers["x-request-id"] == "mine"
        assert client.response.headers["x-kvlb-instance"] == "e0"


@pytest.mark.parametrize(("level", "shown"), [("id", ["x-request-id"]), ("off", [])])
async def test_headers_of_our_own_can_be_left_out(
    socket_engine: Any, balancer: Any, instance: Any, level: Any, shown: list[str]
) -> None:
    """As on other answers."""
    settings = DataPlaneSettings(headers=level)
    async with (
        socket_engine(echo) as engine,
        balancer(instance(engine.url), settings=settings) as proxy,
        opened(proxy) as client,
    ):
        assert client.response is not None
        names = [name.lower() for name in client.response.headers]
        assert [name for name in names if name.startswith("x-")] == shown


@pytest.mark.parametrize(
    ("code", "reason", "heard"),
    [(1000, "bye", 1000), (1001, "", 1001), (4001, "ü", 4001), (1003, "no", 1003)],
)
async def test_clients_close_is_carried_over(
    socket_engine: Any, balancer: Any, instance: Any, code: int, reason: str, heard: int
) -> None:
    """After everything that was said before it."""
    got: list[str | bytes] = []

    async def listen(connection: ServerConnection) -> None:
        while True:
            got.append(await connection.recv())

    async with socket_engine(listen) as engine, balancer(instance(engine.url)) as proxy:
        async with opened(proxy) as client:
            for number in range(50):
                await client.send(str(number))
            await client.close(code, reason)
        assert await engine.wait_closed() == [(heard, reason)]
        (record,) = await proxy.wait_for_records(1)

    assert got == [str(number) for number in range(50)]
    assert (record.status, record.error) == (101, None)


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [(1000, "done", None), (1011, "bug", "session_failed"), (4999, "theirs", None)],
)
async def test_engines_close_is_carried_over(
    socket_engine: Any, balancer: Any, instance: Any, code: int, reason: str, error: str | None
) -> None:
    """After everything that was said before it; a failure is noted."""

    async def leave(connection: ServerConnection) -> None:
        for number in range(50):
            await connection.send(str(number))
        await connection.close(code, reason)

    async with (
        socket_engine(leave) as engine,
        balancer(instance(engine.url)) as proxy,
        opened(proxy) as client,
    ):
        assert [await receive(client) for _ in range(50)] == [str(each) for each in range(50)]
        assert await ended(client) == (code, reason)
        (record,) = await proxy.wait_for_records(1)

    assert record.error == error
    assert proxy.in_flight() == 0


async def test_session_counts_as_load_while_it_lasts(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """So the next one goes elsewhere."""
    async with (
        socket_engine(echo) as one,
        socket_engine(echo) as two,
        balancer(instance(one.url), instance(two.url, "e1")) as proxy,
    ):
        async with opened(proxy), opened(proxy):
            assert proxy.in_flight() == 2
            assert (len(one.sessions), len(two.sessions)) == (1, 1)
        await proxy.wait_for_records(2)

        assert proxy.in_flight() == 0


async def test_vanished_client_ends_the_engines_side(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """Within a second, by a code that says so (F41)."""
    async with socket_engine(echo) as engine, balancer(instance(engine.url)) as proxy:
        client = await opened(proxy)
        await receive(client)
        client.transport.abort()

        assert await engine.wait_closed() == [(1001, "")]
        (record,) = await proxy.wait_for_records(1)
        assert record.error == "ClientClosedRequest"
        assert proxy.in_flight() == 0
        await client.wait_closed()


async def test_vanished_client_of_a_silent_engine_is_noticed(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """An engine that reads nothing doesn't keep us from looking at the client."""

    async def stare(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await leave.wait()
        connection.transport.resume_reading()
        while True:
            await connection.recv()

    leave = asyncio.Event()
    async with (
        socket_engine(stare, max_queue=1) as engine,
        balancer(instance(engine.url)) as proxy,
    ):
        client = await opened(proxy)
        for _ in range(8):
            await client.send(b"x" * 100_000)
        client.transport.abort()
        (record,) = await proxy.wait_for_records(1)
        leave.set()

        assert record.error == "ClientClosedRequest"
        await engine.wait_closed()
        await client.wait_closed()


async def test_slow_engine_holds_its_client_back(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """What waits here is bounded, and nothing is lost."""
    got: list[int] = []

    async def dawdle(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await go_on.wait()
        connection.transport.resume_reading()
        got.extend([len(message) async for message in connection])

    async def flood(client: ClientConnection) -> None:
        for _ in range(400):
            await client.send(b"x" * 100_000)
            sent.append(1)

    go_on = asyncio.Event()
    sent: list[int] = []
    async with (
        socket_engine(dawdle, max_queue=1) as engine,
        balancer(instance(engine.url)) as proxy,
        opened(proxy) as client,
    ):
        async with asyncio.TaskGroup() as group:
            group.create_task(flood(client))
            await stalled(sent)
            assert len(sent) < 400
            go_on.set()
        await client.close()
        await engine.wait_closed()

    assert got == [100_000] * 400


async def test_slow_client_holds_its_engine_back(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """The other way round."""

    async def flood(connection: ServerConnection) -> None:
        for _ in range(400):
            await connection.send(b"x" * 100_000)
            sent.append(1)

    sent: list[int] = []
    async with (
        socket_engine(flood) as engine,
        balancer(instance(engine.url)) as proxy,
        opened(proxy, max_queue=1) as client,
    ):
        await stalled(sent)
        assert len(sent) < 400
        for _ in range(400):
            assert len(await receive(client)) == 100_000
        await client.close()
        await engine.wait_closed()


async def stalled(sent: list[int]) -> None:
    """Wait until nothing more can be sent: the count stands still for a while.

    Taken too early it proves less, and never fails.
    """
    async with asyncio.timeout(20):
        seen = [-1, 0]
        while not sent or set(seen[-4:]) != {len(sent)}:
            seen.append(len(sent))
            await asyncio.sleep(0.05)


async def test_engines_refusal_is_the_clients_answer(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """Status, headers and body; nothing was accepted before."""

    def refuse(connection: ServerConnection, request: Request) -> Response:
        headers = Headers({"x-why": "full", "content-length": "2", "retry-after": "3"})
        return Response(429, "Too Many", headers, b"no")

    async with (
        socket_engine(echo, process_request=refuse) as engine,
        balancer(instance(engine.url)) as proxy,
    ):
        with pytest.raises(InvalidStatus) as caught:
            await opened(proxy)
        (record,) = await proxy.wait_for_records(1)

    answer = caught.value.response
    assert (answer.status_code, answer.body) == (429, b"no")
    assert (answer.headers["x-why"], answer.headers["retry-after"]) == ("full", "3")
    assert (record.status, record.error) == (429, "engine_refused")


async def test_instances_without_sessions_and_dead_ones_are_passed_over(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """A framework answers 403 where there is no such path; nobody listens at the other."""

    def refuse(connection: ServerConnection, request: Request) -> Response:
        asked.append(request.path)
        return Response(403, "Forbidden", Headers({"content-length": "0"}), b"")

    asked: list[str] = []
    async with (
        socket_engine(echo, process_request=refuse) as text,
        socket_engine(echo) as audio,
        balancer(
            instance(text.url),
            instance("http://127.0.0.1:9", "e1"),
            instance(audio.url, "e2"),
        ) as proxy,
    ):
        for _ in range(6):
            async with opened(proxy) as client:
                await receive(client)

    assert len(audio.sessions) == 6
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [("?model=nope", 404, "model_not_found"), ("", 400, None)],
    ids=["unknown", "one-of-several"],
)
async def test_model_is_looked_up(
    socket_engine: Any, balancer: Any, instance: Any, query: str, status: int, code: str | None
) -> None:
    """The same answers as elsewhere, before anything is opened."""
    async with socket_engine(echo) as engine:
        fleet = (instance(engine.url), instance(engine.url, "e1", base="other"))
        async with balancer(*fleet) as proxy:
            with pytest.raises(InvalidStatus) as caught:
                await opened(proxy, query)

    assert caught.value.response.status_code == status
    assert (b"model_not_found" in caught.value.response.body) == (code is not None)


async def test_only_model_needs_no_name(socket_engine: Any, balancer: Any, instance: Any) -> None:
    """VLLM's own clients name it in their first message."""
    async with (
        socket_engine(echo) as engine,
        balancer(instance(engine.url)) as proxy,
        opened(proxy, "") as client,
    ):
        assert await receive(client) == '{"type":"session.created"}'


async def test_sessions_are_limited(socket_engine: Any, balancer: Any, instance: Any) -> None:
    """One more is told when to come back; one that ends makes room."""
    settings = DataPlaneSettings(max_sessions=1)
    async with (
        socket_engine(echo) as engine,
        balancer(instance(engine.url), settings=settings) as proxy,
    ):
        async with opened(proxy):
            with pytest.raises(InvalidStatus) as caught:
                await opened(proxy)
        await engine.wait_closed()
        await proxy.wait_for_records(2)
        async with opened(proxy) as client:
            await receive(client)

    assert caught.value.response.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


async def test_other_sockets_are_refused(balancer: Any, instance: Any) -> None:
    """404, in the form of every error."""
    async with balancer(instance("http://127.0.0.1:9")) as proxy:
        with pytest.raises(InvalidStatus) as caught:
            await connect(f"ws://127.0.0.1:{proxy.port}/v1/other", proxy=None)

    assert caught.value.response.status_code == 404
    assert b"path_not_found" in caught.value.response.body


async def test_engine_that_speaks_no_websocket(engine: Any, balancer: Any, instance: Any) -> None:
    """502 for nonsense, as for any request."""

    async def nonsense(received: Any, wire: Any) -> None:
        await wire.raw(b"HELLO\r\n\r\n")
        wire.close()

    async with engine(nonsense) as fake, balancer(instance(fake)) as proxy:
        with pytest.raises(InvalidStatus) as caught:
            await opened(proxy)

    assert caught.value.response.status_code == 502


async def test_client_that_leaves_before_the_engine_accepts(
    engine: Any, balancer: Any, instance: Any
) -> None:
    """The engine's side is given up at once."""

    async def hang(received: Any, wire: Any) -> None:
        await received.gone.wait()

    async with engine(hang) as fake, balancer(instance(fake)) as proxy:
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(
            b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await fake.wait_for_requests(1)
        writer.transport.abort()
        await fake.wait_for_connections(0)
        (record,) = await proxy.wait_for_records(1)

    assert (record.status, record.error) == (499, "ClientClosedRequest")


async def test_engine_that_dies_is_told_as_such(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """1014, bad gateway: not an end that looks like one."""

    async def die(connection: ServerConnection) -> None:
        await connection.recv()
        connection.transport.abort()

    async with (
        socket_engine(die) as engine,
        balancer(instance(engine.url)) as proxy,
        opened(proxy) as client,
    ):
        await client.send("x")
        assert (await ended(client))[0] == 1014
        (record,) = await proxy.wait_for_records(1)

    assert record.error == "stream_cut"
    assert proxy.health[-1] == (engine.url, False, "stream_cut")


async def test_too_large_a_message_is_refused_by_us(
    socket_engine: Any, balancer: Any, instance: Any
) -> None:
    """Sixteen mebibytes are the limit, and both sides hear why it ended."""
    async with (
        socket_engine(echo) as engine,
        balancer(instance(engine.url)) as proxy,
        opened(proxy) as client,
    ):
        await receive(client)
        with suppress(ConnectionClosed):
            await client.send(b"x" * (16 * 1024 * 1024 + 1))
        assert (await ended(client))[0] == 1009
        assert (await engine.wait_closed())[0][0] == 1009


async def test_session_without_the_answer_extension_is_closed() -> None:
    """A server that can't answer a handshake makes a 403 of it."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive_nothing() -> Any:
        raise AssertionError

    scope = {"path": "/", "query_string": b"", "headers": (), "subprotocols": ()}
    await ClientSocket(scope, receive_nothing, send).refuse(404, (), b"")

    assert sent == [{"type": "websocket.close"}]


async def test_what_waits_for_the_engine_goes_before_the_close() -> None:
    """The engine was slow, and the client has closed meanwhile."""
    said: list[Any] = [
        {"type": "websocket.receive", "text": "a"},
        {"type": "websocket.receive", "text": "b"},
        {"type": "websocket.disconnect", "code": 1000, "reason": ""},
    ]
    ready = asyncio.Event()
    got: list[Any] = []

    async def receive_next() -> Any:
        if len(said) == 1:
            ready.set()
        return said.pop(0)

    async def send_slowly(message: str | bytes) -> None:
        await ready.wait()
        for _ in range(10):  # turns of the loop, in which the close is noticed
            await asyncio.sleep(0)
        got.append(message)

    async def send_nothing(message: Any) -> None:
        raise AssertionError

    scope = {"path": "/", "query_string": b"", "headers": (), "subprotocols": ()}
    client = ClientSocket(scope, receive_next, send_nothing)

    async def relay() -> None:
        waiting = _Waiting(send_slowly)
        async with asyncio.TaskGroup() as group:
            group.create_task(waiting.run())
            group.create_task(_pass_to_engine(client, waiting))

    with pytest.raises(ExceptionGroup):
        await relay()

    assert got == ["a", "b"]
