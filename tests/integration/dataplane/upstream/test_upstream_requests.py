"""What is sent to an engine arrives as it was given, whatever its address, and the answer comes back."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from balancer.core.errors import EngineUnreachableError
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.upstream import Upstream

Opened = Callable[..., AbstractAsyncContextManager[Upstream]]
Get = Callable[..., Coroutine[Any, Any, UpstreamAnswer]]
Script = Callable[[Any, Any], Awaitable[None]]

EngineFactory = Callable[..., AbstractAsyncContextManager[Any]]


async def test_request_arrives_as_it_was_given(
    engine: EngineFactory, opened: Opened, answer_ok: Script
) -> None:
    """Method, target, headers and body reach the engine; host and length are added."""
    async with engine(answer_ok) as fake, opened() as upstream:
        answer = await upstream.send(
            fake.url, "POST", "/v1/x?a=b", ((b"x-one", b"1"),), b"\x00body"
        )
        await answer.read(1000)

        (received,) = fake.received
        assert (received.method, received.target, received.body) == (
            "POST",
            "/v1/x?a=b",
            b"\x00body",
        )
        assert received.header("x-one") == "1"
        assert received.header("host") == fake.url.removeprefix("http://")
        assert received.header("content-length") == "5"


async def test_answer_comes_as_it_was_sent(engine: EngineFactory, opened: Opened, get: Get) -> None:
    """Status, headers (repeated ones too) and body are the engine's."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(
            b"HTTP/1.1 418 Teapot\r\nSet-Cookie: a\r\nset-cookie: b\r\ncontent-length: 2\r\n\r\nhi"
        )

    async with engine(script) as fake, opened() as upstream:
        answer = await get(upstream, fake)

        assert answer.status == 418
        assert answer.headers[:2] == ((b"set-cookie", b"a"), (b"set-cookie", b"b"))
        assert await answer.read(10) == b"hi"
        answer.close()


async def test_large_body_is_sent_whole(
    engine: EngineFactory, opened: Opened, answer_ok: Script
) -> None:
    """A body beyond the socket's buffers arrives."""
    async with engine(answer_ok) as fake, opened() as upstream:
        body = bytes(range(256)) * 20_000
        await (await upstream.send(fake.url, "POST", "/x", (), body)).read(100)

        assert fake.received[0].body == body


async def test_early_answer_to_an_unsent_body_ends_the_connection(
    engine: EngineFactory, opened: Opened
) -> None:
    """The rest of a refused body must not become the next request's beginning."""
    answers: list[bytes] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Large\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        done.set()
        writer.close()

    done = asyncio.Event()
    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, opened() as upstream:
        answer = await upstream.send(url, "POST", "/x", (), b"x" * 30_000_000)
        answers.append(b"%d" % answer.status)
        await done.wait()

        assert answers == [b"413"]
        assert not upstream._pools[url].idle


async def test_ipv6(engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script) -> None:
    """An address in brackets is reached."""
    async with engine(answer_ok, host="::1") as fake, opened() as upstream:
        assert (await get(upstream, fake)).status == 200
        assert fake.received[0].header("host") == fake.url.removeprefix("http://")


async def test_path_of_the_base_url_is_kept(
    engine: EngineFactory, opened: Opened, answer_ok: Script
) -> None:
    """An engine behind a path prefix is addressed below it."""
    async with engine(answer_ok) as fake, opened() as upstream:
        await upstream.send(fake.url + "/engine/", "GET", "/v1/x", (), b"")

        assert fake.received[0].target == "/engine/v1/x"


async def test_proxy_of_the_environment_is_ignored(
    engine: EngineFactory,
    monkeypatch: pytest.MonkeyPatch,
    opened: Opened,
    get: Get,
    answer_ok: Script,
) -> None:
    """`HTTP_PROXY` doesn't lead engine traffic astray."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with engine(answer_ok) as fake, opened() as upstream:
        assert (await get(upstream, fake)).status == 200


async def test_tls(certificate: tuple[Path, Path], opened: Opened) -> None:
    """An https engine is reached with a context that trusts it, and refused with one that doesn't."""
    key, chain = certificate
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(chain, key)

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\ntls")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=serving)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    async with server:
        trusting = ssl.create_default_context(cafile=str(chain))
        async with opened(tls=trusting) as upstream:
            assert await (await upstream.send(url, "GET", "/", (), b"")).read(9) == b"tls"
        async with opened() as upstream:
            with pytest.raises(EngineUnreachableError):
                await upstream.send(url, "GET", "/", (), b"")


def test_everything_works_on_uvloop(
    engine: EngineFactory, balancer: Any, instance: Any, opened: Opened
) -> None:
    """The production loop's transports are of other classes; a whole proxied stream on it."""
    events = (b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n")

    async def script(received: Any, wire: Any) -> None:
        await wire.events(*events)

    async def proxied() -> bytes:
        async with (
            engine(script) as fake,
            balancer(instance(fake)) as proxy,
            opened() as upstream,
        ):
            body = b'{"prompt":[1,2],"stream":true}'
            answer = await upstream.send(proxy.url, "POST", "/v1/completions", (), body)
            return await answer.read(10_000)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(proxied()) == b"".join(events)


async def test_small_writes_are_not_held_back(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
    """Nagle would hold a second small packet for 40 ms: the option is set towards engines."""
    async with engine(answer_ok) as fake, opened() as upstream:
        await (await get(upstream, fake)).read(1000)
        (connection,) = upstream._pools[fake.url].idle
        assert connection._transport is not None
        raw = connection._transport.get_extra_info("socket")

        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
