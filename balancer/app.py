"""Builds the balancer once, and is the ASGI callable that decides who answers a path.

Engines' paths go to the data plane without touching the web framework; everything else goes to
the FastAPI application of `balancer.routes`.
"""

import asyncio
import importlib.metadata
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from balancer.config import BalancerConfig, reloaded
from balancer.connectors.available import connector_conflicts, connectors
from balancer.core.control_errors import EngineCallError
from balancer.core.decision_log import DecisionLog
from balancer.core.fleet import Fleet, Instance
from balancer.core.fleet_view import RankFacts
from balancer.core.full_reports import FullReports
from balancer.core.load import LoadLedger
from balancer.core.local_ledger import LocalLedger
from balancer.core.policies import Policy
from balancer.core.record import RequestRecord
from balancer.core.transfer_facts import Inquiry
from balancer.dataplane.exchange import AsgiExchange
from balancer.dataplane.handling import Handling
from balancer.dataplane.plane import DataPlane
from balancer.dataplane.upstream import Upstream
from balancer.fleet.control import FleetControl, FleetLinks
from balancer.fleet.engine_client import EngineClient
from balancer.fleet.keeper import FleetKeeper
from balancer.fleet.metrics import FleetCollector
from balancer.metrics import BalancerMetrics
from balancer.own_code import load_policy
from balancer.routes import Surface, create_routes
from balancer.routing.index_watch import IndexWatch
from balancer.routing.reporting import Reporting
from balancer.routing.router import Router
from balancer.tokens.pool import TokenPool
from balancer.tokens.reader import PromptReader
from balancer.tracing import NoTracing, Tracing
from indexer.core.index import PrefixLookup
from indexer.core.reports import ReportSink

DECISIONS_KEPT = 1000
RELEASES_INTERVAL_S = 1.0

logger = structlog.stdlib.get_logger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAndChance:
    """What every process has, handed in so that tests can hold it still."""

    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random
    wall_clock: Callable[[], float] = lambda: datetime.now(UTC).timestamp()
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex
    strftime_now: Callable[[str], str] = lambda form: datetime.now().astimezone().strftime(form)


class App:
    """The balancer as an ASGI application. Its lifespan starts the probes and closes clients."""

    def __init__(
        self,
        *,
        routes: FastAPI,
        dataplane: DataPlane,
        keeper: FleetKeeper,
        ledger: LoadLedger,
        reconfigure: Callable[[BalancerConfig], None],
        control: FleetControl,
    ) -> None:
        self._routes = routes
        self._dataplane = dataplane
        self.keeper = keeper
        self.ledger = ledger
        self.reconfigure = reconfigure
        """Take over those settings that can change while it runs (`config.reloaded`)."""
        self.control = control
        """Membership of the fleet."""
        self.broken = asyncio.Event()
        """Set once something has ended that the balancer can't do without: stop serving."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Hand engines' paths to the data plane, everything else to the web framework."""
        if scope["type"] != "http":
            await self._routes(scope, receive, send)
            return
        try:
            if self._dataplane.proxies(scope["path"]):
                await self._dataplane.handle(AsgiExchange(scope, receive, send))
            else:
                await self._routes(scope, receive, send)
        except asyncio.CancelledError:
            # Only a server that has to end cancels an answer, and nothing of the task is left to
            # do: it would log a traceback for what the request's own line tells.
            return

    def start_draining(self) -> None:
        """From now on `/ready` says no; what runs goes on."""
        self._routes.state.is_draining = True

    def break_down(self) -> None:
        """From now on `/health` and `/ready` say no, and whoever serves this has to end."""
        self._routes.state.is_broken = True
        self.broken.set()


def create_app(  # noqa: PLR0913 - everything a process has, handed in
    *,
    config: BalancerConfig,
    index: PrefixLookup,
    registry: CollectorRegistry,
    index_status: Callable[[], RankFacts] | None = None,
    reports: ReportSink | None = None,
    surroundings: TimeAndChance | None = None,
    tracing: Tracing | None = None,
    links: FleetLinks | None = None,
) -> App:
    """Build everything. `config` has been through `check_config`.

    `index_status` tells trust, epoch and held blocks by rank for `/status`. Without it `/status`
    shows what the index itself tells (`IndexWatch`). `reports` takes what finished legs show of
    the index. Raises ConfigError if the registration service can't have its port.
    """
    builder = _Builder(
        config, index, registry, surroundings or TimeAndChance(), tracing or NoTracing()
    )
    return builder.build(index_status, links or FleetLinks(), reports)


class _Builder:
    """Holds the parts while they are put together."""

    def __init__(
        self,
        config: BalancerConfig,
        index: PrefixLookup,
        registry: CollectorRegistry,
        surroundings: TimeAndChance,
        tracing: Tracing,
    ) -> None:
        self._config = config
        self._index = index
        self._registry = registry
        self._surroundings = surroundings
        self._tracing = tracing
        self._connectors = connectors()
        self._engine_keys = config.engine_keys()
        self._engines = EngineClient(api_keys=self._engine_keys, timeout_s=config.probes.timeout_s)
        self._keeper = FleetKeeper(
            config.instances,
            prober=self._engines,
            settings=config.probes,
            inquiry=self._inquiry,
            on_change=self._on_fleet,
        )
        self._known = self._keeper.snapshot()
        self._conflicts: list[str] = []
        self._ledger = LocalLedger(
            clock=surroundings.clock, max_predicted_blocks=config.routing.max_predicted_blocks
        )
        self._metrics = BalancerMetrics(registry, self._keeper.snapshot)
        collector = FleetCollector(
            fleet=self._keeper.snapshot,
            ledger=self._ledger,
            unknown_ranks=lambda: self._router.unknown_ranks,
            fleet_bugs=lambda: self._keeper.bugs,
            lost_reports=lambda: self._reporting.lost,
            full_reports=lambda: self._full_reports.asked,
            trust=lambda rank: self._router.trust(rank),  # noqa: PLW0108 - it is built later
        )
        registry.register(collector)
        self._decisions = DecisionLog(limit=DECISIONS_KEPT)
        self._pool = TokenPool(
            config.tokens.models,
            workers=config.tokens.workers,
            cache_bytes=config.tokens.cache_bytes,
            strftime_now=surroundings.strftime_now,
        )
        self._reader = PromptReader(
            settings=config.tokens, pool=self._pool, engine=self._engines, clock=surroundings.clock
        )
        self._policy = self._load_policy(config.routing.policy)
        self._router = Router(
            index=index,
            ledger=self._ledger,
            policy=self._policy,
            settings=config.routing,
            pd=config.pd,
            connectors=self._connectors,
            random=surroundings.random,
            clock=surroundings.clock,
            on_lookup=self._metrics.on_lookup,
            tracing=self._tracing,
        )
        self._full_reports = FullReports(config.routing.full_report_interval_s)
        self._watch = IndexWatch(
            index=index,
            router=self._router,
            fleet=self._keeper.snapshot,
            clock=surroundings.clock,
        )
        settings = config.dataplane
        self._upstream = Upstream(
            connect_timeout_s=settings.connect_timeout_s,
            first_byte_timeout_s=settings.first_byte_timeout_s,
            idle_timeout_s=settings.idle_timeout_s,
            keep_alive_s=settings.keep_alive_s,
        )

    def build(
        self,
        index_status: Callable[[], RankFacts] | None,
        links: FleetLinks,
        reports: ReportSink | None,
    ) -> App:
        self._reporting = Reporting(
            reports, clock=self._surroundings.clock, on_outcome=self._metrics.on_prediction
        )
        self._control = FleetControl(
            self._config,
            keeper=self._keeper,
            ledger=self._ledger,
            engines=self._engines,
            upstream=self._upstream,
            engine_keys=self._engine_keys,
            links=links,
            registry=self._registry,
            clock=self._surroundings.clock,
            wall_clock=self._surroundings.wall_clock,
        )
        dataplane = DataPlane(
            fleet=self._keeper.snapshot,
            reader=self._reader,
            router=self._router,
            upstream=self._upstream,
            connectors=self._connectors,
            settings=self._config.dataplane,
            on_record=self._on_record,
            report_health=self._keeper.report,
            clock=self._surroundings.clock,
            new_id=self._surroundings.new_id,
            engine_key=self._engine_keys.get,
            tracing=self._tracing,
            handling=Handling.configured(
                self._config.handlers,
                lambda error: self._metrics.own_code_failed("handler", error),
            ),
            on_leg_end=self._reporting.on_leg_end,
            full_reports=self._full_reports,
        )
        surface = Surface(
            fleet=self._keeper.snapshot,
            router=self._router,
            reader=self._reader,
            ledger=self._ledger,
            registry=self._registry,
            decisions=self._decisions,
            admin=lambda: self._config.admin,
            summary=lambda: self._config.summary(),  # noqa: PLW0108 - it may be replaced
            index_status=index_status or self._router.known_ranks.facts,
            max_body_bytes=self._config.dataplane.max_body_bytes,
            conflicts=lambda: self._conflicts,
            version=importlib.metadata.version("kvlb"),
            control=self._control.routes(lambda: self._config.admin),
        )
        routes = create_routes(surface, lambda _: self._lifespan(app))
        app = App(
            routes=routes,
            dataplane=dataplane,
            keeper=self._keeper,
            ledger=self._ledger,
            reconfigure=self._reconfigure,
            control=self._control,
        )
        return app

    def _load_policy(self, name: str) -> Policy:
        return load_policy(name, lambda error: self._metrics.own_code_failed("policy", error))

    def _reconfigure(self, config: BalancerConfig) -> None:
        before = self._config
        self._config = config = reloaded(before, config)
        if (before.routing, before.pd) != (config.routing, config.pd):
            if before.routing.policy != config.routing.policy:
                self._policy = self._load_policy(config.routing.policy)
            self._router.set_settings(config.routing, config.pd, self._policy)
            self._full_reports.interval_s = config.routing.full_report_interval_s
        self._control.members.set_config(config)

    @asynccontextmanager
    async def _lifespan(self, app: App) -> AsyncIterator[None]:
        """Probe and load tokenizers while serving; then close what was opened.

        No task can end the group: the clients stay open while running answers need them.
        """
        self._note_conflicts(self._known)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._keep(app)),
                    group.create_task(self._load()),
                    group.create_task(self._control.run()),
                    group.create_task(self._reporting.run()),
                    group.create_task(self._run_releases()),
                    group.create_task(self._watch.run()),
                ]
                yield
                for task in tasks:
                    task.cancel()
        finally:
            self._pool.close()
            self._control.close()
            await self._upstream.close()
            await self._engines.close()

    async def _keep(self, app: App) -> None:
        """Watch the instances. There is no balancing without."""
        try:
            await self._keeper.run()
        except Exception as error:
            logger.critical("fleet_keeper_failed", error=repr(error), exc_info=error)
        app.break_down()

    async def _run_releases(self) -> None:
        """Ask for the releases of engines that may have to announce again what they reuse."""
        while True:
            await asyncio.sleep(RELEASES_INTERVAL_S)
            for instance in self._full_reports.take_unknown():
                try:
                    release = await self._engines.find_release(instance)
                except EngineCallError:
                    continue  # it is put down again with the next request
                self._full_reports.learn(instance, release, self._surroundings.clock())

    async def _load(self) -> None:
        """Load tokenizers. What can't be loaded costs cache knowledge only."""
        try:
            await self._pool.load()
        except Exception:
            logger.exception("tokenizer_load_failed")

    def _inquiry(self, instance: Instance) -> Inquiry | None:
        connector = self._connectors.get(instance.connector)
        return connector.inquiry(instance) if connector is not None else None

    def _on_record(self, record: RequestRecord) -> None:
        self._metrics.observe(record)
        self._decisions.add(record)

    def _on_fleet(self, fleet: Fleet) -> None:
        """Forget what was counted or predicted for ranks that left or lost their process."""
        gone = set(self._known.ranks - fleet.ranks)
        for before in self._known.instances:
            now = fleet.by_id(before.id)
            if now and before.healthy and now.unhealthy_reason == "engine_unreachable":
                gone.update(before.rank_ids())
        for rank in gone:
            self._ledger.forget(rank)
        self._known = fleet
        self._control.on_fleet(fleet)
        self._note_conflicts(fleet)
        self._metrics.forget_absent(fleet)

    def _note_conflicts(self, fleet: Fleet) -> None:
        """Warn of each conflict once, as long as it lasts."""
        conflicts = connector_conflicts(fleet.instances)
        for conflict in conflicts:
            if conflict not in self._conflicts:
                logger.warning("connector_conflict", conflict=conflict)
        self._conflicts = conflicts
