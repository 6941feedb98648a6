"""Requests that ask for a WebSocket where none can be, on a server that speaks it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from balancer.dataplane.exchange import Exchange
from balancer.dataplane.server_protocols import PatientWebSocket

Connect = Callable[..., AbstractAsyncContextManager[tuple[Any, Any]]]
Answer = Callable[[Exchange], Awaitable[None]]
Post = Callable[..., bytes]

ASKS = (b"connection: upgrade", b"upgrade: websocket")
KEYS = (b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", b"sec-websocket-version: 13")
ECHOED = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"


def get(*headers: bytes, query: bytes = b"", version: bytes = b"1.1") -> bytes:
    """The head of a handshake."""
    lines = [b"GET /v1/realtime%b HTTP/%b" % (query, version), b"host: x", *ASKS, *KEYS, *headers]
    return b"\r\n".join([*lines, b"", b""])


@pytest.mark.parametrize("cut", [0, 1, 20])
@pytest.mark.parametrize("keys", [(), KEYS], ids=["bare", "with-keys"])
async def test_request_with_a_body_is_no_handshake(
    connected: Connect, echo: Answer, post: Post, cut: int, keys: tuple[bytes, ...]
) -> None:
    """It is answered as if it hadn't asked, and so is what comes behind it."""
    request = post(b"abc", *ASKS, *keys)
    async with connected(echo, ws=PatientWebSocket) as (client, _):
        for sent in (request, request, post(b"abc")):
            client.send(sent[: len(sent) - cut])
            await asyncio.sleep(0.005)
            client.send(sent[len(sent) - cut :])
            await client.read(ECHOED)


@pytest.mark.parametrize(
    "sent",
    [
        get(b"content-length: 3") + b"abc",
        get(b"transfer-encoding: chunked") + b"3\r\nabc\r\n0\r\n\r\n",
    ],
    ids=["length", "chunked"],
)
async def test_handshake_with_a_body_is_none(connected: Connect, echo: Answer, sent: bytes) -> None:
    """A GET that brings one is a plain request, too."""
    async with connected(echo, ws=PatientWebSocket) as (client, _):
        client.send(sent)

        await client.read(ECHOED)


@pytest.mark.parametrize(
    "sent",
    [get(version=b"1.0"), get(b"content-length: 0").replace(b"websocket", b"h2c")],
    ids=["http-1.0", "h2c"],
)
async def test_upgrade_on_a_last_request_is_ignored(
    connected: Connect, echo: Answer, sent: bytes
) -> None:
    """HTTP/1.0 has no upgrades: such a request is a plain one, as is one that closes."""
    async with connected(echo, ws=PatientWebSocket) as (client, _):
        client.send(sent.replace(b"connection: ", b"connection: close, "))

        assert (await client.read_rest()).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("sent", "status", "told"),
    [
        (get(b"cookie: " + b"a" * 9000), 431, b"header is over 8192 bytes"),
        (get(*(b"x-%d: a" % each for each in range(150))), 431, b"over 128 headers"),
        (get(query=b"?model=m&x=" + b"a" * 9000), 414, b"target is over 8192 bytes"),
        (get(b"x: \x80", b"y z: a"), 400, b"request"),
    ],
    ids=["header", "headers", "target", "nonsense"],
)
async def test_handshake_that_cannot_be_read_is_refused(
    connected: Connect,
    echo: Answer,
    post: Post,
    sent: bytes,
    status: int,
    told: bytes,
    is_first: bool,
) -> None:
    """At once and in words; the connection ends, also one that was kept."""
    async with connected(echo, ws=PatientWebSocket) as (client, _):
        if not is_first:
            client.send(post(b"abc"))
            await client.read(ECHOED)
        client.send(sent)

        answer = await client.read_rest()
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert told in answer


async def test_handshake_behind_a_request_waits_for_its_turn(
    connected: Connect, echo: Answer, post: Post
) -> None:
    """What was asked before it is answered before it."""
    async with connected(echo, ws=PatientWebSocket) as (client, _):
        client.send(post(b"abc") + get(b"cookie: " + b"a" * 9000))

        await client.read(ECHOED)
        assert (await client.read_rest()).startswith(b"HTTP/1.1 431 ")
