"""Connections are used again while they are good, and closed with what they are for."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from balancer.core.errors import (
    BalancerError,
    EngineClosedError,
    EngineUnreachableError,
    StreamCutError,
)
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.upstream import Upstream

Opened = Callable[..., AbstractAsyncContextManager[Upstream]]
Get = Callable[..., Coroutine[Any, Any, UpstreamAnswer]]
Script = Callable[[Any, Any], Awaitable[None]]

EngineFactory = Callable[..., AbstractAsyncContextManager[Any]]


async def test_connection_is_reused_after_a_complete_answer(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
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
async def test_answer_that_nobody_asked_for_is_nobodys(
    engine: EngineFactory, more: bytes, opened: Opened, get: Get
) -> None:
    """An engine out of step: the next request gets its own answer, over another connection."""

    async def script(received: Any, wire: Any) -> None:
        said = b"%d" % received.connection
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n" + said + more)

    async with engine(script) as fake, opened() as upstream:
        assert await (await get(upstream, fake)).read(10) == b"1"
        assert await (await get(upstream, fake)).read(10) == b"2"


async def test_parallel_requests_have_a_connection_each(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
    """Nothing is pipelined."""
    async with engine(answer_ok) as fake, opened() as upstream:
        first, second = await get(upstream, fake), await get(upstream, fake)

        assert await first.read(100) == b'{"connection": 1}'
        assert await second.read(100) in {b'{"connection": 1}', b'{"connection": 2}'}


async def test_idle_connection_is_closed_before_the_engine_does(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
    """After `keep_alive_s` without use the engine sees the connection close."""
    async with engine(answer_ok) as fake, opened(keep_alive_s=0.05) as upstream:
        await (await get(upstream, fake)).read(1000)
        await fake.wait_for_connections(0)

        await (await get(upstream, fake)).read(1000)
        assert fake.connections == 2


async def test_reused_connection_that_dies_unanswered_is_replaced(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
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


async def test_keep_alive_race_never_shows(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
    """Two hundred rounds against an engine that drops every connection after its answer (F50)."""

    async def script(received: Any, wire: Any) -> None:
        await answer_ok(received, wire)
        wire.close()

    async with engine(script) as fake, opened() as upstream:
        for _ in range(200):
            assert (await get(upstream, fake)).status == 200


async def test_new_connection_that_dies_unanswered_is_an_error(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """Without a reused connection there is no race to blame."""

    async def script(received: Any, wire: Any) -> None:
        wire.close()

    async with engine(script) as fake, opened() as upstream:
        with pytest.raises(EngineClosedError):
            await get(upstream, fake)

        assert len(fake.received) == 1


async def test_closing_connection_is_not_reused(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """`connection: close` is obeyed."""

    async def script(received: Any, wire: Any) -> None:
        await wire.json({}, connection="close")

    async with engine(script) as fake, opened() as upstream:
        for _ in range(2):
            await (await get(upstream, fake)).read(100)

        assert fake.connections == 2


async def test_unasked_bytes_retire_an_idle_connection(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
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


async def test_cancelled_caller_closes_the_connection(
    engine: EngineFactory, opened: Opened, get: Get, stay_silent: Script
) -> None:
    """An engine that nobody waits for any more sees the close."""
    async with engine(stay_silent) as fake, opened() as upstream:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(get(upstream, fake))
            await fake.wait_for_requests(1)
            task.cancel()

        await fake.wait_for_connections(0)


async def test_closed_answer_breaks_its_connection(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
    """`close` in the middle of an answer reaches the engine."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head()
        await wire.chunk(b"one")
        await received.gone.wait()

    async with engine(script) as fake, opened() as upstream:
        answer = await get(upstream, fake)
        answer.close()

        await fake.wait_for_connections(0)


async def test_sockets_return_to_base_after_broken_answers(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
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


async def test_connection_to_a_name_that_moved_is_not_used_again(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
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


async def test_connection_that_comes_back_after_close_is_not_kept(
    engine: EngineFactory, opened: Opened, get: Get
) -> None:
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


async def test_nothing_is_asked_after_close(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
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
        return await upstream.send(fake.url, "GET", "/x", (), b"")
    except BalancerError as error:
        return error


async def test_reused_connection_that_dies_late_is_no_race(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
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


async def test_engine_that_retires_connections_early_never_shows(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
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


async def test_instances_that_come_and_go_leave_nothing(
    engine: EngineFactory, opened: Opened, get: Get, answer_ok: Script
) -> None:
    """No pool stays for an address that nobody speaks to any more, answered or not."""
    async with opened(keep_alive_s=0.05) as upstream:
        for _ in range(3):
            async with engine(answer_ok) as fake:
                await (await get(upstream, fake)).read(1000)
                await fake.wait_for_connections(0)
            with pytest.raises(EngineUnreachableError):
                await get(upstream, fake)

        assert upstream._pools == {}
