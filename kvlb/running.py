"""Composes processes out of the parts: `up` (everything in one), `balancer`, `indexer`.

The only place that knows both the indexer's service and the balancer's application.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from balancer.app import create_app
from balancer.asgi import App
from balancer.core.fleet.view import RankFacts
from balancer.core.settings.errors import ConfigError
from balancer.fleet.control import FleetLinks
from balancer.fleet.control_http import ControlHttp
from balancer.fleet.engine_sockets import tls_context
from balancer.fleet.members import Members
from balancer.guards import guard
from balancer.routes import add_error_answers
from balancer.server import BalancerBrokenError, ListenError, listen, serve_on
from balancer.sharing import Company
from indexer.core.rank_status import RankStatus
from indexer.core.reports import ReportSource
from indexer.core.types import InstanceId
from indexer.local_reports import LocalReports
from indexer.service import IndexerService, unix_time_s
from indexer.status import IndexerCollector, indexer_status_app
from kvlb.errors import BrokenError, SettingsError
from kvlb.index_backend import OpenIndex, open_index, open_reader
from kvlb.load_stream import open_channel
from kvlb.logs import request_log
from kvlb.names.resolver import Resolve
from kvlb.names.resolver import resolve as resolve_name
from kvlb.names.watch import NameWatch
from kvlb.reload import Reloader
from kvlb.settings import KvlbSettings, Overrides, engine_sources, load_fleet
from kvlb.shared_changes import open_changes
from kvlb.status_server import serve_status
from kvlb.trace_export import open_tracing
from kvlb.workers.seat import Seat

_logger = structlog.get_logger(__name__)

NOT_OF_THE_BALANCER = frozenset({"indexer"})
NOT_OF_THE_INDEXER = frozenset(
    {
        *("port", "workers", "drain_s", "dataplane", "reliability", "routing", "pd", "tokens"),
        *("probes", "tracing"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningKvlb:
    """A balancer that accepts connections, and its indexer."""

    url: str
    indexer: IndexerService


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """Where settings come from while a process runs."""

    path: Path
    read: Callable[[], KvlbSettings]
    """Everything anew: file, environment, options. Raises SettingsError."""

    @classmethod
    def of(cls, path: Path | None, overrides: Overrides) -> Self | None:
        """None if the process has no file."""
        if path is None:
            return None
        return cls(path=path, read=lambda: load_fleet(path, overrides, os.environ))

    def reloader(
        self,
        running: KvlbSettings,
        apply: Callable[[KvlbSettings], None],
        ignored: frozenset[str] = frozenset(),
    ) -> Reloader:
        return Reloader(self.path, running=running, read=self.read, apply=apply, ignored=ignored)


async def run_kvlb(
    settings: KvlbSettings,
    *,
    stop: asyncio.Event,
    on_listening: Callable[[RunningKvlb], None],
    file: ConfigFile | None = None,
    resolve: Resolve = resolve_name,
) -> None:
    """Index and balance until `stop` is set and running answers are finished."""
    registry = new_registry()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_listen_to_clients(settings))
        opened = await stack.enter_async_context(open_index(settings.redis))
        tracing = await stack.enter_async_context(open_tracing(settings.tracing))
        reports = LocalReports()
        indexer = await _new_indexer(settings, opened, registry, stack, reports)
        changes = await stack.enter_async_context(open_changes(settings.redis))
        channel = await stack.enter_async_context(open_channel(settings.redis))
        app = _build_app(
            config=settings,
            company=Company(channel=channel),
            index=opened.index,
            registry=registry,
            index_status=lambda: render_ranks(indexer),
            reports=reports,
            tracing=tracing,
            links=FleetLinks(
                store=changes,
                on_members=lambda members: indexer.set_sources(engine_sources(members)),
                on_cache_dropped=indexer.drop_credit,
            ),
        )

        async def connect_anew(moved: Sequence[InstanceId]) -> None:
            await app.control.connect_anew(moved)
            indexer.follow_anew(moved)

        names = NameWatch(app.control.members, resolve=resolve, on_moved=connect_anew)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(indexer.run()), group.create_task(names.run())]
            if file is not None:
                tasks.append(group.create_task(file.reloader(settings, app.reconfigure).run()))
            await _serve_balancer(
                listener,
                app,
                settings,
                stop,
                lambda url: on_listening(RunningKvlb(url=url, indexer=indexer)),
            )
            for task in tasks:
                task.cancel()


async def run_balancer(
    settings: KvlbSettings,
    *,
    stop: asyncio.Event,
    on_listening: Callable[[str], None],
    file: ConfigFile | None = None,
    resolve: Resolve = resolve_name,
    seat: Seat | None = None,
) -> None:
    """Balance on what an indexer writes to Redis, until `stop` is set and answers are finished.

    `on_listening` gets the balancer's address. Redis may be down: requests are routed by load. `seat`
    is a worker's.
    """
    if settings.redis is None:
        raise SettingsError(no_redis("balancer"))
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(seat.listener if seat else _listen_to_clients(settings))
        company = (
            seat.company(settle_s=settings.probes.timeout_s)
            if seat
            else Company(channel=await stack.enter_async_context(open_channel(settings.redis)))
        )
        opened = await stack.enter_async_context(open_reader(settings.redis))
        tracing = await stack.enter_async_context(open_tracing(settings.tracing))
        changes = await stack.enter_async_context(open_changes(settings.redis))
        app = _build_app(
            config=settings if seat is None else seat.share(settings),
            index=opened.index,
            registry=new_registry(),
            reports=opened.reports,
            tracing=tracing,
            links=FleetLinks(store=changes),
            company=company,
        )
        if seat is not None:
            seat.attach(app.views)
        names = NameWatch(app.control.members, resolve=resolve, on_moved=app.control.connect_anew)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(names.run())]
            if file is not None:
                reloader = file.reloader(settings, app.reconfigure, NOT_OF_THE_BALANCER)
                tasks.append(group.create_task(reloader.run()))
            await _serve_balancer(listener, app, settings, stop, on_listening)
            for task in tasks:
                task.cancel()


async def run_indexer(
    settings: KvlbSettings,
    *,
    stop: asyncio.Event,
    on_listening: Callable[[str], None],
    file: ConfigFile | None = None,
    resolve: Resolve = resolve_name,
) -> None:
    """Follow the engines and write Redis until `stop` is set.

    `on_listening` gets the address of the status server. Redis may be down: what is known is
    written when it is there.
    """
    if settings.redis is None:
        raise SettingsError(no_redis("indexer"))
    registry = new_registry()
    async with AsyncExitStack() as stack:
        host = settings.indexer.status_host or settings.host
        hint = "choose another with `indexer.status_port` or --status-port"
        listener = stack.enter_context(_listen(host, settings.indexer.status_port, hint))
        opened = await stack.enter_async_context(open_index(settings.redis))
        indexer = await _new_indexer(settings, opened, registry, stack, opened.reports)
        changes = await stack.enter_async_context(open_changes(settings.redis))
        admin = settings.admin
        members = Members(settings, store=changes, wall_clock=unix_time_s)
        members.on_change = lambda now: indexer.set_sources(now.config.engine_sources())

        def apply(changed: KvlbSettings) -> None:
            nonlocal admin
            admin = changed.admin
            members.set_config(changed)

        async def follow_anew(moved: Sequence[InstanceId]) -> None:
            indexer.follow_anew(moved)

        names = NameWatch(members, resolve=resolve, on_moved=follow_anew)
        api = indexer_status_app(indexer, registry, guard(lambda: admin))
        add_error_answers(api)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each.run()) for each in (indexer, members, names)]
            if file is not None:
                reloader = file.reloader(settings, apply, NOT_OF_THE_INDEXER)
                tasks.append(group.create_task(reloader.run()))
            await serve_status(
                api,
                listener=listener,
                stop=stop,
                on_listening=lambda port: on_listening(listening_url(host, port)),
            )
            for task in tasks:
                task.cancel()


def _build_app(**parts: Any) -> App:
    """`create_app`, with its refusal as the operator's."""
    try:
        return create_app(log_request=request_log(), **parts)
    except ConfigError as error:
        raise SettingsError(str(error)) from error


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


def no_redis(command: str) -> str:
    """What to say to somebody who starts `command` without a Redis."""
    return (
        f"`redis.url`: `kvlb {command}` needs the Redis that indexer and balancers share; name it in "
        "the file, with --redis redis://host:6379 or KVLB_REDIS_URL. Without Redis: `kvlb up`"
    )


def render_ranks(indexer: IndexerService) -> RankFacts:
    """What the indexer knows of each rank, for `/status`."""
    return {status.rank: _render_rank(status) for status in indexer.status()}


def _render_rank(status: RankStatus) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(status, str_keys=True)
    del shown["rank"]
    return shown


def new_registry() -> CollectorRegistry:
    """With what is to be known of any process."""
    # A series beside each of ours with the time of its beginning: doubles a scrape, tells nothing.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


async def _new_indexer(
    settings: KvlbSettings,
    opened: OpenIndex,
    registry: CollectorRegistry,
    stack: AsyncExitStack,
    reports: ReportSource | None,
) -> IndexerService:
    indexer = IndexerService(
        config=settings.indexer,
        sources=settings.engine_sources(),
        index=opened.index,
        journal=opened.journal,
        reports=reports,
        http=await stack.enter_async_context(ControlHttp(trust_env=False, verify=tls_context())),
    )
    registry.register(IndexerCollector(indexer))
    return indexer


def _listen_to_clients(settings: KvlbSettings) -> socket.socket:
    return _listen(settings.host, settings.port, "choose another with --host or --port")


def _listen(host: str, port: int, hint: str) -> socket.socket:
    """Before all else: who can't have its port must not take over another process's ranks."""
    try:
        return listen(host, port)
    except ListenError as error:
        raise SettingsError(f"{error}; {hint}") from error


async def _serve_balancer(
    listener: socket.socket,
    app: App,
    settings: KvlbSettings,
    stop: asyncio.Event,
    on_listening: Callable[[str], None],
) -> None:
    if settings.instances and not any(each.role.answers_clients for each in settings.instances):
        _logger.warning("no_instance_answers_clients", hint="add one of role decode or mixed")
    try:
        await serve_on(
            listener,
            app,
            drain_s=settings.drain_s,
            stop=stop,
            on_listening=lambda port: on_listening(listening_url(settings.host, port)),
        )
    except BalancerBrokenError as error:
        raise BrokenError(str(error)) from error


def listening_url(host: str, port: int) -> str:
    """An address to show: "every interface" is none to connect to."""
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104 - recognised, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
