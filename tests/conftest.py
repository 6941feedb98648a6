"""Hypothesis profiles of the whole suite, and a real Redis for whoever asks for one; logs are set up anew for each test."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import structlog
from hypothesis import HealthCheck, settings

from indexer.redis_index.settings import RedisSettings

settings.register_profile(
    "fast",
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "deep",
    max_examples=10_000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True)
def default_logs() -> Iterator[None]:
    """Commands set up logs for their process; other tests keep theirs."""
    kept = structlog.get_config()
    yield
    structlog.configure(**kept)


class RedisServer:
    """A `redis-server` process on a unix socket, keeping nothing on disk unless told to."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._prefixes = count(1)

    def settings(self, **more: object) -> RedisSettings:
        """Settings under a prefix of their own, so that each caller finds an empty index.

        They are patient: a starved machine may need seconds for an answer, and then a fault is
        counted that the test didn't plant. Only tests of what is late name shorter times.
        """
        patient = dict.fromkeys(("connect_timeout_s", "read_timeout_s", "write_timeout_s"), 20.0)
        chosen = {"url": self.url, "prefix": f"t{next(self._prefixes)}", **patient, **more}
        return RedisSettings(**chosen)  # type: ignore[arg-type]

    def start(self, *options: str) -> None:
        """Start it and wait until it answers. Without persistence it is empty."""
        named = os.environ.get("KVLB_TEST_REDIS")
        program = named or shutil.which("redis-server") or shutil.which("valkey-server")
        assert program, "install redis-server (Debian: apt-get install redis-server)"
        command = [program, "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        folder = ["--dir", str(self.folder), "--logfile", str(self.folder / "log")]
        self._process = subprocess.Popen([*command, *folder, *self.options, *options])
        deadline_s = time.monotonic() + 10
        while not self._answers():
            assert time.monotonic() < deadline_s, (self.folder / "log").read_text()
            time.sleep(0.005)

    def stop(self) -> None:
        """As a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def command(self, *words: str) -> str:
        """Ask it something by hand."""
        asked = ["redis-cli", "-s", str(self.socket), *words]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(100).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One that nobody hurts."""
    with tempfile.TemporaryDirectory(prefix="kvlb-redis-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def own_redis() -> Iterator[Callable[..., RedisServer]]:
    """Make one that the test may stop, pause and restart. Not started yet."""
    servers: list[RedisServer] = []

    def make(*options: str) -> RedisServer:
        server = RedisServer(Path(tempfile.mkdtemp(prefix="kvlb-redis-")), *options)
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()
        shutil.rmtree(server.folder)


@cache
def load_client_calls() -> ModuleType:
    """tests/client_calls.py, which several tiers share and nobody can import by a name."""
    path = Path(__file__).with_name("client_calls.py")
    spec = importlib.util.spec_from_file_location("client_calls", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["client_calls"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def client_calls() -> ModuleType:
    """Calls of client packages, by group and name."""
    return load_client_calls()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`client_call` is each call of the groups that the module names in `CLIENT_GROUPS`."""
    if "client_call" in metafunc.fixturenames:
        calls = load_client_calls().CALLS
        named = [(group, name) for group in metafunc.module.CLIENT_GROUPS for name in calls[group]]
        metafunc.parametrize("client_call", named, ids=["-".join(each) for each in named])
