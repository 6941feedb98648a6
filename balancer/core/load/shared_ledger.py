"""`SharedLedger`: the load ledger of several balancer processes that tell each other of their legs.

A `LocalLedger` with every process's legs in it. What happens to our own is counted at once and told in
the next batch; what peers tell is counted by `core.load.peers`.

Rules:

1. Nothing waits for a peer: a decision is made with what is known here, and peers hear of it as soon as
   the event loop turns.
2. What could not be sent is gone. The batch after it shows the gap, and peers ask for a snapshot.
3. A process that hears nothing, or that nobody hears, decides by its own legs, as `LocalLedger` does.
4. `forget` and `empty` aren't told: each process sees a restart or a clear in the index for itself.
5. Who starts later knows the legs in flight, but not what was learned or what ended before.

Cost: beside the ledger's own, one value per change of a leg and its encoding.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import Self, assert_never

from balancer.core.load.ledger import (
    Learning,
    LegGuard,
    LegWork,
    RankLoad,
    RankRates,
    TransferRates,
)
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.load.peer_messages import (
    WIRE_VERSION,
    Ask,
    Batch,
    Change,
    Ended,
    FirstToken,
    HandedOver,
    Left,
    LegOutcome,
    Message,
    OpenLeg,
    PeerMessageError,
    Snapshot,
    booked,
    decode_message,
    encode_message,
)
from balancer.core.load.peers import EventClock, PeerNews, Peers
from indexer.core.types import BlockKey, InstanceId, RankId

MAX_WAITING = 10_000
"""Changes kept for the next batch; if more happen before it is sent, peers have to ask."""


class _SharedLeg:
    """Counts a leg here and tells of it."""

    __slots__ = ("_guard", "_ledger", "cached_tokens", "number", "output_tokens")

    def __init__(self, ledger: "SharedLedger", guard: LegGuard, number: int) -> None:
        self._ledger = ledger
        self._guard = guard
        self.number = number
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard.__exit__(kind, error, traceback)
        self._ledger.ended(self, failed=kind is not None)

    def first_token(self) -> None:
        self._guard.first_token()
        self._ledger.computed(self)

    def handed_over(self, source: RankId) -> None:
        self._guard.handed_over(source)
        self._ledger.handed_over(self, source)

    def generated(self, tokens: int) -> None:
        self._guard.generated(tokens)
        self.output_tokens = tokens

    def cached(self, tokens: int) -> None:
        self._guard.cached(tokens)
        self.cached_tokens = tokens


class SharedLedger:
    """A `LoadLedger`. `me` names this life of this process; no other may ever have it."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        me: str,
        lease_s: float,
        news: PeerNews,
        on_waiting: Callable[[], None] = lambda: None,
        max_predicted_blocks: int = 100_000,
    ) -> None:
        """`on_waiting` is called when there is something to send: soon, `outgoing` should be."""
        self._real_clock = clock
        event_clock = EventClock(clock)
        self._local = LocalLedger(event_clock, max_predicted_blocks=max_predicted_blocks)
        self.peers = Peers(self._local, event_clock, lease_s=lease_s, news=news)
        self.me = me
        self.on_waiting = on_waiting
        self._seq = 0
        self._numbers = 0
        self._open: dict[int, OpenLeg] = {}
        self._changes: list[Change] = []
        self._replies: list[Message] = [Ask(WIRE_VERSION, "")]
        """What else is to be sent, after the changes."""
        self.refused = 0
        """Messages that could not be read."""

    # LoadLedger.

    def load(self, rank: RankId) -> RankLoad:
        """The rank's load now, over all processes."""
        return self._local.load(rank)

    def busy(self, rank: RankId) -> tuple[int, int]:
        """Of what `load` tells its requests and queued tokens, for who needs no more."""
        return self._local.busy(rank)

    def prefill_rates(self, rank: RankId) -> RankRates:
        """How fast the rank computes prompts, as far as any process has learned."""
        return self._local.prefill_rates(rank)

    def predicted_blocks(self, rank: RankId, keys: Sequence[BlockKey], start: int) -> int:
        """How many blocks from `start` on, without a gap, are predicted on `rank`."""
        return self._local.predicted_blocks(rank, keys, start)

    def promised_blocks(
        self, rank: RankId, keys: Sequence[BlockKey], start: int
    ) -> tuple[int, int]:
        """`predicted_blocks`, as of the last `load`; and how many requests in flight use."""
        return self._local.promised_blocks(rank, keys, start)

    def has_guesses(self, rank: RankId) -> bool:
        """Whether anything is guessed to be held by this rank without events."""
        return self._local.has_guesses(rank)

    def transfer(self, source: RankId, target: RankId) -> TransferRates:
        """What a hand-over from `source` to `target` takes."""
        return self._local.transfer(source, target)

    @property
    def knows_prefill(self) -> bool:
        """Whether prefill has been seen often enough for its rate to be more than a prior."""
        return self._local.knows_prefill

    @property
    def learning(self) -> Learning | None:
        """None: prefill and transfer have been seen often enough to compare their times."""
        return self._local.learning

    def hold(self, work: LegWork) -> LegGuard:
        """Book `work` here at once, and tell of it."""
        self._numbers += 1
        told = booked(self._numbers, self._real_clock(), work)
        self._open[told.number] = OpenLeg(told, None, None)
        leg = _SharedLeg(self, self._local.hold(work), told.number)
        self._tell(told)
        return leg

    def forget(self, rank: RankId) -> None:
        """The rank restarted or left; every process sees that for itself."""
        self._local.forget(rank)

    def empty(self, rank: RankId) -> None:
        """The rank's cache was emptied; every process sees that for itself, too."""
        self._local.empty(rank)

    def retain(self, ranks: AbstractSet[RankId]) -> None:
        """These are the fleet: of what peers have elsewhere, too, only legs in flight are counted."""
        self._local.retain(ranks)

    # Of our own legs.

    def computed(self, leg: _SharedLeg) -> None:
        """Its first token is here."""
        known = self._open.get(leg.number)
        if known is None or known.first_s is not None:
            return
        now_s = self._real_clock()
        self._open[leg.number] = OpenLeg(known.booked, now_s, known.handed_over)
        self._tell(FirstToken(leg.number, now_s))

    def handed_over(self, leg: _SharedLeg, source: RankId) -> None:
        """Its transfer may begin."""
        known = self._open.get(leg.number)
        if known is None or known.first_s is not None:
            return
        told = HandedOver(leg.number, self._real_clock(), source.instance, source.rank)
        self._open[leg.number] = OpenLeg(known.booked, known.first_s, told)
        self._tell(told)

    def ended(self, leg: _SharedLeg, *, failed: bool) -> None:
        """It is over."""
        if self._open.pop(leg.number, None) is None:
            return
        now_s = self._real_clock()
        self._tell(Ended(leg.number, now_s, failed, leg.output_tokens, leg.cached_tokens))

    def tell_outcome(self, instance: InstanceId, ok: bool, reason: str | None) -> None:
        """How an instance answered, for the others' breakers."""
        self._tell(LegOutcome(instance, ok, reason))

    # To and from the others.

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to send."""
        return bool(self._changes or self._replies)

    def outgoing(self) -> list[bytes]:
        """What is to be sent now, in this order; each is returned once."""
        messages: list[Message] = []
        if self._changes:
            messages.append(self._batch())
        messages += [
            self._snapshot() if isinstance(each, Snapshot) else each for each in self._replies
        ]
        self._replies.clear()
        return [encode_message(each) for each in messages]

    def beat(self) -> tuple[list[bytes], Sequence[str]]:
        """Everything to be sent, or a sign of life; and who has fallen silent."""
        silent = self.peers.expire(self._real_clock())
        sent = [] if self._changes else [encode_message(self._batch())]
        return [*sent, *self.outgoing()], silent

    def leave(self) -> bytes:
        """The last message."""
        return encode_message(Left(WIRE_VERSION, self.me))

    def on_message(self, payload: bytes) -> None:
        """Somebody has sent this, perhaps we ourselves."""
        try:
            message = decode_message(payload)
        except PeerMessageError:
            self.refused += 1
            return
        now_s = self._real_clock()
        match message:
            case Ask():
                self._on_ask(message.peer)
            case Left():
                self.peers.on_left(message.peer)
            case Batch() | Snapshot() if message.peer == self.me:
                return
            case Batch():
                needed = self.peers.on_batch(message, now_s)
                if needed is not None:
                    self._reply(Ask(WIRE_VERSION, needed))
            case Snapshot():
                self.peers.on_snapshot(message, now_s)
            case never:
                assert_never(never)

    def _on_ask(self, name: str) -> None:
        waits = any(isinstance(each, Snapshot) for each in self._replies)
        if name in {self.me, ""} and not waits:
            self._reply(self._snapshot())

    def _reply(self, message: Message) -> None:
        self._replies.append(message)
        self.on_waiting()

    def _tell(self, change: Change) -> None:
        self._changes.append(change)
        if len(self._changes) > MAX_WAITING:
            self._changes.clear()
            self._seq += 1  # the number that nobody gets
        self.on_waiting()

    def _batch(self) -> Batch:
        self._seq += 1
        changes, self._changes = self._changes, []
        return Batch(WIRE_VERSION, self.me, self._seq, self._real_clock(), changes)

    def _snapshot(self) -> Snapshot:
        legs = list(self._open.values())
        return Snapshot(WIRE_VERSION, self.me, self._seq, self._real_clock(), legs)
