"""Follows one rank's stream without an index, for whoever wants to see it: `kvlb events`.

The same subscriber and the same core as the indexer's, so what is shown is what is applied. Only
what it takes an index to see (orphans, contradictions) is not weighed.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from indexer.config import IndexerConfig, RankSource
from indexer.core.events import EventBatch, UndecodableBatchError, decode_batch
from indexer.core.journal import Resumption
from indexer.core.rank_status import RankCounts
from indexer.core.refusals import has_clear, has_lost_events
from indexer.core.stream_effects import ApplyBatch, BatchOutcome, Effect
from indexer.core.types import Trust
from indexer.ports import Ports
from indexer.subscriber import RankSubscriber


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedBatch:
    """One batch, in its place."""

    seq: int
    replayed: bool
    """It waited for a replay or came by one."""
    batch: EventBatch | None
    """None: it could not be decoded."""


FollowedItem = FollowedBatch | Effect
"""Every effect but `ApplyBatch`, which shows as a `FollowedBatch`."""


class _Tap:
    """A `subscriber.StreamSink` that hands everything on."""

    def __init__(self, on_item: Callable[[FollowedItem], None]) -> None:
        self._on_item = on_item

    async def resume(self) -> Resumption | None:
        """Nothing is kept."""
        return None

    async def open_epoch(self, reason: str) -> None:
        """Seen as an effect; the first epoch opens without one."""

    async def apply(self, effect: ApplyBatch) -> BatchOutcome:
        try:
            batch = decode_batch(effect.payload)
        except UndecodableBatchError:
            batch = None
        self._on_item(FollowedBatch(seq=effect.seq, replayed=effect.replayed, batch=batch))
        if batch is None:
            return BatchOutcome(has_refusals=True)
        return BatchOutcome(
            is_cleared=has_clear(batch.events), has_refusals=has_lost_events(batch.rejected)
        )

    async def set_trust(self, trust: Trust, reason: str) -> None:
        """Seen as an effect."""

    def on_effect(self, effect: Effect) -> None:
        if not isinstance(effect, ApplyBatch):
            self._on_item(effect)


class _Announced:
    """A `ports.Listener` that tells of connections before the subscriber deals with them."""

    def __init__(self, listener: RankSubscriber, on_connection: Callable[[bool], None]) -> None:
        self._listener = listener
        self._on_connection = on_connection
        self.on_live = listener.on_live
        self.on_rejected = listener.on_rejected
        self.on_some_connection = listener.on_some_connection  # not where one rank is followed

    async def on_connection(self, *, is_up: bool) -> None:
        self._on_connection(is_up)
        await self._listener.on_connection(is_up=is_up)


async def follow(
    source: RankSource,
    on_item: Callable[[FollowedItem], None],
    *,
    config: IndexerConfig,
    on_connection: Callable[[bool], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Hand everything `source` publishes to `on_item`, in order, until cancelled.

    It begins with what the engine can still replay. What `on_item` raises ends it, in a group.
    `on_connection` hears whether there is a publisher, whenever that changes.
    """
    with zmq.Context() as context:
        subscriber = RankSubscriber(
            source,
            sink=_Tap(on_item),
            config=config,
            context=context,
            clock=clock,
            counts=RankCounts(),
        )
        async with asyncio.TaskGroup() as group:
            ports = Ports(config=config, context=context, clock=clock, group=group)
            async with ports.listening(source, _Announced(subscriber, on_connection)):
                await subscriber.run()
