"""The data plane behind a real server, the instances it is told of, and a raw client."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from itertools import count
from typing import Any, Protocol

import httpx
import pytest
import uvicorn
import uvloop

from balancer.connectors.available import connectors
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.prompt.known_ids import IdTexts
from balancer.core.record import RequestRecord
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.policies import named_policy
from balancer.core.settings.admission import AdmissionSettings
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.core.settings.reliability import ReliabilitySettings
from balancer.core.settings.routing import PdSettings, RoutingSettings
from balancer.dataplane.admission import Admission, Room
from balancer.dataplane.client_socket import ClientSocket
from balancer.dataplane.direct import direct_protocol
from balancer.dataplane.exchange import AsgiExchange, Exchange
from balancer.dataplane.plane import DataPlane
from balancer.dataplane.reliability import Reliability
from balancer.dataplane.server_protocols import (
    MAX_MESSAGE_BYTES,
    PatientWebSocket,
)
from balancer.dataplane.upstream import Upstream
from balancer.routing.router import Router
from balancer.server import BACKLOG, listen
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId
from indexer.memory_index import MemoryIndex


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """The clients that leave do so on the loop that kvlb runs on."""
    is_kvlbs = item.path.name == "test_disconnect_matrix.py"
    return {"loop": uvloop.new_event_loop if is_kvlbs else asyncio.new_event_loop}


MODEL = "m"


def served(*adapters: str, base: str = MODEL) -> ServedModels:
    return ServedModels(
        base=base, aliases=frozenset({base}), adapters=frozenset(adapters), cards=()
    )


class IdPrompts:
    """A tokens stage that knows prompts of token ids only."""

    texts = IdTexts(limit_bytes=0)

    async def read(self, fleet: Fleet, request: GenerateRequest) -> PromptView:  # noqa: ARG002
        ids = request.body.get("prompt") if request.ids is None else list(request.ids.ids)
        if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
            return PromptView(unscorable="no_tokenizer")
        space = Namespace(model=request.base_model, lora=request.lora, cache_salt=None)
        return PromptView(prompts=(Prompt(space, ids),), source="ids")


class Balancer:
    """A data plane behind a real server, and what it told the rest of the process."""

    def __init__(self, instances: Sequence[Instance], **options: Any) -> None:
        self.fleet = Fleet(instances=tuple(instances))
        self.records: list[RequestRecord] = []
        self.health: list[tuple[str, bool, str | None]] = []
        self.url = ""
        self.port = 0
        settings: DataPlaneSettings = options.pop("settings", DataPlaneSettings())
        self.limits = settings
        self.is_direct: bool = options.pop("is_direct", True)
        """Served by our own protocol, as kvlb does it, or over ASGI."""
        self.ledger = LocalLedger(clock=time.monotonic)
        self.upstream = Upstream(
            connect_timeout_s=settings.connect_timeout_s,
            first_byte_timeout_s=settings.first_byte_timeout_s,
            idle_timeout_s=settings.idle_timeout_s,
            keep_alive_s=settings.keep_alive_s,
        )
        known = options.setdefault("connectors", connectors())
        clock = options.setdefault("clock", time.monotonic)
        self.reliability = Reliability(
            options.pop("reliability", ReliabilitySettings()),
            fleet=lambda: self.fleet,
            clock=clock,
        )
        # Round robin reads no prompt unless it has to.
        reads = options.pop("reads", "reader" in options or "index" in options)
        router = Router(
            index=options.pop("index", MemoryIndex()),
            ledger=self.ledger,
            policy=named_policy("round_robin"),
            settings=options.pop("routing", RoutingSettings(observe_share=float(reads))),
            pd=options.pop("pd", PdSettings()),
            connectors=known,
            random=lambda: 0.5,
            clock=clock,
            tracing=options.get("tracing"),
            vetting=self.reliability,
        )
        self.waits: list[str] = []
        """What came of each wait for room."""
        admission_settings = options.pop("admission", AdmissionSettings(promise_s=0))
        self.admission = Admission(
            room=Room(
                ledger=self.ledger,
                vetting=self.reliability,
                settings=admission_settings,
                block_size=lambda _: None,
                max_requests_per_rank=lambda: router.max_requests_per_rank,
            ),
            settings=admission_settings,
            fleet=lambda: self.fleet,
            clock=clock,
            cached_share=router.cached_share,
            on_waited=lambda outcome, _: self.waits.append(outcome),
        )
        self._ids = count(1)
        self._noted = asyncio.Event()
        self.dataplane = DataPlane(
            **{
                "fleet": lambda: self.fleet,
                "reader": IdPrompts(),
                "router": router,
                "ledger": self.ledger,
                "upstream": self.upstream,
                "settings": settings,
                "on_record": self._on_record,
                "report_health": lambda *told: self.health.append(told),
                "new_id": lambda: f"made-up-{next(self._ids)}",
                "reliability": self.reliability,
                "admission": self.admission,
                **options,
            }
        )

    async def wait_for_records(self, number: int) -> list[RequestRecord]:
        async with asyncio.timeout(20):
            while len(self.records) < number:
                self._noted.clear()
                await self._noted.wait()
        return self.records

    def in_flight(self) -> int:
        ranks = [rank for each in self.fleet.instances for rank in each.rank_ids()]
        return sum(self.ledger.load(rank).requests for rank in ranks)

    def _on_record(self, record: RequestRecord) -> None:
        self.records.append(record)
        self._noted.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self.dataplane.relay(ClientSocket(scope, receive, send))
        else:
            await self.dataplane.handle(AsgiExchange(scope, receive, send))

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Balancer"]:
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        server = _Server(
            uvicorn.Config(
                self,
                loop="none",
                http=direct_protocol(
                    self.dataplane if self.is_direct else _OverAsgi(), self.limits
                ),
                ws=PatientWebSocket,
                ws_max_size=MAX_MESSAGE_BYTES,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=1,
                backlog=BACKLOG,
            )
        )
        with listener:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve(sockets=[listener]))
                try:
                    yield self
                finally:
                    server.leave.set()
                    # The group would cancel it where a test fails, and uvloop hangs on its sockets.
                    await asyncio.wait((serving,))
                    await self.upstream.close()


class _OverAsgi:
    """Whose paths are all the application's, as where browsers of other origins are told apart."""

    def proxies(self, _path: str) -> bool:
        return False

    async def handle(self, _exchange: Exchange) -> None:
        raise AssertionError("not to be asked")


class _Server(uvicorn.Server):
    """Leaves signals to the test runner, and leaves when told, not at the next tick."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()

    async def main_loop(self) -> None:
        await self.leave.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class BalancerFactory(Protocol):
    """Starts a balancer that lives as long as the `async with` block."""

    def __call__(
        self, *instances: Instance, **options: Any
    ) -> AbstractAsyncContextManager[Balancer]: ...


@pytest.fixture
def balancer() -> BalancerFactory:
    """Factory of balancers in front of the given instances."""

    def start(*instances: Instance, **options: Any) -> AbstractAsyncContextManager[Balancer]:
        return Balancer(instances, **options).running()

    return start


class InstanceFactory(Protocol):
    """Describes a fake engine to the fleet."""

    def __call__(self, engine: Any, alias: str = "e0", **fields: Any) -> Instance: ...


@pytest.fixture
def instance() -> InstanceFactory:
    """Factory of available instances."""

    def describe(engine: Any, alias: str = "e0", **fields: Any) -> Instance:
        url = engine if isinstance(engine, str) else engine.url
        adapters = fields.pop("adapters", ())
        base = fields.pop("base", MODEL)
        known: dict[str, Any] = {"healthy": True, "models": served(*adapters, base=base)}
        return Instance(id=InstanceId(url), alias=alias, **(known | fields))

    return describe


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A client that looks at no environment."""
    transport = httpx.AsyncHTTPTransport(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=10) as each:
        yield each


class RawClient:
    """Sends a request byte by byte and reads the answer's bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def post(self, path: str, body: object) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
        await self.send(head.encode() + b"content-type: application/json\r\n\r\n" + raw)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read_until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(20):
            return await self._reader.readuntil(mark)

    async def read_rest(self) -> bytes:
        """Everything up to the end of the connection."""
        async with asyncio.timeout(20):
            return await self._reader.read()

    def leave(self) -> None:
        self._writer.transport.abort()


class RawClientFactory(Protocol):
    """Opens a connection that lives as long as the `async with` block."""

    def __call__(self, balancer: Balancer) -> AbstractAsyncContextManager[RawClient]: ...


@pytest.fixture
def raw_client() -> RawClientFactory:
    """Factory of raw connections."""

    @asynccontextmanager
    async def connect(balancer: Balancer) -> AsyncIterator[RawClient]:
        reader, writer = await asyncio.open_connection("127.0.0.1", balancer.port)
        try:
            yield RawClient(reader, writer)
        finally:
            writer.transport.abort()

    return connect
