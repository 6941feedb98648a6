"""The load: raw HTTP/1.1 connections that count every byte and every failure.

A connection makes one request after the other. What comes is checked: status, number of bytes,
and that a stream ends in `[DONE]`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

import httptools

from benchmarks.overhead.engine import CHUNK, DONE, MODEL

CALL_TIMEOUT_S = 20


@dataclass(slots=True)
class Times:
    """Seconds of every call that went well; those that didn't are counted by kind."""

    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)

    def fail(self, kind: str) -> None:
        self.failed[kind] = self.failed.get(kind, 0) + 1


class CallFailedError(Exception):
    """A call that a client would call broken."""


class Caller(asyncio.Protocol):
    """One client connection; `call` returns when the answer is complete."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._tail = b""
        self._bytes = 0
        self.first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    async def call(self, request: bytes, events: int) -> None:
        """Send `request`; its answer has to hold `events` events and `[DONE]`, or be whole."""
        if self._transport is None:
            raise CallFailedError("not connected")
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._tail, self._bytes, self.first_s = b"", 0, 0.0
        self._transport.write(request)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await self._done
        status = self._parser.get_status_code()
        if status != 200:
            raise CallFailedError(f"status {status}")
        expected_bytes = events * len(CHUNK) + len(DONE)
        if events and (self._bytes != expected_bytes or not self._tail.endswith(DONE)):
            raise CallFailedError("events lost")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._parser is not None:
            self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(CallFailedError("reset" if exc else "closed"))

    def on_body(self, body: bytes) -> None:
        if not self.first_s:
            self.first_s = perf_counter()
        self._bytes += len(body)
        self._tail = body if len(body) >= len(DONE) else self._tail + body

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def write_request(prompt: Sequence[int] | str, *, chunks: int = 0, interval_ms: int = 0) -> bytes:
    """A completions request; `chunks` 0: not streamed."""
    asked: dict[str, object] = {"model": MODEL, "prompt": prompt, "max_tokens": chunks or 16}
    if chunks:
        asked |= {"stream": True, "seed": interval_ms}
    body = json.dumps(asked, separators=(",", ":")).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: balancer.example\r\nuser-agent: bench/1.0\r\n"
        "accept: application/json\r\nauthorization: Bearer none\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@asynccontextmanager
async def connected(port: int, clients: int) -> AsyncIterator[list[Caller]]:
    """That many connections, opened at once. Raises OSError if one can't be had."""
    loop = asyncio.get_running_loop()
    callers: list[Caller] = []

    async def connect() -> None:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            _, caller = await loop.create_connection(Caller, "127.0.0.1", port)
        callers.append(caller)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(connect())
    try:
        yield callers
    finally:
        for caller in callers:
            caller.close()


async def call_many(
    port: int,
    requests: Sequence[bytes],
    *,
    clients: int,
    calls: int,
    events: int = 0,
    spread_s: float = 0.0,
) -> Times:
    """Make `calls` calls over `clients` connections, whose first ones are spread over `spread_s`."""
    times = Times()
    async with connected(port, clients) as callers, asyncio.TaskGroup() as group:
        for number, caller in enumerate(callers):
            mine = [requests[each % len(requests)] for each in range(number, calls, clients)]
            delay_s = spread_s * number / clients
            group.create_task(_call(caller, mine, events, delay_s, times))
    return times


async def _call(
    caller: Caller, requests: Sequence[bytes], events: int, delay_s: float, times: Times
) -> None:
    await asyncio.sleep(delay_s)
    for request in requests:
        started_s = perf_counter()
        try:
            await caller.call(request, events)
        except CallFailedError as error:
            times.fail(str(error))
            continue
        except TimeoutError:
            times.fail("timeout")
            return
        times.whole_s.append(perf_counter() - started_s)
        times.first_s.append(caller.first_s - started_s)


async def open_burst(port: int, request: bytes, *, clients: int, events: int) -> Times:
    """One stream on each of `clients` connections that are opened at once; what is lost counts."""
    loop = asyncio.get_running_loop()
    times = Times()

    async def work() -> None:
        started_s = perf_counter()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                _, caller = await loop.create_connection(Caller, "127.0.0.1", port)
            await caller.call(request, events)
        except (CallFailedError, OSError, TimeoutError) as error:
            times.fail(str(error) or "timeout")
            return
        times.whole_s.append(perf_counter() - started_s)
        times.first_s.append(caller.first_s - started_s)
        caller.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(work())
    return times
