"""What the sockets on both sides of kvlb are set to: nothing else shows it before a network does."""

import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.upstream import Upstream
from balancer.server import listen

Opened = Callable[..., AbstractAsyncContextManager[Upstream]]
Get = Callable[..., Coroutine[Any, Any, UpstreamAnswer]]
EngineFactory = Callable[..., AbstractAsyncContextManager[Any]]


async def test_connections_to_engines_neither_delay_nor_outlive_their_host(
    engine: EngineFactory,
    opened: Opened,
    get: Get,
    answer_ok: Callable[[Any, Any], Awaitable[None]],
) -> None:
    """Small writes go out at once; a host that vanishes in a long silence is noticed."""
    async with engine(answer_ok) as fake, opened() as upstream:
        await (await get(upstream, fake)).read(1000)
        (pool,) = upstream._pools.values()
        transport: Any = pool.idle[0]._transport
        raw = transport.get_extra_info("socket")

        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_connections_of_clients_do_not_delay() -> None:
    """Head and body of an answer may be two writes."""
    with listen("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
