"""Watches the instances and keeps the fleet snapshot that routing reads.

Each instance is probed by a task of its own, so that a slow one delays nobody. The first probes
start at once. A snapshot is replaced whole whenever something in it changes.

A bug met on the way costs one look at one instance: it is logged, counted, and counts as a failed
probe. Watching goes on.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog

from balancer.core.control_errors import EngineCallError
from balancer.core.errors import HandOverFailedError
from balancer.core.fleet.probe_state import ProbeAnswer, ProbeOutcome, ProbeState, ProbeThresholds
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.fleet.transfer_facts import NO_FACTS, Inquiry, Registration, TransferFacts
from balancer.core.settings.control import InstanceSettings, ProbeSettings
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId

FIRST_INTERVAL_S = 0.25
"""Pause between probes of an instance that has not been healthy yet: it may be starting."""
CACHE_ASKS = 3
"""An engine that doesn't tell its cache's size is asked no more often, until it was down."""
WARM_UP_PROBES_PER_S = 64
"""Of all that are starting together, so that many that never answer cost no more than that."""
WARM_UP_PROBES = 40
"""So many of them, then the usual interval."""

logger = structlog.stdlib.get_logger(__name__)


class Prober(Protocol):
    """Asks one instance how it is."""

    async def probe(self, instance: InstanceId) -> ProbeAnswer:
        """Never raises for what the instance does."""
        ...

    async def learn(self, inquiry: Inquiry) -> TransferFacts:
        """What an instance tells of its side of transfers. Raises EngineCallError."""
        ...

    async def find_ranks(self, instance: InstanceId) -> Sequence[int]:
        """Its global ranks, none if it doesn't say. Raises EngineCallError: ask again."""
        ...

    async def find_cache_tokens(self, instance: InstanceId) -> int | None:
        """What fits its KV caches, None if it doesn't say. Raises EngineCallError."""
        ...


@dataclass(slots=True, kw_only=True)
class _Watched:
    """One instance under watch; the only mutable state here."""

    settings: InstanceSettings
    state: ProbeState = field(default_factory=ProbeState)
    models: ServedModels | None = None
    ranks: tuple[int, ...] = ()
    """As the instance lists them; none if it wasn't asked or doesn't say."""
    knows_ranks: bool = False
    facts: TransferFacts = NO_FACTS
    """Of the life that the last probe met."""
    cache_tokens: int | None = None
    """Over all its ranks."""
    cache_asks_left: int = CACHE_ASKS
    probes: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    started: bool = False
    hold: str | None = None
    registration: Registration | None = None
    _configured: tuple[InstanceSettings, Instance] | None = None
    _seen: tuple[object, ...] = ()
    _instance: Instance | None = None

    def instance(self) -> Instance:
        """As it is believed to be; the same object as long as nothing is different.

        Every probe of any instance asks for all of them.
        """
        state = self.state
        seen = (
            self.settings,
            self.ranks,
            self.models,
            self.facts,
            self.cache_tokens,
            (state.healthy, state.draining, state.reason),
            self.hold,
            self.registration,
        )
        if self._instance is None or seen != self._seen:
            self._seen, self._instance = seen, self._made()
        return self._instance

    def _made(self) -> Instance:
        if self._configured is None or self._configured[0] is not self.settings:
            self._configured = self.settings, self.settings.instance()
        configured = self._configured[1]
        ranks = self.ranks or configured.ranks
        return replace(
            configured,
            ranks=ranks,
            rank_base=self.ranks[0] if self.ranks else configured.rank_base,
            models=self.models,
            facts=replace(self.facts, registration=self.registration),
            rank_cache_tokens=self.cache_tokens and self.cache_tokens // len(ranks),
            healthy=self.state.healthy,
            draining=self.state.draining,
            unhealthy_reason=self.state.reason,
            hold=self.hold,
        )


class FleetKeeper:
    """Owner of the fleet snapshot. Lives on one event loop."""

    def __init__(
        self,
        instances: Iterable[InstanceSettings],
        *,
        prober: Prober,
        settings: ProbeSettings,
        inquiry: Callable[[Instance], Inquiry | None] = lambda _: None,
        on_change: Callable[[Fleet], None] | None = None,
    ) -> None:
        """`inquiry` says what has to be asked of an instance before it can take part in transfers.

        `on_change` is called with each new snapshot, on the loop; it must not block.
        """
        self._prober = prober
        self._settings = settings
        self._thresholds = ProbeThresholds(
            unhealthy_after=settings.unhealthy_after, healthy_after=settings.healthy_after
        )
        self._inquiry = inquiry
        self._on_change = on_change
        self._watched = {each.id: _Watched(settings=each) for each in instances}
        self._fleet = self._build()
        self._changed = asyncio.Event()
        self._members_changed = asyncio.Event()
        self.bugs = 0
        """Bugs met while watching. Each one is in the log."""

    def snapshot(self) -> Fleet:
        """Return the fleet as it is believed to be now."""
        return self._fleet

    async def run(self) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._members_changed.clear()
                for each in self._watched.values():
                    if not each.started:
                        each.started = True
                        group.create_task(self._watch(each))
                await self._members_changed.wait()

    async def first_round(self) -> None:
        """Return once every instance has been probed at least once. Needs `run`."""
        await self.wait_for(lambda _: all(each.probes for each in self._watched.values()))

    async def wait_for(self, condition: Callable[[Fleet], bool]) -> Fleet:
        """Return the first snapshot for which `condition` holds."""
        while not condition(self._fleet):
            self._changed.clear()
            await self._changed.wait()
        return self._fleet

    def report(self, instance: InstanceId, ok: bool, reason: str | None) -> bool:
        """A leg ended: `reason` is the code of the error that ended it. Cheap if it went well.

        True if that changes what is believed of the instance: then other processes want to know.
        """
        watched = self._watched.get(instance)
        if watched is None or ok:
            return False
        if reason == HandOverFailedError.code:
            watched.wake.set()  # it may have restarted: ask who it is
            return False
        state = watched.state.after_leg(ok, reason)
        if state is watched.state:
            return False
        lost = watched.state.healthy and not state.healthy
        self._settle(watched, state, watched.models)
        if lost:
            watched.wake.set()  # look at once: it may be back already
        return True

    def set_instances(
        self,
        instances: Iterable[InstanceSettings],
        *,
        holds: Mapping[InstanceId, str] | None = None,
        registrations: Mapping[InstanceId, Registration] | None = None,
    ) -> None:
        """Replace the fleet's members. Those that stay keep what is known of them.

        Other settings don't make an instance another one, so it goes on getting requests; they
        are looked at with the next probe, which begins at once. `holds` says who gets no requests,
        and why.
        """
        before, self._watched = self._watched, {}
        for settings in instances:
            watched = before.get(settings.id)
            if watched is None or not _same_ranks(watched.settings, settings):
                watched = _Watched(settings=settings)
            elif watched.settings != settings:
                watched.settings = settings
                watched.wake.set()
            watched.hold = (holds or {}).get(settings.id)
            watched.registration = (registrations or {}).get(settings.id)
            self._watched[settings.id] = watched
        for instance, watched in before.items():
            if self._watched.get(instance) is not watched:
                watched.wake.set()  # its task ends
        self._publish()
        self._members_changed.set()

    def moved(self, instances: Iterable[InstanceId]) -> None:
        """Another process answers for these now: learn their ranks anew, at once."""
        for instance in instances:
            if watched := self._watched.get(instance):
                watched.knows_ranks = False
                watched.wake.set()

    def look_at(self, instances: Iterable[InstanceId]) -> None:
        """Probe these at once."""
        for instance in instances:
            if watched := self._watched.get(instance):
                watched.wake.set()

    async def _watch(self, watched: _Watched) -> None:
        """Probe one instance until it is removed."""
        while self._is_member(watched):
            watched.wake.clear()
            try:
                answer = await self._look(watched)
            except Exception as error:  # noqa: BLE001 - the outermost of this task: it must go on
                self._note_bug(error, watched.settings.name)
                answer = ProbeAnswer(outcome=ProbeOutcome.FAILED, reason="probe_bug")
            if not self._is_member(watched):
                return
            state = watched.state.after_probe(answer.outcome, answer.reason, self._thresholds)
            watched.probes += 1
            self._settle(watched, state, _newer(watched.models, answer.models))
            if answer.outcome is ProbeOutcome.OK and watched.cache_asks_left:
                await self._find_cache_tokens(watched)
            try:
                async with asyncio.timeout(self._pause_s(watched)):
                    await watched.wake.wait()
            except TimeoutError:
                continue

    def _is_member(self, watched: _Watched) -> bool:
        """False once it was removed, or replaced under the same address."""
        return self._watched.get(watched.settings.id) is watched

    async def _look(self, watched: _Watched) -> ProbeAnswer:
        """Probe, and learn the ranks of an instance that was not well before."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                answer = await self._prober.probe(watched.settings.id)
                if answer.outcome is ProbeOutcome.OK and not watched.knows_ranks:
                    await self._find_ranks(watched)
                if answer.outcome is ProbeOutcome.OK:
                    await self._learn(watched)
                return answer
        except TimeoutError:
            return ProbeAnswer(outcome=ProbeOutcome.FAILED, reason="probe_timeout")
        except EngineCallError as error:
            return ProbeAnswer(outcome=ProbeOutcome.FAILED, reason=error.reason)

    async def _learn(self, watched: _Watched) -> None:
        """Ask anew with every probe: after a restart everything is another. Raises EngineCallError.

        An instance that can't be asked can't hand over, so it counts as failed.
        """
        inquiry = self._inquiry(watched.instance())
        try:
            watched.facts = NO_FACTS if inquiry is None else await self._prober.learn(inquiry)
        except EngineCallError:
            watched.facts = NO_FACTS
            raise

    async def _find_ranks(self, watched: _Watched) -> None:
        """Before it is available: a request must not go to a rank by chance."""
        if watched.settings.ranks is None:
            try:
                watched.ranks = tuple(await self._prober.find_ranks(watched.settings.id))
            except EngineCallError as error:
                reason = error.reason
                logger.info("ranks_unknown", instance=watched.settings.name, reason=reason)
                return  # the next probe asks again
        watched.knows_ranks = True

    async def _find_cache_tokens(self, watched: _Watched) -> None:
        """Nice to know: whatever happens says nothing about its health."""
        watched.cache_asks_left -= 1
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                tokens = await self._prober.find_cache_tokens(watched.settings.id)
        except (EngineCallError, TimeoutError):
            return
        except Exception as error:  # noqa: BLE001 - as above: it must go on
            self._note_bug(error, watched.settings.name)
            return
        watched.cache_tokens, watched.cache_asks_left = tokens, 0
        self._publish()

    def _note_bug(self, error: Exception, instance: str | None) -> None:
        self.bugs += 1
        logger.error("fleet_bug", instance=instance, error=repr(error), exc_info=error)

    def _pause_s(self, watched: _Watched) -> float:
        usual = self._settings.interval_s
        if not _is_starting(watched):
            return usual
        starting = sum(map(_is_starting, self._watched.values()))
        return min(max(FIRST_INTERVAL_S, starting / WARM_UP_PROBES_PER_S), usual)

    def _settle(self, watched: _Watched, state: ProbeState, models: ServedModels | None) -> None:
        before = watched.state
        watched.state, watched.models = state, models
        if before.healthy and not state.healthy:
            watched.knows_ranks = False  # who comes back may be another process
            watched.cache_asks_left = CACHE_ASKS
        if (before.healthy, before.draining, before.reason) != (
            state.healthy,
            state.draining,
            state.reason,
        ):
            logger.info(
                "instance_changed",
                instance=watched.settings.name,
                healthy=state.healthy,
                draining=state.draining,
                reason=state.reason,
            )
        self._publish()

    def _publish(self) -> None:
        fleet = self._build()
        self._changed.set()
        if fleet == self._fleet:
            return
        self._fleet = fleet
        if self._on_change is None:
            return
        try:
            self._on_change(fleet)
        except Exception as error:  # noqa: BLE001 - a listener's bug is not a leg's or a probe's
            self._note_bug(error, None)

    def _build(self) -> Fleet:
        return Fleet(instances=tuple(each.instance() for each in self._watched.values()))


def _is_starting(watched: _Watched) -> bool:
    return not watched.state.ever_healthy and watched.probes < WARM_UP_PROBES


def _same_ranks(before: InstanceSettings, now: InstanceSettings) -> bool:
    return (before.ranks, before.rank_base) == (now.ranks, now.rank_base)


def _newer(known: ServedModels | None, seen: ServedModels | None) -> ServedModels | None:
    """Models of an instance after a probe.

    What it served when last seen stays known: it tells "all its instances are down" from
    "unknown model". An answer that says nothing new changes nothing (cards hold the call's time).
    """
    if seen is None or (known is not None and _lasting(known) == _lasting(seen)):
        return known
    return seen


def _lasting(models: ServedModels) -> list[dict[str, Any]]:
    volatile = {"created", "permission"}
    return [
        {name: value for name, value in card.items() if name not in volatile}
        for card in models.cards
    ]
