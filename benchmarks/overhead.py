"""CPU that proxying costs: per request and per streamed chunk, beside nginx in the same run.

Run `python -m benchmarks.overhead` (under a minute, loopback only). An engine that answers at once
runs in a process of its own, `kvlb up` in another, nginx (if it is installed) in a third. CPU is
what the proxy's process tree used, from /proc; the ratio to nginx is what to compare between
machines. Chunks are spread over time: chunks that arrive together are cheaper together.
"""

import asyncio
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import cast

import httptools
import uvloop

WARM_UP_REQUESTS = 200
REQUESTS = 4000
CONCURRENCY = 32
STREAMS = 128
CHUNKS = 64
CHUNK_INTERVAL_S = 0.03
LONG_PROMPT_TOKENS = 4000
CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1795966250,'
    b'"model":"bench","choices":[{"index":0,"text":" token","logprobs":null,'
    b'"finish_reason":null,"stop_reason":null}]}\n\n'
)
ANSWER = json.dumps(
    {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "model": "bench",
        "choices": [{"index": 0, "text": " token" * 16, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 16, "completion_tokens": 16, "total_tokens": 32},
    }
).encode()
MODELS = json.dumps({"object": "list", "data": [{"id": "bench", "object": "model"}]}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one proxy used."""

    name: str
    ms_per_request: float
    us_per_chunk: float
    requests_per_s: float
    p50_ms: float


class Engine(asyncio.Protocol):
    """Answers at once, or streams chunks at an interval."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url == b"/v1/models":
            self._answer(b"200 OK", MODELS)
        elif self._url == b"/health":
            self._answer(b"200 OK", b"")
        elif not self._url.startswith(b"/v1/"):
            self._answer(b"404 Not Found", b"{}")
        elif b'"stream":true' in self._body:
            self._write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._stream(CHUNKS)
        else:
            self._answer(b"200 OK", ANSWER)

    def _stream(self, left: int) -> None:
        if not left:
            done = b"data: [DONE]\n\n"
            self._write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done))
            return
        self._write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
        asyncio.get_running_loop().call_later(CHUNK_INTERVAL_S, self._stream, left - 1)

    def _answer(self, status: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._write(head % (status, len(body)) + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def run_engine(port: int) -> None:
    """Serve until terminated."""

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(
            Engine, "127.0.0.1", port, backlog=4096
        )
        await server.serve_forever()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class Caller(asyncio.Protocol):
    """One client connection; `call` returns when the answer is complete."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self.status = 0
        self.body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    async def call(self, request: bytes) -> None:
        if self._transport is None:
            raise RuntimeError("not connected")
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        if self.status != 200:
            raise RuntimeError(f"status {self.status}")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._parser is not None:
            self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError("connection lost"))

    def on_headers_complete(self) -> None:
        if self._parser is not None:
            self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._done is not None:
            self._done.set_result(None)


def write_request(port: int, *, stream: bool, prompt_tokens: int = 16) -> bytes:
    """A completions request of `prompt_tokens` token ids."""
    body = json.dumps(
        {"model": "bench", "prompt": list(range(prompt_tokens)), "stream": stream},
        separators=(",", ":"),
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def call_many(port: int, request: bytes, *, clients: int, calls: int) -> list[float]:
    """Seconds of each call."""
    loop = asyncio.get_running_loop()
    taken: list[float] = []

    async def work() -> None:
        _, caller = await loop.create_connection(Caller, "127.0.0.1", port)
        for _ in range(calls // clients):
            started = perf_counter()
            await caller.call(request)
            taken.append(perf_counter() - started)
        caller.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(work())
    return taken


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_seconds(int(child)) for child in children)


async def measure(name: str, pid: int, port: int, prompt_tokens: int) -> Cost:
    """Requests first, then streams; what a stream costs as a request is taken off its chunks."""
    request = write_request(port, stream=False, prompt_tokens=prompt_tokens)
    await call_many(port, request, clients=CONCURRENCY, calls=WARM_UP_REQUESTS)
    before, started = cpu_seconds(pid), perf_counter()
    taken = await call_many(port, request, clients=CONCURRENCY, calls=REQUESTS)
    elapsed = perf_counter() - started
    per_request = (cpu_seconds(pid) - before) / len(taken)
    stream = write_request(port, stream=True, prompt_tokens=prompt_tokens)
    before = cpu_seconds(pid)
    await call_many(port, stream, clients=STREAMS, calls=STREAMS)
    chunks = cpu_seconds(pid) - before - STREAMS * per_request
    return Cost(
        name=name,
        ms_per_request=per_request * 1e3,
        us_per_chunk=chunks / (STREAMS * CHUNKS) * 1e6,
        requests_per_s=len(taken) / elapsed,
        p50_ms=median(taken) * 1e3,
    )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def wait_for(port: int, path: str) -> None:
    """Wait until a GET answers 200."""
    deadline = perf_counter() + 20
    while perf_counter() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
                probe.sendall(f"GET {path} HTTP/1.0\r\nhost: x\r\n\r\n".encode())
                if b" 200 " in probe.recv(100):
                    return
        except OSError:
            pass
        sleep(0.1)
    raise RuntimeError(f"nothing answers {path} on port {port}")


@contextmanager
def started(command: Sequence[str], port: int, ready: str) -> Iterator[int]:
    """Run `command` until the block ends; its process id."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, ready)
        yield process.pid
    finally:
        process.terminate()
        process.wait(timeout=20)


def nginx_command(directory: str, port: int, engine: int) -> list[str]:
    """One worker, no logs, no buffering, connections kept on both sides."""
    config = Path(directory) / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; pid {directory}/pid; error_log /dev/null crit;\n"
        "events { worker_connections 4096; }\n"
        f"http {{ access_log off; client_body_temp_path {directory}/body;\n"
        f"  proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/f;\n"
        f"  uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;\n"
        f"  upstream engine {{ server 127.0.0.1:{engine}; keepalive 512; }}\n"
        f"  server {{ listen 127.0.0.1:{port} backlog=4096; keepalive_requests 1000000;\n"
        "    client_max_body_size 64m; client_body_buffer_size 1m;\n"
        "    location / { proxy_pass http://engine; proxy_http_version 1.1;\n"
        '      proxy_set_header Connection ""; proxy_buffering off; } } }\n'
    )
    return [nginx_path() or "nginx", "-c", str(config), "-e", "/dev/null", "-p", directory]


def nginx_path() -> str | None:
    """Where nginx is, if it is installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def kvlb_command(policy: str, port: int, engine: int) -> list[str]:
    """The real command in front of the engine."""
    address = f"http://127.0.0.1:{engine}"
    options = ["--instance", address, "--policy", policy, "--port", str(port)]
    return [sys.executable, "-m", "kvlb", "up", *options]


def measure_all() -> list[Cost]:
    """Every proxy, one after the other, in front of the same engine."""
    costs = []
    engine = free_port()
    process = multiprocessing.get_context("spawn").Process(target=run_engine, args=(engine,))
    process.start()
    with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack.callback(process.terminate)
        wait_for(engine, "/health")
        if nginx_path():
            port, directory = free_port(), stack.enter_context(tempfile.TemporaryDirectory())
            with started(nginx_command(directory, port, engine), port, "/health") as pid:
                costs.append(runner.run(measure("nginx", pid, port, 16)))
        for name, policy, prompt_tokens in (
            ("kvlb, round_robin", "round_robin", 16),
            (f"kvlb, kvlb, {LONG_PROMPT_TOKENS} token ids", "kvlb", LONG_PROMPT_TOKENS),
        ):
            port = free_port()
            with started(kvlb_command(policy, port, engine), port, "/ready") as pid:
                costs.append(runner.run(measure(name, pid, port, prompt_tokens)))
    return costs


def render(costs: Sequence[Cost]) -> str:
    """A markdown table."""
    base = costs[0] if costs[0].name == "nginx" else None
    lines = [
        "| proxy | CPU ms/request | x nginx | CPU µs/chunk | x nginx | requests/s | p50 ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in costs:
        request_ratio = f"{each.ms_per_request / base.ms_per_request:.1f}" if base else "-"
        chunk_ratio = f"{each.us_per_chunk / base.us_per_chunk:.1f}" if base else "-"
        lines.append(
            f"| {each.name} | {each.ms_per_request:.3f} | {request_ratio} "
            f"| {each.us_per_chunk:.1f} | {chunk_ratio} "
            f"| {each.requests_per_s:,.0f} | {each.p50_ms:.1f} |"
        )
    note = "" if base else "\nnginx is not installed here, so there is no ratio."
    return (
        "\n".join(lines)
        + f"\n\n{CONCURRENCY} connections, {REQUESTS:,} requests; {STREAMS} streams of "
        + f"{CHUNKS} chunks, {CHUNK_INTERVAL_S * 1e3:.0f} ms apart."
        + note
    )


def main() -> None:
    """Measure and print."""
    print(render(measure_all()))


if __name__ == "__main__":
    main()
