"""WebSocket sessions that aren't to be: no engine, no model, too many, too large."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response

from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.client_socket import ClientSocket

Session = Callable[[ServerConnection], Awaitable[None]]
Opened = Callable[..., connect]
Receive = Callable[[ClientConnection], Awaitable[str | bytes]]
Ended = Callable[[ClientConnection], Awaitable[tuple[int | None, str | None]]]


async def test_engines_refusal_is_the_clients_answer(
    socket_engine: Any, balancer: Any, instance: Any, echo: Session, opened: Opened
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
    socket_engine: Any,
    balancer: Any,
    instance: Any,
    echo: Session,
    opened: Opened,
    receive: Receive,
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
    socket_engine: Any,
    balancer: Any,
    instance: Any,
    query: str,
    status: int,
    code: str | None,
    echo: Session,
    opened: Opened,
) -> None:
    """The same answers as elsewhere, before anything is opened."""
    async with socket_engine(echo) as engine:
        fleet = (instance(engine.url), instance(engine.url, "e1", base="other"))
        async with balancer(*fleet) as proxy:
            with pytest.raises(InvalidStatus) as caught:
                await opened(proxy, query)

    assert caught.value.response.status_code == status
    assert (b"model_not_found" in caught.value.response.body) == (code is not None)


async def test_only_model_needs_no_name(
    socket_engine: Any,
    balancer: Any,
    instance: Any,
    echo: Session,
    opened: Opened,
    receive: Receive,
) -> None:
    """VLLM's own clients name it in their first message."""
    async with (
        socket_engine(echo) as engine,
        balancer(instance(engine.url)) as proxy,
        opened(proxy, "") as client,
    ):
        assert await receive(client) == '{"type":"session.created"}'


async def test_sessions_are_limited(
    socket_engine: Any,
    balancer: Any,
    instance: Any,
    echo: Session,
    opened: Opened,
    receive: Receive,
) -> None:
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


async def test_engine_that_speaks_no_websocket(
    engine: Any, balancer: Any, instance: Any, opened: Opened
) -> None:
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
    socket_engine: Any, balancer: Any, instance: Any, opened: Opened, ended: Ended
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
    socket_engine: Any,
    balancer: Any,
    instance: Any,
    echo: Session,
    opened: Opened,
    receive: Receive,
    ended: Ended,
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
