"""Real peers for the indexer: a publisher that speaks vLLM's event protocol, an engine's HTTP.

What is published are blocks of one prompt; the index says how many a rank is credited with.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
import zmq
import zmq.asyncio
from fastapi import FastAPI, Response

from indexer.config import IndexerConfig, InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import BlockIndex, Prompt
from indexer.core.reports import ReportSource
from indexer.core.types import InstanceId, RankId
from indexer.memory_index import MemoryIndex
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.redis_index import RedisIndex
from indexer.service import IndexerService

END = b"\xff" * 8
BLOCK_SIZE = 4
E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)
PROMPT = Prompt(Namespace(model="tiny"), range(100 * BLOCK_SIZE))


class Publisher:
    """One rank's event stream on real sockets; every fault is asked for by the test."""

    def __init__(
        self,
        reserved: Any,
        *,
        topic: bytes = b"",
        has_topic_frame: bool = True,
        ring: int = 10_000,
        connect_to: str | None = None,
    ) -> None:
        self.port = reserved.port()
        self.replay_port = reserved.port()
        self.events = f"tcp://127.0.0.1:{self.port}"
        self.replay = f"tcp://127.0.0.1:{self.replay_port}"
        self.ts = 1000.0
        self.is_mute = False
        """Replay requests get no answer."""
        self.junk_answers: list[list[bytes]] = []
        """Sent before the batches of every replay."""
        self.asked: list[int] = []
        self._topic = topic
        self._has_topic_frame = has_topic_frame
        self._ring_size = ring
        self._connect_to = connect_to
        self._context = zmq.asyncio.Context()
        self._open()

    def _open(self) -> None:
        self.next_seq = 0
        self.ring: list[tuple[int, bytes]] = []
        # XPUB is PUB that lets the test know when somebody has subscribed.
        self._live = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        for each in (self._live, self._router):
            each.linger = 0
            each.sndhwm = 0  # nothing is lost but what the test drops
        try:
            if self._connect_to:
                self._live.connect(self._connect_to)
            else:
                self._live.bind(self.events)
            self._router.bind(self.replay)
        except zmq.ZMQError:
            self._close_sockets()
            raise

    def _close_sockets(self) -> None:
        self._live.close(0)
        self._router.close(0)

    def lose_live_socket(self) -> None:
        """Its events reach nobody from now on; replays do."""
        self._live.close(0)

    def close(self) -> None:
        self._close_sockets()
        self._context.term()

    def stop(self) -> None:
        """The process is gone, its ports with it."""
        self._close_sockets()

    async def restart(self) -> None:
        """Another process on the same ports: numbers begin at 0, the ring is empty."""
        self._close_sockets()
        async with asyncio.timeout(20):
            while True:
                try:
                    self._open()
                except zmq.ZMQError:  # the old sockets close in the background
                    await asyncio.sleep(0.01)
                else:
                    return

    async def subscribed(self) -> None:
        """Wait until somebody listens."""
        async with asyncio.timeout(20):
            assert await self._live.recv() == b"\x01"

    def encode(self, events: Sequence[Any], ts: float | None = None) -> bytes:
        self.ts += 1.0
        return msgspec.msgpack.encode([self.ts if ts is None else ts, events, 0])

    def publish(self, *events: Any, drop: bool = False) -> int:
        """Send one batch, or with `drop` only keep it for replay."""
        return self.publish_payload(self.encode(events), drop=drop)

    def publish_payload(self, payload: bytes, *, drop: bool = False) -> int:
        seq = self.next_seq
        self.next_seq += 1
        self.ring = [*self.ring, (seq, payload)][-self._ring_size :]
        if not drop:
            self.send_frames(self._topic, seq.to_bytes(8, "big"), payload)
        return seq

    def send_frames(self, *frames: bytes) -> None:
        zmq.Socket.shadow(self._live.underlying).send_multipart(frames, zmq.NOBLOCK)

    async def run(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            await asyncio.sleep(0.005)  # a poll, as vLLM's publisher thread does
            if self._router.closed:
                continue
            router: zmq.Socket[bytes] = zmq.Socket.shadow(self._router.underlying)
            while router.poll(0):
                identity, _, number = router.recv_multipart()
                self._serve(router, identity, int.from_bytes(number, "big"))

    def _serve(self, router: zmq.Socket[bytes], identity: bytes, from_seq: int) -> None:
        self.asked.append(from_seq)
        if self.is_mute:
            return
        for junk in self.junk_answers:
            router.send_multipart([identity, *junk])
        head = [identity, b"", self._topic] if self._has_topic_frame else [identity, b""]
        for seq, payload in self.ring:
            if seq >= from_seq:
                router.send_multipart([*head, seq.to_bytes(8, "big"), payload])
        head = [identity, b"", b""] if self._has_topic_frame else [identity, b""]
        router.send_multipart([*head, END, b""])


Publishing = Callable[..., AbstractAsyncContextManager[Publisher]]


@pytest.fixture
def publishing(reserved: Any) -> Publishing:
    """Make a publisher that runs inside `async with`."""

    @asynccontextmanager
    async def run(**options: Any) -> AsyncIterator[Publisher]:
        publisher = Publisher(reserved, **options)
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(publisher.run())
                yield publisher
                running.cancel()
        finally:
            publisher.close()

    return run


BOTH_BACKENDS = {
    "test_block_groups_routed",
    "test_block_kinds",
    "test_event_faults",
    "test_indexer_chaos",
    "test_indexer_sockets",
    "test_indexer_streams",
    "test_indexer_trust",
    "test_shared_topics",
    "test_stray_groups",
}
"""Modules whose indexers are run with the index in memory and with the one in Redis."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] not in BOTH_BACKENDS:
        return
    if "indexing" in metafunc.fixturenames:
        metafunc.parametrize("indexing", ["memory", "redis"], indirect=True)


@asynccontextmanager
async def _new_index(redis_server: Any) -> AsyncIterator[BlockIndex]:
    """An empty one, in Redis if there is one."""
    if redis_server is None:
        yield MemoryIndex()
        return
    index = RedisIndex(RedisConnection(redis_server.settings()))
    try:
        yield index
    finally:
        await index.aclose()


@pytest.fixture
def indexing(
    request: pytest.FixtureRequest,
) -> Callable[..., AbstractAsyncContextManager[tuple[IndexerService, BlockIndex]]]:
    """Make an indexer that runs inside `async with`, on an index of its own unless one is given."""
    backend = getattr(request, "param", "memory")
    server = request.getfixturevalue("redis_server") if backend == "redis" else None

    @asynccontextmanager
    async def run(
        *sources: InstanceSource,
        index: BlockIndex | None = None,
        reports: ReportSource | None = None,
        **settings: Any,
    ) -> AsyncIterator[tuple[IndexerService, BlockIndex]]:
        config = IndexerConfig(
            **{
                "replay_timeout_s": 5.0,
                "discovery_interval_s": 0.1,
                "discovery_retry_s": 0.05,
                "rebuild_interval_s": 0.05,
                **settings,
            }
        )
        async with (
            nullcontext(index) if index else _new_index(server) as used,
            httpx.AsyncClient() as http,
            asyncio.TaskGroup() as group,
        ):
            service = IndexerService(
                config=config,
                sources=sources,
                index=used,
                http=http,
                journal=used if isinstance(used, RedisIndex) else None,
                reports=reports,
            )
            running = group.create_task(service.run())
            yield service, used
            running.cancel()

    return run


class EngineHttp:
    """The two answers of a vLLM server that discovery reads."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.model = "tiny"
        self.sources: Mapping[str, Any] | None = None
        """None: a release that doesn't have the endpoint."""
        self.key: str | None = None
        self.keys_seen: list[str | None] = []
        self.stop: Callable[[], None] = lambda: None
        """Shuts the server down."""


@pytest.fixture
def engine_http(
    reserved: Any, eventually: Callable[[Callable[[], object]], Awaitable[None]]
) -> Callable[..., AbstractAsyncContextManager[EngineHttp]]:
    """Make an engine's HTTP server that runs inside `async with`."""

    @asynccontextmanager
    async def run(port: int | None = None) -> AsyncIterator[EngineHttp]:
        port = port or reserved.port()
        engine = EngineHttp(port)
        server = uvicorn.Server(
            uvicorn.Config(_engine_app(engine), port=port, log_level="error", lifespan="off")
        )
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve())
            await eventually(lambda: server.started)
            engine.stop = partial(setattr, server, "should_exit", True)
            try:
                yield engine
            finally:
                engine.stop()
                await asyncio.wait((serving,))

    return run


def _engine_app(engine: EngineHttp) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Response:
        if engine.key and engine.keys_seen[-1:] != [f"Bearer {engine.key}"]:
            return Response('{"error":"Unauthorized"}', status_code=401)
        return Response(msgspec.json.encode({"data": [{"id": engine.model}]}))

    @app.get("/kv_event_sources")
    async def sources() -> Response:
        if engine.sources is None:
            return Response('{"detail":"Not Found"}', status_code=404)
        return Response(msgspec.json.encode(engine.sources))

    @app.middleware("http")
    async def see_keys(request: Any, call_next: Any) -> Any:
        engine.keys_seen.append(request.headers.get("authorization"))
        return await call_next(request)

    return app


@pytest.fixture
def stored() -> Callable[..., dict[str, Any]]:
    """Blocks number `first` and on of the one prompt that all tests use."""

    def event(*hashes: int, parent: int | None = None, first: int = 0) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": parent,
            "token_ids": list(range(first * BLOCK_SIZE, (first + len(hashes)) * BLOCK_SIZE)),
            "block_size": BLOCK_SIZE,
        }

    return event


@pytest.fixture
def removed() -> Callable[..., dict[str, Any]]:
    """These blocks left the GPU."""

    def event(*hashes: int) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}

    return event


@pytest.fixture
def held() -> Callable[..., Awaitable[int | None]]:
    """Blocks of the prompt that `rank` is credited with; None: it isn't known."""

    async def blocks(index: Any, rank: RankId = R0) -> int | None:
        match = (await index.match(PROMPT)).get(rank)
        return None if match is None else match.tokens // BLOCK_SIZE

    return blocks


@pytest.fixture
def source() -> Callable[..., InstanceSource]:
    """Everything configured: no HTTP needed."""

    def describe(
        publisher: Any, url: str = E0, *, replay: bool = True, **more: Any
    ) -> InstanceSource:
        return InstanceSource(
            url=url,
            replay=publisher.replay if replay else None,
            **{"events": publisher.events, "model": "tiny", "ranks": 1, **more},
        )

    return describe
