"""How each proxy is started: one worker or thread each, two engines behind it, no access logs.

What kvlb writes for every request (its log line, metrics, decisions) stays on. The Rust routers
run on as many threads as they like, with their own logging at warnings.
"""

import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

from benchmarks.index_workload import BLOCK_SIZE
from benchmarks.overhead import peers
from benchmarks.overhead.engine import MODEL, EngineAddress

START_S = 30
MANY = 100_000


Command = Callable[[Path, int, Sequence[EngineAddress]], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """One proxy in one setting."""

    name: str
    command: Command
    """Of its directory, its port and the engines."""
    is_full: bool = False
    """Follows KV events and is asked with long prompts."""
    takes_ids: bool = True
    """Else it is asked with text, about as many bytes."""
    ready: str = "/health"
    """Answers 200 once it has engines."""
    missing: Callable[[], str | None] = lambda: None
    """Why it can't be had here, if it can't."""


DIRECT = "direct"
NGINX, HAPROXY = "nginx", "haproxy"
VLLM_ROUND_ROBIN = f"vllm-router {peers.VERSIONS['vllm-router']}, round_robin"
VLLM_KV_AWARE = f"vllm-router {peers.VERSIONS['vllm-router']}, kv_aware"
SGLANG_ROUND_ROBIN = f"sglang-router {peers.VERSIONS['sglang-router']}, round_robin"
KVLB_ROUND_ROBIN = "kvlb, round_robin"
KVLB_FULL = "kvlb, kvlb"


def find_program(name: str) -> str | None:
    """Where it is, if it is installed."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin")


def _needs(name: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        return None if find_program(name) else f"not installed; on Debian: apt-get install {name}"

    return missing


def _nginx(directory: Path, port: int, engines: Sequence[EngineAddress]) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{each.http};" for each in engines)
    (directory / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {directory}/pid; error_log /dev/null crit;\n"
        "worker_rlimit_nofile 65536; events { worker_connections 20000; }\n"
        f"http {{ access_log off; client_body_temp_path {directory}/body;\n"
        f"  proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/f;\n"
        f"  uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;\n"
        f"  upstream engine {{ {servers} keepalive 1024; keepalive_requests {MANY}; }}\n"
        f"  server {{ listen 127.0.0.1:{port} backlog=4096; keepalive_requests {MANY};\n"
        "    client_max_body_size 64m; client_body_buffer_size 1m; tcp_nodelay on;\n"
        "    location / { proxy_pass http://engine; proxy_http_version 1.1;\n"
        '      proxy_set_header Connection ""; proxy_buffering off; } } }\n'
    )
    program = find_program("nginx") or "nginx"
    return [program, "-c", f"{directory}/nginx.conf", "-e", "/dev/null", "-p", str(directory)]


def _haproxy(directory: Path, port: int, engines: Sequence[EngineAddress]) -> list[str]:
    servers = "\n".join(
        f"  server e{each.number} 127.0.0.1:{each.http} maxconn 4096" for each in engines
    )
    (directory / "haproxy.cfg").write_text(
        "global\n  nbthread 1\n  maxconn 8000\n  tune.bufsize 65536\n"
        "defaults\n  mode http\n  timeout connect 5s\n  timeout client 600s\n"
        "  timeout server 600s\n  option http-no-delay\n  http-reuse always\n"
        f"frontend f\n  bind 127.0.0.1:{port} backlog 4096\n  default_backend b\n"
        f"backend b\n  balance roundrobin\n{servers}\n"
    )
    return [find_program("haproxy") or "haproxy", "-db", "-q", "-f", f"{directory}/haproxy.cfg"]


def vllm_router(
    policy: str, *options: str, model: str = MODEL, block_size: int = BLOCK_SIZE
) -> Command:
    """How it is started; events are followed if the policy is by events."""

    def command(_: Path, port: int, engines: Sequence[EngineAddress]) -> list[str]:
        events: list[str] = []
        if policy == "kv_aware":
            events = ["--kv-event-block-size", str(block_size), "--kv-event-model", model]
            for each in engines:
                source = f"{each.url}=tcp://127.0.0.1:{each.events}"
                replay = f"{each.url}=tcp://127.0.0.1:{each.replay}"
                events += ["--kv-event-source", source, "--kv-event-replay-source", replay]
        return [
            *(str(peers.command("vllm-router")), "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", *(each.url for each in engines), "--policy", policy),
            *("--worker-startup-check-interval", "1", "--log-level", "warning"),
            *("--max-concurrent-requests", str(MANY), "--prometheus-port", str(free_port())),
            *events,
            *options,
        ]

    return command


def sglang_router(policy: str) -> Command:
    """How it is started."""

    def command(_: Path, port: int, engines: Sequence[EngineAddress]) -> list[str]:
        return [
            *(str(peers.command("sglang-router")), "launch", "--host", "127.0.0.1"),
            *("--port", str(port), "--worker-urls", *(each.url for each in engines)),
            *("--policy", policy, "--worker-startup-check-interval", "1"),
            *("--log-level", "warn", "--max-concurrent-requests", str(MANY)),
            *("--prometheus-port", str(free_port())),
        ]

    return command


def kvlb(policy: str) -> Command:
    """How it is started, events followed."""

    def command(_: Path, port: int, engines: Sequence[EngineAddress]) -> list[str]:
        instances: list[str] = []
        for each in engines:
            events = f"events=tcp://127.0.0.1:{each.events},replay=tcp://127.0.0.1:{each.replay}"
            instances += ["--instance", f"{each.url},{events}"]
        return [
            *(sys.executable, "-m", "kvlb", "up", *instances),
            *("--policy", policy, "--port", str(port)),
        ]

    return command


def needs_peer(name: str) -> Callable[[], str | None]:
    """Whether it can be had from PyPI."""
    return lambda: peers.install(name)


PROXIES = (
    Proxy(name=NGINX, command=_nginx, missing=_needs("nginx")),
    Proxy(name=HAPROXY, command=_haproxy, missing=_needs("haproxy")),
    Proxy(
        name=VLLM_ROUND_ROBIN, command=vllm_router("round_robin"), missing=needs_peer("vllm-router")
    ),
    Proxy(
        name=SGLANG_ROUND_ROBIN,
        command=sglang_router("round_robin"),
        takes_ids=False,
        ready="/readiness",
        missing=needs_peer("sglang-router"),
    ),
    Proxy(name=KVLB_ROUND_ROBIN, command=kvlb("round_robin"), ready="/ready"),
    Proxy(
        name=VLLM_KV_AWARE,
        command=vllm_router("kv_aware"),
        is_full=True,
        missing=needs_peer("vllm-router"),
    ),
    Proxy(name=KVLB_FULL, command=kvlb("kvlb"), is_full=True, ready="/ready"),
)


def free_port() -> int:
    """A port that nobody listens on, below those that outgoing connections are given."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def wait_for(port: int, path: str, has_ended: Callable[[], bool] = lambda: False) -> None:
    """Wait until a GET of `path` answers 200. Raises RuntimeError after half a minute."""
    deadline_s = perf_counter() + START_S
    while perf_counter() < deadline_s and not has_ended():
        if _answers(port, path):
            return
        sleep(0.1)
    raise RuntimeError(f"nothing answers on port {port}")


def _answers(port: int, path: str) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
            probe.sendall(f"GET {path} HTTP/1.0\r\nhost: x\r\n\r\n".encode())
            return b" 200 " in probe.recv(100)
    except OSError:
        return False


@contextmanager
def started(
    proxy: Proxy, directory: Path, port: int, engines: Sequence[EngineAddress]
) -> Iterator[int]:
    """Run the proxy until the block ends; its process id. Its log stays in `directory`."""
    directory.mkdir()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            proxy.command(directory, port, engines), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_for(port, proxy.ready, has_ended=lambda: process.poll() is not None)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
