"""Many clients at once."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop

from balancer.server import BACKLOG, listen, several

BURST = 512


async def stream_once(port: int, number: int, opened: asyncio.Barrier) -> str:
    """Connect, wait until everybody is connected, and read one whole stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        ids = list(range(number, number + 40))
        body = {"model": "sim", "prompt": ids, "max_tokens": 4, "stream": True, "ignore_eos": True}
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
        await opened.wait()
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + raw)
        answer = await reader.readuntil(b"data: [DONE]\n\n")
        return answer.split(b"\r\n", 1)[0].decode()
    finally:
        writer.transport.abort()


@pytest.mark.timeout(180)
async def test_512_streams_opened_at_once_are_all_served(
    kvlb_up: Any, engines_up: Any, describe: Callable[..., dict[str, Any]]
) -> None:
    """None reset, none lost, none cut."""
    async with (
        engines_up("2") as fleet,
        kvlb_up([describe(each) for each in fleet.engines]) as kvlb,
    ):
        await kvlb.all_known(["m0", "m1"])
        port = urlsplit(kvlb.url).port
        assert port is not None
        opened = asyncio.Barrier(BURST)
        async with asyncio.timeout(150), asyncio.TaskGroup() as group:
            streams = [
                group.create_task(stream_once(port, number, opened)) for number in range(BURST)
            ]
        failed = await kvlb.series("kvlb_requests_total")

    assert Counter(each.result() for each in streams) == {"HTTP/1.1 200 OK": BURST}
    assert {key for key in failed if 'outcome="ok"' not in key} == set()
    assert sum(failed.values()) == BURST


def test_connections_wait_in_line_however_many_come_at_once() -> None:
    """Before the first is accepted all are connected: a short queue would lose their first packets."""
    assert BACKLOG == 4096
    with listen("127.0.0.1", 0) as listener, ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(BURST)]
        for each in clients:
            each.settimeout(0.5)  # a lost SYN is sent again after a second
            each.connect(listener.getsockname())

        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def accepted_within(turns: int, listener: socket.socket) -> int:
    """How many connections the loop takes in so many turns."""
    loop, made = asyncio.get_running_loop(), list[asyncio.BaseTransport]()

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    with several(listener) as listeners:
        servers = [await loop.create_server(Taken, sock=each) for each in listeners]
        for _ in range(turns):
            await asyncio.sleep(0)
        for server in servers:
            server.close()
        for transport in made:
            transport.close()
    return len(made)


def test_a_crowd_is_accepted_in_a_few_turns_of_the_loop() -> None:
    """One by one, the last would wait for as many long turns as there are others."""
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        listen("127.0.0.1", 0) as listener,
        ExitStack() as stack,
    ):
        for _ in range(64):
            stack.enter_context(socket.create_connection(listener.getsockname()))

        assert runner.run(accepted_within(8, listener)) == 64
