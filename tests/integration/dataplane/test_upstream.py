"""The client side against a peer that misbehaves on real sockets."""

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from balancer.core.errors import (
    BalancerError,
    ConnectTimeoutError,
    EngineClosedError,
    EngineProtocolError,
    EngineTimeoutError,
    EngineUnreachableError,
    StreamCutError,
)
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.upstream import Upstream

EngineFactory = Callable[..., AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def opened(**limits: Any) -> AsyncIterator[Upstream]:
    upstream = Upstream(
        **{"connect_timeout_s": 2.0, "first_byte_timeout_s": 5.0, "idle_timeout_s": 5.0} | limits
    )
    try:
        yield upstream
    finally:
        await upstream.close()


async def get(upstream: Upstream, engine: Any, method: str = "GET") -> UpstreamAnswer:
    return await upstream.send(engine.url, method, "/x", (), b"")


async def answer_ok(received: Any, wire: Any) -> None:
    await wire.json({"connection": received.connection})


async def test_request_arrives_as_it_was_given(engine: EngineFactory) -> None:
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


async def test_answer_comes_as_it_was_sent(engine: EngineFactory) -> None:
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


async def test_connection_is_reused_after_a_complete_answer(engine: EngineFactory) -> None:
    """Three requests one after the other need one connection."""
    async with engine(answer_ok) as fake, opened() as upstream:
        for _ in range(3):
            await (await get(upstream, fake)).read(1000)

        assert fake.connections == 1


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong", id="whole"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-le", id="begun"),
        pytest.param(b"\x00", id="no-answer"),
    ],
)
async def test_answer_that_nobody_asked_for_is_nobodys(engine: EngineFactory, more: bytes) -> None:
    """An engine out of step: the next request gets its own answer, over another connection."""

    async def script(received: Any, wire: Any) -> None:
        said = b"%d" % received.connection
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n" + said + more)

    async with engine(script) as fake, opened() as upstream:
        assert await (await get(upstream, fake)).read(10) == b"1"
        assert await (await get(upstream, fake)).read(10) == b"2"


async def test_parallel_requests_have_a_connection_each(engine: EngineFactory) -> None:
    """Nothing is pipelined."""
    async with engine(answer_ok) as fake, opened() as upstream:
        first, second = await get(upstream, fake), await get(upstream, fake)

        assert await first.read(100) == b'{"connection": 1}'
        assert await second.read(100) in {b'{"connection": 1}', b'{"connection": 2}'}


async def test_idle_connection_is_closed_before_the_engine_does(engine: EngineFactory) -> None:
    """After `keep_alive_s` without use the engine sees the connection close."""
    async with engine(answer_ok) as fake, opened(keep_alive_s=0.05) as upstream:
        await (await get(upstream, fake)).read(1000)
        await fake.wait_for_connections(0)

        await (await get(upstream, fake)).read(1000)
        assert fake.connections == 2


async def test_reused_connection_that_dies_unanswered_is_replaced(engine: EngineFactory) -> None:
    """The keep-alive race: the engine closes just as the next request arrives (F50)."""
    calls = 0

    async def script(received: Any, wire: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            wire.close()
        else:
            await answer_ok(received, wire)

    async with engine(script) as fake, opened() as upstream:
        await (await get(upstream, fake)).read(1000)

        assert await (await get(upstream, fake)).read(1000) == b'{"connection": 2}'


async def test_keep_alive_race_never_shows(engine: EngineFactory) -> None:
    """Two hundred rounds against an engine that drops every connection after its answer (F50)."""

    async def script(received: Any, wire: Any) -> None:
        await answer_ok(received, wire)
        wire.close()

    async with engine(script) as fake, opened() as upstream:
        for _ in range(200):
            assert (await get(upstream, fake)).status == 200


async def test_new_connection_that_dies_unanswered_is_an_error(engine: EngineFactory) -> None:
    """Without a reused connection there is no race to blame."""

    async def script(received: Any, wire: Any) -> None:
        wire.close()

    async with engine(script) as fake, opened() as upstream:
        with pytest.raises(EngineClosedError):
            await get(upstream, fake)

        assert len(fake.received) == 1


async def test_nobody_listening_is_unreachable() -> None:
    """A refused connection says that the engine saw nothing."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with opened() as upstream:
            with pytest.raises(EngineUnreachableError):
                await upstream.send(url, "GET", "/", (), b"")


async def test_connect_limit_is_a_retryable_timeout() -> None:
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


async def stay_silent(received: Any, wire: Any) -> None:
    await received.gone.wait()


async def test_first_byte_limit(engine: EngineFactory) -> None:
    """Silence before the answer ends in a timeout, and the engine sees the close."""
    async with engine(stay_silent) as fake, opened(first_byte_timeout_s=0.1) as upstream:
        with pytest.raises(EngineTimeoutError):
            await get(upstream, fake)

        await fake.wait_for_connections(0)


async def test_first_byte_limit_covers_silence_after_the_headers(engine: EngineFactory) -> None:
    """Engines send a stream's headers before the prefill: the idle limit doesn't apply yet."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head()
        await asyncio.sleep(0.3)
        await wire.chunk(b"late")
        await wire.end()

    async with engine(script) as fake, opened(idle_timeout_s=0.1) as upstream:
        assert await (await get(upstream, fake)).read(10) == b"late"


async def test_idle_limit_between_chunks(engine: EngineFactory) -> None:
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


async def test_slow_stream_has_no_total_limit(engine: EngineFactory) -> None:
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


async def test_time_that_the_consumer_takes_is_no_silence(engine: EngineFactory) -> None:
    """A slow client holds its engine back; that is not the engine's silence."""
    body = b"x" * 4_000_000

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 4000000\r\n\r\n" + body)

    async with engine(script) as fake, opened(idle_timeout_s=0.1) as upstream:
        answer = await get(upstream, fake)
        first = await answer.next_chunk()
        await asyncio.sleep(0.4)

        assert first + await answer.read(len(body)) == body


async def test_slow_consumer_holds_the_engine_back(engine: EngineFactory) -> None:
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
        async with asyncio.timeout(5):
            while before != sent:
                before = sent
                await asyncio.sleep(0.1)
        stalled_at = sent

        assert stalled_at < 30_000_000
        assert len(await answer.read(100_000_000)) == 65_536_000


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
    engine: EngineFactory, sent: bytes, error: type[BalancerError]
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


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"SSH-2.0-OpenSSH\r\n", id="not-http"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-le", id="cut-headers"),
        pytest.param(b"HTTP/1.1 700 Odd\r\ncontent-length: 0\r\n\r\n", id="odd-status"),
        pytest.param(
            b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            id="upgrade",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 300_000 + b"\r\n\r\n", id="header-bomb"),
    ],
)
async def test_bytes_that_are_no_answer_are_a_protocol_error(
    engine: EngineFactory, sent: bytes
) -> None:
    """What can't be understood is told, not waited for."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(sent)
        wire.close()

    async with engine(script) as fake, opened() as upstream:
        with pytest.raises(EngineProtocolError):
            await get(upstream, fake)


async def test_answer_without_length_ends_with_the_connection(engine: EngineFactory) -> None:
    """HTTP/1.0 style: the end of the connection is the end of the body."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nall of it")
        wire.close()

    async with engine(script) as fake, opened() as upstream:
        assert await (await get(upstream, fake)).read(100) == b"all of it"


async def test_reset_is_no_end_of_an_answer_without_length(engine: EngineFactory) -> None:
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
    engine: EngineFactory, method: str, head: bytes
) -> None:
    """Nothing is waited for, and the next request is answered right."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(head)

    async with engine(script) as fake, opened() as upstream:
        for _ in range(2):
            answer = await get(upstream, fake, method)
            assert await answer.read(10) == b""
            assert answer.is_complete


async def test_informational_answers_are_skipped(engine: EngineFactory) -> None:
    """A 103 before the answer is not the answer."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await answer_ok(received, wire)

    async with engine(script) as fake, opened() as upstream:
        answer = await get(upstream, fake)

        assert answer.status == 200
        assert (b"link", b"x") not in answer.headers


async def test_closing_connection_is_not_reused(engine: EngineFactory) -> None:
    """`connection: close` is obeyed."""

    async def script(received: Any, wire: Any) -> None:
        await wire.json({}, connection="close")

    async with engine(script) as fake, opened() as upstream:
        for _ in range(2):
            await (await get(upstream, fake)).read(100)

        assert fake.connections == 2


async def test_unasked_bytes_retire_an_idle_connection(engine: EngineFactory) -> None:
    """What comes between two answers would be taken for the next one."""

    async def script(received: Any, wire: Any) -> None:
        await answer_ok(received, wire)
        await go_on.wait()
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")

    go_on = asyncio.Event()
    async with engine(script) as fake, opened() as upstream:
        await (await get(upstream, fake)).read(100)
        go_on.set()
        await fake.wait_for_connections(0)

        assert await (await get(upstream, fake)).read(100) == b'{"connection": 2}'


async def test_cancelled_caller_closes_the_connection(engine: EngineFactory) -> None:
    """An engine that nobody waits for any more sees the close."""
    async with engine(stay_silent) as fake, opened() as upstream:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(get(upstream, fake))
            await fake.wait_for_requests(1)
            task.cancel()

        await fake.wait_for_connections(0)


async def test_closed_answer_breaks_its_connection(engine: EngineFactory) -> None:
    """`close` in the middle of an answer reaches the engine."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head()
        await wire.chunk(b"one")
        await received.gone.wait()

    async with engine(script) as fake, opened() as upstream:
        answer = await get(upstream, fake)
        answer.close()

        await fake.wait_for_connections(0)


async def test_answer_over_the_limit_is_refused(engine: EngineFactory) -> None:
    """`read` doesn't fill memory with what nobody wants."""
    async with engine(answer_ok) as fake, opened() as upstream:
        answer = await get(upstream, fake)

        with pytest.raises(EngineProtocolError):
            await answer.read(3)


async def test_large_body_is_sent_whole(engine: EngineFactory) -> None:
    """A body beyond the socket's buffers arrives."""
    async with engine(answer_ok) as fake, opened() as upstream:
        body = bytes(range(256)) * 20_000
        await (await upstream.send(fake.url, "POST", "/x", (), body)).read(100)

        assert fake.received[0].body == body


async def test_early_answer_to_an_unsent_body_ends_the_connection(engine: EngineFactory) -> None:
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


async def test_ipv6(engine: EngineFactory) -> None:
    """An address in brackets is reached."""
    async with engine(answer_ok, host="::1") as fake, opened() as upstream:
        assert (await get(upstream, fake)).status == 200
        assert fake.received[0].header("host") == fake.url.removeprefix("http://")


async def test_path_of_the_base_url_is_kept(engine: EngineFactory) -> None:
    """An engine behind a path prefix is addressed below it."""
    async with engine(answer_ok) as fake, opened() as upstream:
        await upstream.send(fake.url + "/engine/", "GET", "/v1/x", (), b"")

        assert fake.received[0].target == "/engine/v1/x"


async def test_proxy_of_the_environment_is_ignored(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`HTTP_PROXY` doesn't lead engine traffic astray."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with engine(answer_ok) as fake, opened() as upstream:
        assert (await get(upstream, fake)).status == 200


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Key and self-signed certificate of `localhost`."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


async def test_tls(certificate: tuple[Path, Path]) -> None:
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


async def test_sockets_return_to_base_after_broken_answers(engine: EngineFactory) -> None:
    """Of 300 requests every tenth is cut; connections are reused and none is lost (F51)."""
    count = 0

    async def script(received: Any, wire: Any) -> None:
        nonlocal count
        count += 1
        if count % 10 == 0:
            await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
            wire.close()
        else:
            await answer_ok(received, wire)

    async def one(upstream: Upstream, fake: Any) -> None:
        for _ in range(30):
            answer = await get(upstream, fake)
            try:
                await answer.read(100)
            except StreamCutError:
                pass
            finally:
                answer.close()

    async with engine(script) as fake, opened(keep_alive_s=0.1) as upstream:
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(one(upstream, fake))

        assert fake.connections < 60
        await fake.wait_for_connections(0)
        pool = upstream._pools.get(fake.url)
        assert pool is None or not any(each.is_open for each in pool.idle)


def test_everything_works_on_uvloop(engine: EngineFactory, balancer: Any, instance: Any) -> None:
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


async def test_connection_to_a_name_that_moved_is_not_used_again(engine: EngineFactory) -> None:
    """An idle one is closed, one in use finishes first."""
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def script(received: Any, wire: Any) -> None:
        if received.target == "/slow":
            arrived.set()
            await go_on.wait()
        await wire.json({"connection": received.connection})

    async with engine(script) as fake, opened() as upstream:
        await (await get(upstream, fake)).read(1000)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(upstream.send(fake.url, "GET", "/slow", (), b""))
            await arrived.wait()
            await (await get(upstream, fake)).read(1000)
            upstream.connect_anew(fake.url)
            upstream.connect_anew("http://never-asked:1")
            go_on.set()
        await running.result().read(1000)
        await (await get(upstream, fake)).read(1000)

        used = [received.connection for received in fake.received]
    assert used[0] == used[1]
    assert len({used[1], used[2], used[3]}) == 3


async def test_connection_that_comes_back_after_close_is_not_kept(engine: EngineFactory) -> None:
    """A leg may end after the pools were given up; its connection ends with it."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
        await go_on.wait()
        await wire.raw(b"ok")

    go_on = asyncio.Event()
    async with engine(script) as fake, opened(keep_alive_s=60.0) as upstream:
        answer = await get(upstream, fake)
        upstream._pools.clear()  # as `close` does, just before the connection would be broken
        go_on.set()
        assert await answer.read(10) == b"ok"

        await fake.wait_for_connections(0)


async def test_nothing_is_asked_after_close(engine: EngineFactory) -> None:
    """Neither over a new connection nor over one that was being made."""
    async with engine(answer_ok) as fake, opened() as upstream:
        await upstream.close()
        with pytest.raises(EngineUnreachableError):
            await get(upstream, fake)
        assert upstream._pools == {}

    async with engine(answer_ok) as fake, opened() as upstream:
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(answer_or_error(upstream, fake))
            await asyncio.sleep(0)  # it waits for its connection now
            await upstream.close()
        assert isinstance(asking.result(), EngineClosedError)
        await fake.wait_for_connections(0)


async def answer_or_error(upstream: Upstream, fake: Any) -> object:
    try:
        return await get(upstream, fake)
    except BalancerError as error:
        return error


async def test_reused_connection_that_dies_late_is_no_race(engine: EngineFactory) -> None:
    """An engine that died of a request isn't asked the same again at once."""
    calls = 0

    async def script(received: Any, wire: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await answer_ok(received, wire)
        else:
            await asyncio.sleep(1.2)
            wire.close()

    async with engine(script) as fake, opened() as upstream:
        await (await get(upstream, fake)).read(1000)
        with pytest.raises(EngineClosedError):
            await get(upstream, fake)

        assert calls == 2


async def test_engine_that_retires_connections_early_never_shows(engine: EngineFactory) -> None:
    """Its keep-alive is as long as our pause: it closes before, after and while we ask (F50)."""

    async def retire(wire: Any, after_s: float) -> None:
        await asyncio.sleep(after_s)
        wire.close()

    async def script(received: Any, wire: Any) -> None:
        await answer_ok(received, wire)
        await retire(wire, 0.005)

    async with engine(script) as fake, opened() as upstream:
        for number in range(200):
            answer = await get(upstream, fake)
            assert answer.status == 200
            await answer.read(1000)
            await asyncio.sleep(0.004 + number * 0.00001)


async def test_instances_that_come_and_go_leave_nothing(engine: EngineFactory) -> None:
    """No pool stays for an address that nobody speaks to any more, answered or not."""
    async with opened(keep_alive_s=0.05) as upstream:
        for _ in range(3):
            async with engine(answer_ok) as fake:
                await (await get(upstream, fake)).read(1000)
                await fake.wait_for_connections(0)
            with pytest.raises(EngineUnreachableError):
                await get(upstream, fake)

        assert upstream._pools == {}


async def test_small_writes_are_not_held_back(engine: EngineFactory) -> None:
    """Nagle would hold a second small packet for 40 ms: the option is set towards engines."""
    async with engine(answer_ok) as fake, opened() as upstream:
        await (await get(upstream, fake)).read(1000)
        (connection,) = upstream._pools[fake.url].idle
        assert connection._transport is not None
        raw = connection._transport.get_extra_info("socket")

        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
