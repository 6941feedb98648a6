"""What other balancer processes have in flight, counted in this process's own ledger.

Each peer's legs are booked here as our own are, from what it told: so loads, predicted blocks, blocks
in use and learned rates are those of all processes together, and no formula knows of peers.

Rules:

1. A peer counts as long as it is heard: after `lease_s` of silence, or once it says that it leaves,
   its legs end as failed ones do. So a killed process leaves no load behind.
2. Batches of a peer are taken in order. After a gap, or of a peer that was running before we knew it,
   nothing is taken until a snapshot has told all of its legs; it is asked for at most every `ASK_S`.
3. Two processes may book one prompt before they hear of each other. The engine computes it once: so of
   a peer's leg only those tokens count as uncached that no other leg has promised to its rank.
4. Moments are shifted by the time between the sender's clock and ours at receipt: a message on its way
   makes everything in it look as much younger, never older. What lies further back than `MAX_AGE_S`
   counts as so old.
5. What makes no sense (an unknown number, a leg that began before the snapshot) changes nothing.

Cost: that of a leg of our own, for each leg of every peer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from msgspec.structs import replace

from balancer.core.load.ledger import LegGuard, LegWork, LoadLedger
from balancer.core.load.peer_messages import (
    Batch,
    Booked,
    Change,
    Ended,
    FirstToken,
    HandedOver,
    LegOutcome,
    OpenLeg,
    PeerMessageError,
    Snapshot,
    booked_work,
)
from indexer.core.types import InstanceId, RankId

ASK_S = 0.1
MAX_AGE_S = 600.0
MAX_PEERS = 256
"""More are not counted: whoever can write to the channel must not fill our memory."""


class PeerGoneError(Exception):
    """Ends the legs of a peer that isn't there any more. Nobody catches it."""


class EventClock:
    """The process's clock; while something of the past is counted, that moment."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at_s: float | None = None

    def __call__(self) -> float:
        return self._clock() if self._at_s is None else self._at_s

    def at(self, moment_s: float, act: Callable[[], None]) -> None:
        """Have `act` happen at that moment."""
        now_s = self._clock()
        self._at_s = min(now_s, max(moment_s, now_s - MAX_AGE_S))
        try:
            act()
        finally:
            self._at_s = None


class PeerNews(Protocol):
    """Who is told what peers did, beside the ledger."""

    def on_booked(self, rank: RankId) -> None: ...
    def on_outcome(self, instance: InstanceId, ok: bool, reason: str | None) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Peer:
    heard_s: float
    seq: int = 0
    is_known: bool = False
    """False: something was missed, and its snapshot isn't here yet."""
    asked_s: float | None = None
    legs: dict[int, LegGuard] = field(default_factory=dict)


class Peers:
    """All other processes. Counts into `ledger`, whose clock is `clock`."""

    def __init__(
        self, ledger: LoadLedger, clock: EventClock, *, lease_s: float, news: PeerNews
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._lease_s = lease_s
        self._news = news
        self._peers: dict[str, _Peer] = {}
        self.gaps = 0
        """How often something of a peer was missed."""
        self.expired = 0
        """Peers that fell silent with legs in flight, or without."""

    @property
    def count(self) -> int:
        """Peers that are heard now."""
        return len(self._peers)

    @property
    def legs(self) -> int:
        """Their legs in flight, as far as they told."""
        return sum(len(each.legs) for each in self._peers.values())

    def on_batch(self, batch: Batch, now_s: float) -> str | None:
        """Take in what a peer told; return whose snapshot is needed."""
        peer = self._heard(batch.peer, now_s)
        if peer is None or (peer.is_known and batch.seq <= peer.seq):
            return None
        if not peer.is_known and not peer.seq and batch.seq == 1:
            peer.is_known = True  # it has just begun: there was nothing to miss
        elif peer.is_known and batch.seq != peer.seq + 1:
            peer.is_known = False
            self.gaps += 1
        if not peer.is_known:
            return self._asking(batch.peer, peer, now_s)
        peer.seq = batch.seq
        for change in batch.changes:
            self._apply(peer, change, now_s - batch.sent_s)
        return None

    def on_snapshot(self, told: Snapshot, now_s: float) -> None:
        """Replace what is known of a peer, if something of it was missed."""
        peer = self._heard(told.peer, now_s)
        if peer is None or peer.is_known:
            return
        self._drop_legs(peer)
        peer.is_known, peer.seq, peer.asked_s = True, told.seq, None
        for leg in told.legs:
            for change in _changes_of(leg):
                self._apply(peer, change, now_s - told.sent_s)

    def on_left(self, name: str) -> None:
        """It has ended, or whoever saw it end says so."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._drop_legs(peer)

    def expire(self, now_s: float) -> Sequence[str]:
        """End the legs of those that have been silent for their lease; return who they were."""
        silent = [
            name for name, peer in self._peers.items() if now_s - peer.heard_s > self._lease_s
        ]
        for name in silent:
            self.expired += 1
            self.on_left(name)
        return silent

    def _heard(self, name: str, now_s: float) -> _Peer | None:
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                return None
            peer = self._peers[name] = _Peer(heard_s=now_s)
        peer.heard_s = now_s
        return peer

    def _asking(self, name: str, peer: _Peer, now_s: float) -> str | None:
        if peer.asked_s is not None and now_s - peer.asked_s < ASK_S:
            return None
        peer.asked_s = now_s
        return name

    def _drop_legs(self, peer: _Peer) -> None:
        gone = PeerGoneError()
        for guard in peer.legs.values():
            guard.__exit__(PeerGoneError, gone, None)
        peer.legs.clear()

    def _apply(self, peer: _Peer, change: Change, offset_s: float) -> None:
        match change:
            case Booked():
                self._book(peer, change, offset_s)
            case FirstToken():
                self._tell(peer, change, offset_s, lambda guard: guard.first_token())
            case HandedOver():
                source = RankId(InstanceId(change.instance), change.rank)
                self._tell(peer, change, offset_s, lambda guard: guard.handed_over(source))
            case Ended():
                self._tell(peer, change, offset_s, lambda guard: _end(guard, change))
                peer.legs.pop(change.number, None)
            case LegOutcome():
                self._news.on_outcome(InstanceId(change.instance), change.ok, change.reason)
            case never:
                assert_never(never)

    def _book(self, peer: _Peer, told: Booked, offset_s: float) -> None:
        if told.number in peer.legs:
            return
        try:
            work = self._without_repeated(booked_work(told))
        except PeerMessageError:
            return

        def hold() -> None:
            peer.legs[told.number] = self._ledger.hold(work)

        self._clock.at(told.at_s + offset_s, hold)
        self._news.on_booked(work.rank)

    def _without_repeated(self, work: LegWork) -> LegWork:
        """Rule 3."""
        if work.kind == "decode" or not work.block_size:
            return work
        promised_blocks = self._ledger.predicted_blocks(work.rank, work.keys, 0)
        lacking_tokens = max(0, work.prompt_tokens - promised_blocks * work.block_size)
        if lacking_tokens >= work.uncached_tokens:
            return work
        share = lacking_tokens / work.uncached_tokens
        return replace(work, uncached_tokens=lacking_tokens, work_s=work.work_s * share)

    def _tell(
        self,
        peer: _Peer,
        change: FirstToken | HandedOver | Ended,
        offset_s: float,
        tell: Callable[[LegGuard], None],
    ) -> None:
        guard = peer.legs.get(change.number)
        if guard is not None:
            self._clock.at(change.at_s + offset_s, lambda: tell(guard))


def _changes_of(leg: OpenLeg) -> Iterable[Change]:
    yield leg.booked
    if leg.handed_over is not None:
        yield leg.handed_over
    if leg.first_s is not None:
        yield FirstToken(leg.booked.number, leg.first_s)


def _end(guard: LegGuard, told: Ended) -> None:
    if told.output_tokens is not None:
        guard.generated(told.output_tokens)
    if told.cached_tokens is not None:
        guard.cached(told.cached_tokens)
    failed = PeerGoneError() if told.failed else None
    guard.__exit__(type(failed) if failed else None, failed, None)
