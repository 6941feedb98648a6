"""The parts that change the fleet while the balancer runs, put together and kept going.

Membership and its routes, the registration service, commands to engines. `balancer.app` gives it what
it needs of the rest, and is told of every new membership.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass

import structlog
from fastapi import APIRouter
from prometheus_client import CollectorRegistry

from balancer.config import BalancerConfig
from balancer.core.fleet.registrations import RegistrationBook
from balancer.core.fleet.roster import Hold
from balancer.core.fleet.snapshot import Fleet
from balancer.core.load.ledger import LoadLedger
from balancer.core.settings.control import AdminSettings
from balancer.dataplane.upstream import Upstream
from balancer.fleet.admin import FleetAdmin
from balancer.fleet.engine_client import EngineClient
from balancer.fleet.fan_out import FanOut, Instances
from balancer.fleet.keeper import FleetKeeper
from balancer.fleet.member_metrics import MembershipCollector, NoticeCollector
from balancer.fleet.members import ChangeStore, Members, Membership
from balancer.fleet.registration import RegistrationService
from balancer.fleet.routes import AdminSurface, admin_routes
from balancer.fleet.transfer_notices import TransferNotices
from indexer.core.types import InstanceId

_RESTART_S = 1.0
_SILENT = frozenset({"probe_timeout", "connect_timeout"})
"""Reasons by which an engine, or its host, hangs. One that refuses connections may finish what runs."""

_logger = structlog.stdlib.get_logger(__name__)


async def _nobody(_: Instances) -> None:
    """Nobody has to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLinks:
    """Where the fleet's changes come from and go to, outside of the balancer."""

    store: ChangeStore | None = None
    """Shares run-time changes with other processes."""
    on_members: Callable[[BalancerConfig], None] = lambda _: None
    """Told of the settings with all members, whenever they change."""
    on_cache_dropped: Callable[[Instances], Awaitable[None]] = _nobody
    """Told who has just been made to drop its cache."""


class FleetControl:
    """One per balancer."""

    def __init__(  # noqa: PLR0913 - built in one place, which hands everything down
        self,
        config: BalancerConfig,
        *,
        keeper: FleetKeeper,
        ledger: LoadLedger,
        engines: EngineClient,
        upstream: Upstream,
        engine_keys: MutableMapping[InstanceId, str],
        links: FleetLinks,
        registry: CollectorRegistry,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`engine_keys` is kept as the members need it. Raises ConfigError."""
        self._keeper = keeper
        self._ledger = ledger
        self._engines = engines
        self._upstream = upstream
        self._engine_keys = engine_keys
        self._links = links
        self._went_away: set[InstanceId] = set()
        """Were put to sleep, and then not well."""
        self._silent: set[InstanceId] = set()
        self._clock = clock
        self._settings = config.registration
        self._book = None if self._settings is None else RegistrationBook(self._settings)
        self.members: Members[BalancerConfig] = Members(
            config,
            wall_clock=wall_clock,
            store=links.store,
            book=self._book,
            in_flight=self.in_flight,
        )
        self.members.on_change = self._on_members
        self.registration = self._listen()
        registry.register(MembershipCollector(self.members, self.registration))
        listens = config.lmcache_notices
        self.notices = None if listens is None else TransferNotices(listens)
        registry.register(NoticeCollector(self.notices))
        self._admin = FleetAdmin(
            self.members, engines=engines, engine_keys=engine_keys, fleet=keeper.snapshot
        )
        self._fan_out = FanOut(
            fleet=keeper.snapshot,
            engines=engines,
            members=self.members,
            look_at=keeper.look_at,
            on_cache_dropped=links.on_cache_dropped,
            timeout_s=lambda: self.members.present.config.admin.command_timeout_s,
        )

    def in_flight(self, instance: InstanceId) -> int:
        """Legs that run on it now."""
        found = self._keeper.snapshot().by_id(instance)
        ranks = found.rank_ids() if found else ()
        return sum(self._ledger.load(rank).requests for rank in ranks)

    def routes(self, admin: Callable[[], AdminSettings]) -> APIRouter:
        """What operators ask."""
        surface = AdminSurface(
            members=self.members,
            fleet_admin=self._admin,
            fan_out=self._fan_out,
            fleet=self._keeper.snapshot,
            in_flight=self.in_flight,
        )
        return admin_routes(surface, admin)

    def on_fleet(self, fleet: Fleet) -> None:
        """See a new snapshot. Who was put to sleep, went away and is well again is awake.

        Who falls silent is not waited for any more.
        """
        silent = {each.id for each in fleet.instances if each.unhealthy_reason in _SILENT}
        for each in silent - self._silent:
            self._upstream.give_up(each)
        self._silent = silent
        asleep = {each.id for each in fleet.instances if each.hold == Hold.ASLEEP}
        self._went_away &= asleep
        self._went_away |= {each.id for each in fleet.instances if not each.healthy} & asleep
        back = {each.id for each in fleet.instances if each.healthy} & self._went_away
        if back:
            self._went_away -= back
            asyncio.get_running_loop().call_soon(self.members.found_awake, back)

    async def connect_anew(self, moved: Sequence[InstanceId]) -> None:
        """Their names stand for other addresses now: another process, of which nothing is known."""
        for each in moved:
            self._upstream.connect_anew(each)
        for found in self._keeper.snapshot().instances:
            for rank in found.rank_ids() if found.id in moved else ():
                self._ledger.forget(rank)
        await self._engines.connect_anew()
        self._keeper.moved(moved)

    async def run(self) -> None:
        """Keep membership up to date until cancelled. A bug costs a second of it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._going(self.members.run))
            if self.registration is not None:
                group.create_task(self._going(self.registration.run))
            if self.notices is not None:
                group.create_task(self._going(self.notices.run))

    def close(self) -> None:
        """Stop listening. Only after `run` has ended."""
        if self.registration is not None:
            self.registration.close()
        if self.notices is not None:
            self.notices.close()

    def _listen(self) -> RegistrationService | None:
        if self._book is None or self._settings is None:
            return None
        return RegistrationService(
            self._book,
            bind=self._settings.bind,
            port=self._settings.port,
            clock=self._clock,
            on_change=self.members.registrations_changed,
        )

    async def _going(self, run: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await run()
            except Exception:
                _logger.exception("fleet_control_failed")
            await asyncio.sleep(_RESTART_S)

    def _on_members(self, present: Membership[BalancerConfig]) -> None:
        keys = present.config.engine_keys()
        watched = present.watched
        kept = {each.id: self._engine_keys.get(each.id) for each in present.leaving}
        self._engine_keys.clear()  # shared with the clients, so that it changes for all of them
        self._engine_keys.update({each: key for each, key in kept.items() if key is not None})
        self._engine_keys.update(keys)
        self._keeper.set_instances(
            watched, holds=present.holds, registrations=present.registrations
        )
        self._links.on_members(present.config)
