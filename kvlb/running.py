"""Composes one process out of the parts: memory index, indexer, balancer, one event loop.

The only place that knows both the indexer's service and the balancer's application.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector

from balancer.app import create_app
from balancer.core.fleet_view import RankFacts
from balancer.server import BalancerBrokenError, ListenError, serve
from indexer.core.rank_status import RankStatus
from indexer.memory_index import MemoryIndex
from indexer.service import IndexerService
from indexer.status import IndexerCollector
from kvlb.errors import BrokenError, SettingsError
from kvlb.settings import KvlbSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningKvlb:
    """A balancer that accepts connections, and its indexer."""

    url: str
    indexer: IndexerService


async def run_kvlb(
    settings: KvlbSettings,
    *,
    stop: asyncio.Event,
    on_listening: Callable[[RunningKvlb], None],
) -> None:
    """Index and balance until `stop` is set and running answers are finished."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    index = MemoryIndex()
    async with httpx.AsyncClient(trust_env=False) as http:
        indexer = IndexerService(
            config=settings.indexer,
            sources=settings.engine_sources(),
            index=index,
            http=http,
        )
        registry.register(IndexerCollector(indexer))
        app = create_app(
            config=settings,
            index=index,
            registry=registry,
            index_status=lambda: render_ranks(indexer),
        )

        def listening(port: int) -> None:
            url = f"http://{_reachable(settings.host)}:{port}"
            on_listening(RunningKvlb(url=url, indexer=indexer))

        async with asyncio.TaskGroup() as group:
            indexing = group.create_task(indexer.run())
            try:
                await serve(
                    app,
                    host=settings.host,
                    port=settings.port,
                    drain_s=settings.drain_s,
                    stop=stop,
                    on_listening=listening,
                )
            except ListenError as error:
                raise SettingsError(f"{error}; choose another with --host or --port") from error
            except BalancerBrokenError as error:
                raise BrokenError(str(error)) from error
            indexing.cancel()


@asynccontextmanager
async def running_kvlb(settings: KvlbSettings) -> AsyncIterator[RunningKvlb]:
    """Index and balance while the block runs."""
    stop = asyncio.Event()
    listening: asyncio.Future[RunningKvlb] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_kvlb(settings, stop=stop, on_listening=listening.set_result))
        try:
            yield await listening
        finally:
            stop.set()


def render_ranks(indexer: IndexerService) -> RankFacts:
    """What the indexer knows of each rank, for `/status`."""
    return {status.rank: _render_rank(status) for status in indexer.status()}


def _render_rank(status: RankStatus) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(status, str_keys=True)
    del shown["rank"]
    return shown


def _reachable(host: str) -> str:
    """A host to show: "every interface" is no address to connect to."""
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104 - recognised, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
