"""Builds the balancer once: everything is made here and handed down."""

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import structlog
from prometheus_client import CollectorRegistry

from balancer.asgi import App
from balancer.config import BalancerConfig, reloaded
from balancer.connectors.available import connector_conflicts, connectors
from balancer.core.decision_log import DecisionLog
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.fleet.transfer_facts import Inquiry
from balancer.core.fleet.view import RankFacts
from balancer.core.http.cors import Cors
from balancer.core.prompt.encoded_items import EncodedItems
from balancer.core.record import RequestRecord
from balancer.core.routing.full_reports import FullReports
from balancer.core.routing.policies import Policy
from balancer.dataplane.admission import Admission, Room
from balancer.dataplane.admission_metrics import AdmissionMetrics
from balancer.dataplane.handling import Handling
from balancer.dataplane.plane import DataPlane
from balancer.dataplane.reliability import Reliability
from balancer.dataplane.request_log import LogRequest
from balancer.dataplane.upstream import Upstream
from balancer.entry import Entry
from balancer.fleet.control import FleetControl, FleetLinks
from balancer.fleet.engine_client import EngineClient
from balancer.fleet.keeper import FleetKeeper
from balancer.fleet.metrics import FleetCollector
from balancer.fleet.releases import run_releases
from balancer.metrics import BalancerMetrics
from balancer.own_code import load_policy
from balancer.routes import Surface, create_routes
from balancer.routing.index_watch import IndexWatch
from balancer.routing.reporting import Reporting
from balancer.routing.router import Router
from balancer.sharing import SETTLE_S, Company, PeerReports, SharingCollector, open_ledger
from balancer.siblings import Views
from balancer.surroundings import TimeAndChance
from balancer.tokens.stage import TokensStage
from balancer.tracing import NoTracing, Tracing
from indexer.core.index import PrefixLookup
from indexer.core.reports import ReportSink
from indexer.core.types import InstanceId, RankId

DECISIONS_KEPT = 1000

logger = structlog.stdlib.get_logger(__name__)


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
    company: Company | None = None,
    log_request: LogRequest | None = None,
) -> App:
    """Build everything. `config` has been through `check_config`.

    `index_status` tells trust, epoch and held blocks by rank for `/status`. Without it `/status`
    shows what the index itself tells (`IndexWatch`). `reports` takes what finished legs show of
    the index, `log_request` finished requests. Raises ConfigError if the registration service can't have its port.
    """
    chance, company = surroundings or TimeAndChance(), company or Company()
    builder = _Builder(config, index, registry, chance, tracing or NoTracing(), company)
    return builder.build(index_status, links or FleetLinks(), reports, log_request)


class _Builder:
    """Holds the parts while they are put together."""

    def __init__(
        self,
        config: BalancerConfig,
        index: PrefixLookup,
        registry: CollectorRegistry,
        surroundings: TimeAndChance,
        tracing: Tracing,
        company: Company,
    ) -> None:
        self._config = config
        self._company = company
        self._index = index
        self._registry = registry
        self._surroundings = surroundings
        self._tracing = tracing
        self._connectors = connectors()
        self._engine_keys = config.engine_keys()
        self._balancer_id = company.balancer_id or surroundings.new_id()
        self._engines = EngineClient(
            api_keys=self._engine_keys,
            timeout_s=config.probes.timeout_s,
            balancer_id=self._balancer_id,
        )
        self._keeper = FleetKeeper(
            config.instances,
            prober=self._engines,
            settings=config.probes,
            inquiry=self._inquiry,
            on_change=self._on_fleet,
        )
        self._known = self._keeper.snapshot()
        self._conflicts: list[str] = []
        self._ledger, self._sharing = open_ledger(
            company,
            surroundings,
            news=PeerReports(self._on_peer_booked, self._on_peer_report),
            max_predicted_blocks=config.routing.max_predicted_blocks,
        )
        registry.register(SharingCollector(self._sharing))
        self._metrics = BalancerMetrics(registry, self._keeper.snapshot)
        collector = FleetCollector(
            fleet=self._keeper.snapshot,
            ledger=self._ledger,
            unknown_ranks=lambda: self._router.unknown_ranks,
            silent_ranks=lambda: self._router.silent_ranks,
            fleet_bugs=lambda: self._keeper.bugs,
            lost_reports=lambda: self._reporting.lost,
            full_reports=lambda: self._full_reports.asked,
            trust=lambda rank: self._router.trust(rank),  # noqa: PLW0108 - it is built later
        )
        registry.register(collector)
        self._decisions = DecisionLog(limit=DECISIONS_KEPT)
        self._encoded = EncodedItems(config.encode)
        self._tokens = TokensStage(
            config.tokens,
            self._engines,
            registry=registry,
            clock=surroundings.clock,
            strftime_now=surroundings.strftime_now,
        )
        self._policy = self._load_policy(config.routing.policy)
        self._reliability = Reliability(
            config.reliability,
            fleet=self._keeper.snapshot,
            clock=surroundings.clock,
            on_change=self._on_breaker,
        )
        registry.register(self._reliability)
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
            vetting=self._reliability,
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
        log_request: LogRequest | None,
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
            reader=self._tokens.reader,
            router=self._router,
            upstream=self._upstream,
            connectors=self._connectors,
            settings=self._config.dataplane,
            on_record=self._on_record,
            report_health=self._report_health,
            clock=self._surroundings.clock,
            new_id=self._surroundings.new_id,
            ledger=self._ledger,
            engine_key=self._engine_keys.get,
            tracing=self._tracing,
            handling=Handling.configured(
                self._config.handlers,
                lambda error: self._metrics.own_code_failed("handler", error),
            ),
            on_leg_end=self._reporting.on_leg_end,
            full_reports=self._full_reports,
            encoded=self._encoded,
            reliability=self._reliability,
            admission=self._open_admission(),
            notices=self._control.notices,
            log_request=log_request,
            balancer_id=self._balancer_id,
        )
        views = Views(self._registry, self._decisions, self._company.siblings)
        surface = Surface(
            fleet=self._keeper.snapshot,
            router=self._router,
            reader=self._tokens.reader,
            ledger=self._ledger,
            views=views,
            encoded=self._encoded,
            clock=self._surroundings.clock,
            admin=lambda: self._config.admin,
            summary=lambda: self._config.summary(),  # noqa: PLW0108 - it may be replaced
            breaker=self._reliability.render,
            index_status=index_status or self._router.known_ranks.facts,
            tokens=self._tokens.status,
            max_body_bytes=self._config.dataplane.max_body_bytes,
            conflicts=lambda: self._conflicts,
            version=importlib.metadata.version("kvlb"),
            balancer_id=self._balancer_id,
            control=self._control.routes(lambda: self._config.admin),
        )
        routes = create_routes(surface, lambda _: self._lifespan(app))
        app = App(
            routes=routes,
            entry=Entry(
                routes=routes,
                dataplane=dataplane,
                cors=Cors(self._config.dataplane.cors_origins),
                settings=self._config.dataplane,
            ),
            keeper=self._keeper,
            ledger=self._ledger,
            reconfigure=self._reconfigure,
            control=self._control,
            views=views,
        )
        return app

    def _open_admission(self) -> Admission:
        waited = AdmissionMetrics(self._registry, lambda: admission.waiting)
        admission = Admission(
            room=Room(
                ledger=self._ledger,
                vetting=self._reliability,
                settings=self._config.admission,
                block_size=self._router.known_ranks.block_sizes.get,
                max_requests_per_rank=lambda: self._router.max_requests_per_rank,
            ),
            settings=self._config.admission,
            fleet=self._keeper.snapshot,
            clock=self._surroundings.clock,
            cached_share=self._router.cached_share,
            on_waited=waited.observe,
        )
        return admission

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
        self._encoded.settings = config.encode
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
                    group.create_task(self._tokens.run()),
                    group.create_task(self._control.run()),
                    group.create_task(self._reporting.run()),
                    group.create_task(
                        run_releases(self._full_reports, self._engines, self._surroundings.clock)
                    ),
                    group.create_task(self._watch.run()),
                    group.create_task(self._reliability.run()),
                ]
                if self._sharing is not None:
                    tasks.append(group.create_task(self._sharing.run()))
                await self._settle()
                yield
                for task in tasks:
                    task.cancel()
        finally:
            self._tokens.close()
            self._control.close()
            await self._upstream.close()
            await self._engines.close()

    async def _settle(self) -> None:
        """Know prompts and peers before the first request; where others answer meanwhile, the fleet."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._company.settle_s):
                await self._keeper.first_round()
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._tokens.is_loaded.wait()
                if self._sharing is not None:
                    await self._sharing.joined()

    async def _keep(self, app: App) -> None:
        """Watch the instances. There is no balancing without."""
        try:
            await self._keeper.run()
        except Exception as error:
            logger.critical("fleet_keeper_failed", error=repr(error), exc_info=error)
        app.break_down()

    def _inquiry(self, instance: Instance) -> Inquiry | None:
        connector = self._connectors.get(instance.connector)
        return connector.inquiry(instance) if connector is not None else None

    def _on_peer_booked(self, rank: RankId) -> None:
        self._policy.chosen(rank)  # whichever it is by now

    def _report_health(self, instance: InstanceId, ok: bool, reason: str | None) -> None:
        is_news = self._keeper.report(instance, ok, reason)
        if is_news and self._sharing is not None:
            self._sharing.ledger.tell_outcome(instance, ok, reason)

    def _on_peer_report(self, instance: InstanceId, ok: bool, reason: str | None) -> None:
        self._keeper.report(instance, ok, reason)
        self._reliability.told(instance, ok, reason)

    def _on_breaker(self, instance: InstanceId, reason: str | None) -> None:
        """It opened, or closed."""
        if reason is not None:
            self._keeper.look_at((instance,))
        if self._sharing is not None:
            self._sharing.ledger.tell_outcome(instance, reason is None, reason)

    def _on_record(self, record: RequestRecord) -> None:
        self._metrics.observe(record)
        self._decisions.add(record)
        self._tokens.on_record(record)

    def _on_fleet(self, fleet: Fleet) -> None:
        """Forget what was counted or predicted for ranks that left or lost their process."""
        gone = set(self._known.ranks - fleet.ranks)
        for before in self._known.instances:
            now = fleet.by_id(before.id)
            if now and before.healthy and now.unhealthy_reason == "engine_unreachable":
                gone.update(before.rank_ids())
        for rank in gone:
            self._ledger.forget(rank)
            self._encoded.forget(rank.instance)
        self._ledger.retain(fleet.ranks)
        self._known = fleet
        self._control.on_fleet(fleet)
        self._reliability.on_fleet(fleet)
        self._note_conflicts(fleet)
        self._metrics.forget_absent(fleet)

    def _note_conflicts(self, fleet: Fleet) -> None:
        """Warn of each conflict once, as long as it lasts."""
        conflicts = connector_conflicts(fleet.instances)
        for conflict in conflicts:
            if conflict not in self._conflicts:
                logger.warning("connector_conflict", conflict=conflict)
        self._conflicts = conflicts
