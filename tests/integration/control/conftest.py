"""Stub engines behind real uvicorn servers, and the parts of the control plane around them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from balancer.app import create_app
from balancer.asgi import App
from balancer.config import BalancerConfig, check_config
from balancer.core.fleet.snapshot import Fleet
from balancer.core.fleet.view import RankFacts
from balancer.core.request import Endpoint, GenerateRequest
from balancer.core.settings.control import InstanceSettings, TokensSettings
from balancer.core.settings.errors import decode_settings
from balancer.fleet.control import FleetLinks
from balancer.fleet.engine_client import EngineClient
from balancer.server import serve
from balancer.sharing import Company
from balancer.tokens.pool import TokenPool
from balancer.tokens.reader import PromptReader
from indexer.core.model_cards import parse_model_list
from indexer.core.types import InstanceId
from indexer.memory_index import MemoryIndex

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Answer = tuple[int, bytes]

TOKENIZER = Path(__file__).parents[2] / "tokenizer"


class Server(uvicorn.Server):
    """Leaves signals alone and says when it listens."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                port=0,
                log_config=None,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @property
    def port(self) -> int:
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[Server]:
    """Serve an ASGI application on a free port."""
    server = Server(app)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.serve())
        async with asyncio.timeout(20):
            await server.listening.wait()
        try:
            yield server
        finally:  # also for a test that failed: a cancelled server leaves its sockets behind
            server.should_exit = True
            await asyncio.wait([task])


@dataclass
class StubEngine:
    """An engine whose answers a test sets."""

    model: str = "tiny"
    adapters: tuple[str, ...] = ()
    health_status: int = 200
    api_key: str | None = None
    answers: dict[str, Answer] = field(default_factory=dict)
    """Fixed answers by path, instead of the usual ones."""
    stall: set[str] = field(default_factory=set)
    """Paths that never answer."""
    hold: asyncio.Event | None = None
    """Completions wait for it."""
    streams_forever: bool = False
    """Completions are a stream of one event that doesn't end."""
    forward: Callable[[str, dict[str, Any], dict[str, str]], Awaitable[Answer]] | None = None
    """Answers completions with what this gives for path, body and headers."""
    received: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    """Of every call: path and query."""
    url: str = ""
    server: Any = None
    _called: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path = scope["path"]
        self.targets.append(f"{path}?{scope['query_string'].decode()}")
        self.received.append((path, json.loads(body) if body else {}, headers))
        async with self._called:
            self._called.notify_all()
        if path in self.stall:
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if self.hold is not None and path == "/v1/completions":
            await self.hold.wait()
        if self.streams_forever and path == "/v1/completions":
            headers_sent = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers_sent})
            event = b'data: {"choices": []}\n\n'
            await send({"type": "http.response.body", "body": event, "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        status, answer = await self._told(path)
        has_key = headers.get("authorization") == f"Bearer {self.api_key}"
        if self.api_key and path.startswith("/v1") and not has_key:
            status, answer = 401, b'{"error": "Unauthorized"}'
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": answer})

    def calls(self, path: str) -> int:
        return sum(1 for each, _, _ in self.received if each == path)

    async def wait_for_calls(self, path: str, count: int) -> None:
        """Wait until `path` was called `count` times since the start."""
        async with asyncio.timeout(20), self._called:
            await self._called.wait_for(lambda: self.calls(path) >= count)

    async def _told(self, path: str) -> Answer:
        if self.forward is None or path != "/v1/completions":
            return self._answer(path)
        return await self.forward(*self.received[-1])

    def _answer(self, path: str) -> Answer:
        if path in self.answers:
            return self.answers[path]
        match path:
            case "/health":
                return self.health_status, b""
            case "/v1/models":
                cards = [{"id": self.model, "parent": None, "max_model_len": 2048}]
                cards += [{"id": name, "parent": self.model} for name in self.adapters]
                return 200, json.dumps({"object": "list", "data": cards}).encode()
            case "/tokenize":
                return 200, b'{"count": 3, "max_model_len": 2048, "tokens": [7, 8, 9]}'
            case "/v1/completions" | "/v1/chat/completions":
                usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
                usage["prompt_tokens_details"] = {"cached_tokens": 1}  # type: ignore[assignment]
                return 200, json.dumps({"id": "x", "choices": [], "usage": usage}).encode()
            case _:
                return 404, b"{}"

    def settings(self, **fields: Any) -> InstanceSettings:
        return InstanceSettings(url=self.url, **fields)

    @property
    def id(self) -> InstanceId:
        return InstanceId(self.url)


EngineFactory = Callable[..., AbstractAsyncContextManager[StubEngine]]


@pytest.fixture
def fleet_of() -> Callable[..., Fleet]:
    """Builds a fleet of stub engines that are seen healthy."""

    def build(*engines: StubEngine) -> Fleet:
        return Fleet(
            instances=tuple(
                replace(
                    each.settings().instance(),
                    healthy=True,
                    models=parse_model_list({"data": [{"id": each.model}]}),
                )
                for each in engines
            )
        )

    return build


@pytest.fixture
def engine_factory() -> EngineFactory:
    """For tests that start and stop engines themselves."""

    @asynccontextmanager
    async def start(**fields: Any) -> AsyncIterator[StubEngine]:
        stub = StubEngine(**fields)
        async with serving(stub) as server:
            stub.server = server
            stub.url = f"http://127.0.0.1:{server.port}"
            yield stub

    return start


@pytest.fixture
async def engine(engine_factory: EngineFactory) -> AsyncIterator[StubEngine]:
    """One healthy engine."""
    async with engine_factory() as started:
        yield started


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    """Control calls without keys."""
    async with EngineClient(api_keys={}, timeout_s=5.0) as made:
        yield made


@pytest.fixture
def make_request() -> Callable[..., GenerateRequest]:
    """Builds a parsed request from its body."""

    def make(body: dict[str, Any], **fields: Any) -> GenerateRequest:
        endpoint = Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS
        known: dict[str, Any] = {"model": "tiny", "base_model": "tiny", "lora": None}
        return GenerateRequest(
            request_id="r",
            endpoint=endpoint,
            body=body,
            raw_body=b"",
            headers=(),
            **(known | fields),
        )

    return make


@pytest.fixture
def now() -> list[float]:
    """The clock of `make_reader`: one number that tests set."""
    return [0.0]


@pytest.fixture
def make_reader(client: EngineClient, now: list[float]) -> Iterator[Callable[..., PromptReader]]:
    """Builds prompt readers and ends their threads."""
    pools: list[TokenPool] = []

    def make(*, models: dict[str, str] | None = None, **fields: Any) -> PromptReader:
        # Deadlines are generous here: only tests about deadlines are about time.
        settings = TokensSettings(models=models or {}, **({"deadline_s": 5.0} | fields))
        pool = TokenPool(
            settings.models,
            workers=settings.workers,
            cache_bytes=settings.cache_bytes,
            strftime_now=lambda _: "today",
            flags=settings.engine_flags,
        )
        pools.append(pool)
        return PromptReader(settings=settings, pool=pool, engine=client, clock=lambda: now[0])

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def tokenizer_directory() -> str:
    """Directory of the tokenizer that the captures were made with."""
    return str(TOKENIZER)


@dataclass
class Balancer:
    """A whole balancer behind a real server."""

    url: str
    http: httpx.AsyncClient
    index: MemoryIndex
    app: App
    stop: asyncio.Event

    async def available(self, count: int = 1) -> None:
        """Wait until `count` instances are available."""
        async with asyncio.timeout(20):
            await self.app.keeper.wait_for(
                lambda fleet: sum(each.is_available for each in fleet.instances) >= count
            )


@pytest.fixture
def balancer_factory() -> Callable[..., AbstractAsyncContextManager[Balancer]]:
    """Starts balancers: `config` fields as an operator writes them, `index_status` if any."""

    @asynccontextmanager
    async def start(
        config: dict[str, Any],
        index_status: Callable[[], RankFacts] | None = None,
        links: FleetLinks | None = None,
        company: Company | None = None,
    ) -> AsyncIterator[Balancer]:
        # Generous deadlines, as above: a loaded machine needs longer than a default allows.
        tokens = {"deadline_s": 5.0, **config.get("tokens", {})}
        usual = {"probes": {"interval_s": 0.05}, "drain_s": 2}
        settings = {**usual, **config, "tokens": tokens}
        checked = check_config(decode_settings(settings, BalancerConfig, where=""), {})
        index = MemoryIndex()
        app = create_app(
            config=checked,
            index=index,
            registry=CollectorRegistry(),
            index_status=index_status,
            links=links,
            company=company,
        )
        stop = asyncio.Event()
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(
                serve(
                    app,
                    host="127.0.0.1",
                    port=0,
                    drain_s=checked.drain_s,
                    stop=stop,
                    on_listening=port.set_result,
                )
            )
            url = f"http://127.0.0.1:{await port}"
            try:
                async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as http:
                    yield Balancer(url=url, http=http, index=index, app=app, stop=stop)
            finally:
                stop.set()
                await asyncio.wait([task])

    return start


@pytest.fixture
async def balancer(
    engine: StubEngine, balancer_factory: Callable[..., AbstractAsyncContextManager[Balancer]]
) -> AsyncIterator[Balancer]:
    """A balancer over one healthy engine."""
    async with balancer_factory({"instances": [{"url": engine.url}]}) as started:
        await started.available()
        yield started
