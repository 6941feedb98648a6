"""Engines that answer at once, as cheaply as Python can: one process each.

Rules:

1. `max_tokens` says how many chunks a stream has, `seed` how many milliseconds lie between two.
   Each stream has its own timer: chunks that arrive together would be cheaper together.
2. A stream's usage is sent only if it is asked for, as engines do it.
3. KV events flow from the start: first the prompts of the workload, then stores and removals of
   others, without end. Whoever subscribes late asks the replay socket.
"""

import asyncio
import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import httptools
import msgspec
import uvloop
import zmq
import zmq.asyncio

from benchmarks.index_workload import BLOCK_SIZE, VOCABULARY, draw_from, stored_event

MODEL = "bench"
PROMPTS = 64
PROMPT_TOKENS = 4000
SHORT_PROMPT_TOKENS = 16
LONG_BODY_BYTES = 4000
CACHED_SHARE = 0.5
"""Of each long prompt, what one engine holds."""
EVENTS_INTERVAL_S = 0.05
BLOCKS_PER_BATCH = 50
OPEN_BATCHES = 50
"""Stores that stay before the oldest is removed."""
KEPT_BATCHES = 1000

CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1795966250,'
    b'"model":"bench","choices":[{"index":0,"text":" token","logprobs":null,'
    b'"finish_reason":null,"stop_reason":null}]}\n\n'
)
USAGE = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1795966250,'
    b'"model":"bench","choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,'
    b'"completion_tokens":64,"prompt_tokens_details":{"cached_tokens":%d}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
ANSWER = (
    b'{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1795966250,'
    b'"model":"bench","choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":"length",'
    b'"stop_reason":null}],"usage":{"prompt_tokens":%%d,"total_tokens":%%d,"completion_tokens":16,'
    b'"prompt_tokens_details":{"cached_tokens":%%d}}}'
) % (b" token" * 16)
MODELS = json.dumps(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]}
).encode()
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
PLAIN_HEAD = b"HTTP/1.1 %b\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_CHUNKS = re.compile(rb'"max_tokens":\s*(\d+)')
_INTERVAL_MS = re.compile(rb'"seed":\s*(\d+)')
_FIRST_ID = re.compile(rb'"prompt":\s*\[(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """Where one engine listens on loopback."""

    http: int
    events: int
    replay: int
    number: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"


def held_tokens(number: int, prompt: Sequence[int], engine: int) -> int:
    """Of long prompt `number`, what this engine holds."""
    if number % 2 != engine % 2:
        return 0
    return int(len(prompt) * CACHED_SHARE) // BLOCK_SIZE * BLOCK_SIZE


def long_prompts() -> list[list[int]]:
    """Token ids; equal in every process."""
    draw = draw_from(7)
    return [[draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


class _Connection(asyncio.Protocol):
    """Answers at once, or streams chunks at an interval."""

    def __init__(self, held: dict[bytes, int]) -> None:
        """`held`: by a long prompt's first id, how many of its tokens are cached here."""
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._transport = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # one router asks in HTTP/2 what it is talking to
            if self._transport is not None:
                self._transport.close()

    def on_message_begin(self) -> None:
        self._url = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._url in {b"/v1/completions", b"/v1/chat/completions"}:
            self._generate(self._body[0] if len(self._body) == 1 else b"".join(self._body))
        elif self._url == b"/v1/models":
            self._answer(b"200 OK", MODELS)
        elif self._url in {b"/health", b"/ready"}:
            self._answer(b"200 OK", b"")
        else:
            self._answer(b"404 Not Found", b"{}")

    def _generate(self, body: bytes) -> None:
        first = _FIRST_ID.search(body)
        tokens = PROMPT_TOKENS if len(body) > LONG_BODY_BYTES else SHORT_PROMPT_TOKENS
        figures = (tokens, tokens + 64, self._held.get(first[1], 0) if first else 0)
        if b'"stream":true' not in body and b'"stream": true' not in body:
            self._answer(b"200 OK", ANSWER % figures)
            return
        chunks, interval_ms = _CHUNKS.search(body), _INTERVAL_MS.search(body)
        if chunks is None or interval_ms is None:
            self._answer(b"400 Bad Request", b"{}")
            return
        wants_usage = b'"include_usage":true' in body
        end = (chunked(USAGE % figures) if wants_usage else b"") + chunked(DONE) + b"0\r\n\r\n"
        self._write(STREAM_HEAD)
        self._stream(int(chunks[1]), int(interval_ms[1]) / 1e3, end)

    def _stream(self, left: int, interval_s: float, end: bytes) -> None:
        if self._transport is None:
            return
        if not left:
            self._transport.write(end)
            return
        self._transport.write(_CHUNKED)
        self._loop.call_later(interval_s, self._stream, left - 1, interval_s, end)

    def _answer(self, status: bytes, body: bytes) -> None:
        self._write(PLAIN_HEAD % (status, len(body)) + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def chunked(data: bytes) -> bytes:
    """One chunk of a body that comes in chunks."""
    return b"%x\r\n%b\r\n" % (len(data), data)


_CHUNKED = chunked(CHUNK)


class _Events:
    """One engine's event stream and its replay socket."""

    def __init__(self, address: EngineAddress) -> None:
        self._draw = draw_from(100 + address.number)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._others: deque[list[int]] = deque()
        self._sequence = 0
        context = zmq.asyncio.Context()
        self._live: zmq.Socket[bytes] = zmq.Socket(context, zmq.PUB)
        self._live.bind(f"tcp://127.0.0.1:{address.events}")
        self._replay = context.socket(zmq.ROUTER)
        self._replay.set(zmq.SNDHWM, 2 * KEPT_BATCHES)
        self._replay.bind(f"tcp://127.0.0.1:{address.replay}")
        for number, prompt in enumerate(long_prompts()):
            if held := held_tokens(number, prompt, address.number):
                self._publish([self._stored(prompt[:held])])

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_replay())
            while True:
                await asyncio.sleep(EVENTS_INTERVAL_S)
                tokens = [
                    self._draw.randrange(VOCABULARY) for _ in range(BLOCKS_PER_BATCH * BLOCK_SIZE)
                ]
                events = [self._stored(tokens)]
                self._others.append(cast("list[int]", events[0]["block_hashes"]))
                if len(self._others) > OPEN_BATCHES:
                    gone = self._others.popleft()
                    events.append(
                        {
                            "type": "BlockRemoved",
                            "block_hashes": gone[::-1],
                            "medium": "GPU",
                            "group_idx": 0,
                        }
                    )
                self._publish(events)

    def _stored(self, tokens: Sequence[int]) -> dict[str, object]:
        hashes = [self._draw.getrandbits(64) for _ in range(len(tokens) // BLOCK_SIZE)]
        return stored_event(hashes, None, tokens)

    def _publish(self, events: list[dict[str, object]]) -> None:
        payload = msgspec.msgpack.encode([1.5 + self._sequence, events, 0])
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._kept.append((sequence, payload))
        self._live.send_multipart([b"", sequence, payload], zmq.NOBLOCK)

    async def _run_replay(self) -> None:
        while True:
            identity, _, wanted = await self._replay.recv_multipart()
            for sequence, payload in list(self._kept):
                if sequence >= wanted:
                    await self._replay.send_multipart([identity, b"", b"", sequence, payload])
            await self._replay.send_multipart([identity, b"", b"", b"\xff" * 8, b""])


def run_engine(address: EngineAddress) -> None:
    """Serve until terminated."""
    held = {
        b"%d" % prompt[0]: held_tokens(number, prompt, address.number)
        for number, prompt in enumerate(long_prompts())
    }

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(held), "127.0.0.1", address.http, backlog=4096
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(_Events(address).run())
            await server.serve_forever()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
