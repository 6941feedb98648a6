"""Who is refused while it is still sending can read why: real sockets, whose buffers are full of its body."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from balancer.dataplane import parting
from balancer.dataplane.exchange import Exchange

Connect = Callable[..., AbstractAsyncContextManager[tuple[Any, Any]]]
Answer = Callable[[Exchange], Awaitable[None]]

MANY = 3_000_000
"""More bytes than the connection's buffers hold at first."""


async def send_all_then_read(client: Any, data: bytes) -> bytes:
    """As plain HTTP clients do: the answer is looked at when everything is sent."""
    raw: socket.socket = client.writer.get_extra_info("socket")
    loop = asyncio.get_running_loop()
    with raw.dup() as own:
        own.setblocking(False)
        client.reader._transport.pause_reading()
        async with asyncio.timeout(20):
            await loop.sock_sendall(own, data)
        client.reader._transport.resume_reading()
        answer: bytes = await client.read_rest()
        return answer


async def refuse(exchange: Exchange) -> None:
    """An answer before anything was read."""
    await exchange.answer(413, ((b"connection", b"close"), (b"content-length", b"2")), b"no")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(
            b"POST /v1/x HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % MANY + b"b" * MANY,
            413,
            id="body",
        ),
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"a" * MANY, 431, id="head"),
        pytest.param(b"no HTTP \r\n\r\n" * (MANY // 12), 400, id="no-request"),
        pytest.param(
            b"POST /large HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % MANY + b"b" * MANY,
            413,
            id="body-for-the-application",
        ),
        pytest.param(
            b"POST /else HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\nz" + b"z" * MANY,
            400,
            id="chunk-for-the-application",
        ),
    ],
)
async def test_answer_reaches_who_is_still_sending(
    connected: Connect, sent: bytes, status: int
) -> None:
    """A closed socket would reset the connection, and the reset take the answer away."""
    async with connected(refuse) as (client, _):
        answer = await send_all_then_read(client, sent)

        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close\r\n" in answer


async def test_who_never_stops_is_cut_off(
    connected: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many bytes."""
    monkeypatch.setattr(parting, "PARTING_BYTES", 1_000_000)
    async with connected(refuse) as (client, _):
        client.send(b"POST /v1/x HTTP/1.1\r\ncontent-length: 999999999\r\n\r\n")
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while not client.writer.is_closing():
                    client.send(b"b" * 100_000)
                    await client.writer.drain()


async def test_who_never_ends_is_left(connected: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so much time, although it says nothing and doesn't close."""
    monkeypatch.setattr(parting, "PARTING_S", 0.1)
    limits = {"head_timeout_s": 0.4}  # the server looks four times as often
    async with connected(refuse, limits=limits) as (client, _):
        client.send(b"POST /v1/x HTTP/1.1\r\ncontent-length: 9\r\n\r\n")
        await client.read_rest()  # half of the connection has ended
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while not client.writer.is_closing():
                    client.send(b"b")
                    await asyncio.sleep(0.02)


async def test_request_whose_rest_is_nonsense_is_left_at_once(
    connected: Connect, echo: Answer
) -> None:
    """Who would answer it is told, while its client may still read why."""
    async with connected(echo) as (client, plane):
        client.send(b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        await plane.begun()
        client.send(b"nonsense\r\n")
        answer = await client.read_rest()

        assert answer.startswith(b"HTTP/1.1 400 ")
        assert type(await plane.next_end()).__name__ == "ClientGoneError"
