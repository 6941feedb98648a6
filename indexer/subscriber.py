"""Follows one rank: feeds its stream with what happens, and performs the effects in order.

Whatever happens (a live batch, a replayed one, a connection) waits in one bounded inbox, so the
stream sees one thing at a time, after the effects of the last. A replay runs beside it and puts
its answers into the same inbox.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol, assert_never

import structlog

from indexer.config import IndexerConfig, RankSource
from indexer.core.events import batch_ts
from indexer.core.frames import FrameError, NumberedBatch, parse_replay
from indexer.core.interleaving import Interleaving
from indexer.core.journal import Resumption
from indexer.core.rank_status import RankCounts
from indexer.core.rebuild_schedule import RebuildSchedule
from indexer.core.repair_watch import RepairWatch
from indexer.core.replay import StreamLimits
from indexer.core.stream import RankStream
from indexer.core.stream_effects import (
    ApplyBatch,
    BatchOutcome,
    Dropped,
    Effect,
    GapLost,
    GapOpened,
    GapRepaired,
    OpenEpoch,
    ReplayEnded,
    RequestReplay,
    TrustChanged,
)
from indexer.core.types import Trust
from indexer.core.witness import Evidence
from indexer.sockets import ReplaySocket, SocketError, ZmqContext
from indexer.turns import Turns

_logger = structlog.get_logger(__name__)

_INBOX_MESSAGES = 1024
_ANSWERED: Final = frozenset({"answered", "empty", "rolled_over"})
_UNANSWERED: Final = frozenset({"cut", "silent"})
"""How a replay ended, of an endpoint that works and of one that doesn't."""


class StreamSink(Protocol):
    """Where a rank's ordered batches go."""

    async def resume(self) -> Resumption | None:
        """Where to go on; None: with a new epoch."""
        ...

    async def open_epoch(self, reason: str) -> None: ...
    async def apply(self, effect: ApplyBatch) -> BatchOutcome: ...
    async def set_trust(self, trust: Trust, reason: str) -> None: ...
    def on_effect(self, effect: Effect) -> None:
        """See every effect, before it is performed."""
        ...


class RankSubscriber:
    """A `ports.Listener`. `run` ends only by cancellation or a bug."""

    def __init__(
        self,
        source: RankSource,
        *,
        sink: StreamSink,
        config: IndexerConfig,
        context: ZmqContext,
        clock: Callable[[], float],
        counts: RankCounts,
    ) -> None:
        limits = StreamLimits(max_held_batches=config.max_held_batches)
        self.stream = RankStream(
            can_replay=source.replay is not None, ts_of=batch_ts, limits=limits
        )
        self.is_connected = False
        self.on_progress: Callable[[], None] = lambda: None
        """Called when something that happened has been dealt with."""
        self.turns = Turns()
        """Shared with all whose events come on this event loop."""
        self._source = source
        self._sink = sink
        self._config = config
        self._context = context
        self._clock = clock
        self._counts = counts
        self._inbox: asyncio.Queue[Callable[[], list[Effect]]] = asyncio.Queue(_INBOX_MESSAGES)
        self._is_over = False
        self._is_unheard = False
        """Its port has peers, and nobody knows whether the rank is one of them."""
        self._lives = Interleaving()
        self._replay: asyncio.Task[None] | None = None
        self._turn_began_s = clock()
        self._rebuilds = RebuildSchedule(config.rebuild_interval_s, config.replay_timeout_s)
        self._is_probing = False
        self._repair = RepairWatch(self.stream.trust, config.repair_grace_s)

    async def on_live(self, seq: int, payload: bytes) -> None:
        """Wait while the inbox is full: ZMQ queues meanwhile."""
        await self._put(partial(self.stream.on_live, seq, payload))
        if self._is_unheard:
            self._is_unheard, self.is_connected = False, True
            self._counts.connections += 1
            await self._put(self.stream.trust.on_present)

    async def on_connection(self, *, is_up: bool) -> None:
        self.is_connected = is_up
        self._counts.connections += is_up
        stream = self.stream
        await self._put(stream.on_connected if is_up else self._on_disconnected)

    async def on_some_connection(self, *, is_up: bool) -> None:
        """Perhaps its own. A new one is a reason to ask whether anything was missed, no more."""
        if is_up and self.is_connected:
            return
        self.is_connected, self._is_unheard = False, True
        await self._put(self.stream.trust.on_unheard)
        await self._put(self.stream.on_connected if is_up else self._on_disconnected)

    def _on_disconnected(self) -> list[Effect]:
        self._lives.on_connection_lost()
        return self.stream.on_disconnected()

    async def on_cache_dropped(self) -> None:
        """The engine was made to drop its blocks; its own word follows with its next batch."""
        await self._put(lambda: [OpenEpoch("cache_dropped")])

    async def on_evidence(self, evidence: Evidence) -> None:
        """Finished legs have shown something."""
        await self._put(partial(self._weigh_evidence, evidence))

    def _weigh_evidence(self, evidence: Evidence) -> list[Effect]:
        effects = self.stream.trust.on_evidence(evidence)
        if evidence is Evidence.SILENT:
            effects += self.stream.on_silence()
        if evidence is Evidence.CONTRADICTED:
            self._repair.on_contradicted()
        return effects

    def on_rejected(self, reason: str) -> None:
        self._counts.rejected[reason] += 1

    async def run(self) -> None:
        """Deal with what happens until cancelled."""
        try:
            resumed = await self._sink.resume()
            if resumed is None:
                await self._open_epoch("started")
            else:
                self.stream.resume(resumed.seq, resumed.digest, resumed.trust)
            await self._sink.set_trust(self.stream.trust.level, self.stream.trust.reason)
            async with asyncio.TaskGroup() as group:
                while True:
                    happened = await self._next_happening()
                    for effect in happened():
                        await self._perform(effect, group)
                    for effect in self._rebuild_if_due(group):
                        await self._perform(effect, group)
                    await self._watch_repair()
                    self.on_progress()
        finally:
            # A port that others share may be waiting for room in here.
            self._is_over = True
            while not self._inbox.empty():
                self._inbox.get_nowait()

    async def _next_happening(self) -> Callable[[], list[Effect]]:
        """What waits in the inbox; or that it is time for a rebuild, or to call a repair overdue."""
        wait_s = self._wait_s() if self._inbox.empty() else math.inf
        if wait_s == math.inf:
            return await self._inbox.get()
        try:
            async with asyncio.timeout(wait_s):
                return await self._inbox.get()
        except TimeoutError:
            return list

    def _wait_s(self) -> float:
        now_s = self._clock()
        is_wanted = self.stream.wants_rebuild and not self._is_probed
        rebuild_s = self._rebuilds.wait_s(now_s) if is_wanted else math.inf
        return min(rebuild_s, self._repair.wait_s(now_s))

    async def _put(self, happened: Callable[[], list[Effect]]) -> None:
        if not self._is_over:
            await self._inbox.put(happened)

    async def _perform(self, effect: Effect, group: asyncio.TaskGroup) -> None:
        self._sink.on_effect(effect)
        match effect:
            case ApplyBatch():
                await self._apply(effect)
            case RequestReplay():
                if self._replay is not None:
                    self._replay.cancel()
                self._replay = group.create_task(self._run_replay(effect))
            case OpenEpoch(reason=reason):
                await self._open_epoch(reason)
            case TrustChanged():
                await self._set_trust(effect)
            case _:
                self._count(effect)
        await self._yield_turn()

    async def _open_epoch(self, reason: str) -> None:
        self._counts.epochs[reason] += 1
        if reason != "rebuilt":
            self._rebuilds.ease()
        await self._sink.open_epoch(reason)
        # Where we connect nobody else can be at the other end.
        if self._source.direction == "bind" and self._lives.on_epoch(reason):
            await self._change_trust(self.stream.trust.on_interleaved())

    async def _apply(self, effect: ApplyBatch) -> None:
        outcome = await self._sink.apply(effect)
        if outcome.orphans:
            self._rebuilds.hurry()
        await self._change_trust(self.stream.on_applied(effect.seq, outcome))
        if self._lives.on_batch():
            await self._change_trust(self.stream.trust.on_untangled())

    async def _change_trust(self, changes: list[Effect]) -> None:
        for change in changes:
            if isinstance(change, TrustChanged):
                self._sink.on_effect(change)
                await self._set_trust(change)

    async def _set_trust(self, effect: TrustChanged) -> None:
        # What a batch showed while it was applied may have overtaken an effect behind it.
        if effect.trust is self.stream.trust.level:
            await self._sink.set_trust(effect.trust, self.stream.trust.reason)

    def _count(self, effect: Dropped | GapOpened | GapRepaired | GapLost | ReplayEnded) -> None:
        counts = self._counts
        match effect:
            case Dropped(reason=reason):
                counts.rejected[reason] += 1
            case GapOpened():
                counts.gaps["opened"] += 1
            case GapRepaired():
                counts.gaps["repaired"] += 1
            case GapLost(first_seq=first, last_seq=last):
                counts.gaps["lost"] += 1
                counts.lost_batches += last - first + 1
            case ReplayEnded(outcome=outcome):
                counts.replays[outcome] += 1
                if outcome in _ANSWERED | _UNANSWERED:
                    self._rebuilds.heard(is_answered=outcome in _ANSWERED)
            case _:
                assert_never(effect)

    def _rebuild_if_due(self, group: asyncio.TaskGroup) -> list[Effect]:
        """A degraded rank is replayed from its beginning, ever more rarely while it won't help."""
        if self.stream.trust.level is not Trust.DEGRADED:
            self._rebuilds.ease()
            return []
        now_s = self._clock()
        is_wanted = self.stream.wants_rebuild and not self._is_probed
        if not is_wanted or self._rebuilds.wait_s(now_s):
            return []
        self._rebuilds.asked(now_s)
        if self._rebuilds.is_unanswered:
            self._is_probing = True
            group.create_task(self._probe(self.stream.last_seq or 0))
            return []
        return self.stream.on_rebuild_wanted()

    @property
    def _is_probed(self) -> bool:
        return self._is_probing and self._rebuilds.is_unanswered

    async def _watch_repair(self) -> None:
        await self._change_trust(self._repair.look(self.stream.replaying, self._clock()))

    async def _probe(self, from_seq: int) -> None:
        """See whether the replay socket answers, while live batches go on."""

        async def ignore(_: NumberedBatch) -> None: ...

        is_answered = await self._question(from_seq, ignore)
        await self._put(partial(self._on_probed, is_answered=is_answered))

    def _on_probed(self, *, is_answered: bool) -> list[Effect]:
        self._is_probing = False
        if is_answered:  # else another question may have been, since
            self._rebuilds.heard(is_answered=True)
        return []

    async def _yield_turn(self) -> None:
        if self._clock() - self._turn_began_s > self.turns.turn_s:
            await self.turns.pass_on()
            self._turn_began_s = self._clock()

    async def _run_replay(self, asked: RequestReplay) -> None:
        """Ask once; every answer, and how it ended, goes into the inbox."""
        stream, ticket = self.stream, asked.ticket

        async def hand_on(batch: NumberedBatch) -> None:
            await self._put(partial(stream.on_replayed, ticket, batch.seq, batch.payload))

        is_answered = await self._question(asked.from_seq, hand_on)
        ended = stream.on_replay_end if is_answered else stream.on_replay_failed
        await self._put(partial(ended, ticket))

    async def _question(
        self, from_seq: int, on_batch: Callable[[NumberedBatch], Awaitable[None]]
    ) -> bool:
        """Ask the replay socket. Returns whether it answered to the end."""
        endpoint, high_water = self._source.replay, self._config.receive_high_water
        if endpoint is None:
            return False
        try:
            with ReplaySocket(endpoint, high_water=high_water, context=self._context) as socket:
                socket.ask(from_seq)
                while messages := await socket.take_messages(self._config.replay_timeout_s):
                    for frames in messages:
                        try:
                            batch = parse_replay(frames)
                        except FrameError as error:
                            self._counts.rejected[error.reason] += 1
                            continue
                        if batch is None:
                            return True
                        await on_batch(batch)
        except SocketError as error:
            _logger.warning("replay_not_asked", endpoint=endpoint, error=str(error))
        return False
