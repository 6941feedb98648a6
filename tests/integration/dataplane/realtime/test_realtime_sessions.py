"""WebSocket sessions between a real client and real engines: messages, closes, load, and slow ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection
from websockets.typing import Subprotocol

from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.client_socket import ClientSocket
from balancer.dataplane.realtime import _pass_to_engine, _Waiting

Session = Callable[[ServerConnection], Awaitable[None]]
Opened = Callable[..., connect]
Receive = Callable[[ClientConnection], Awaitable[str | bytes]]
Ended = Callable[[ClientConnection], Awaitable[tuple[int | None, str | None]]]


async def test_messages_pass_both_ways_as_they_are(
    socket_engine: Any,
    balancer: Any,
    instance: Any,
    echo: Session,
    opened: Opened,
    receive: Receive,
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
    socket_engine: Any, balancer: Any, instance: Any, echo: Session, opened: Opened
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
    socket_engine: Any,
    balancer: Any,
    instance: Any,
    level: Any,
    shown: list[str],
    echo: Session,
    opened: Opened,
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
    socket_engine: Any,
    balancer: Any,
    instance: Any,
    code: int,
    reason: str,
    heard: int,
    opened: Opened,
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
    socket_engine: Any,
    balancer: Any,
    instance: Any,
    code: int,
    reason: str,
    error: str | None,
    opened: Opened,
    receive: Receive,
    ended: Ended,
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
    socket_engine: Any, balancer: Any, instance: Any, echo: Session, opened: Opened
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
    socket_engine: Any,
    balancer: Any,
    instance: Any,
    echo: Session,
    opened: Opened,
    receive: Receive,
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
    socket_engine: Any, balancer: Any, instance: Any, opened: Opened
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
    socket_engine: Any, balancer: Any, instance: Any, opened: Opened
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
    socket_engine: Any, balancer: Any, instance: Any, opened: Opened, receive: Receive
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
