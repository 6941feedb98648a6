"""Puts one rank's recorded messages in order, by the stream core of the indexer, and times them.

Rules:

1. Order, duplicates, restarts and gaps are the indexer's business (`indexer.core.stream`); it asks
   for a replay, and recorded replays answer.
2. A batch is known from the moment the engine stamped it, if it arrived within `GRACE_S` of
   that; later ones only from their arrival. A busy recorder is not a blind one.
3. A batch that follows a loss says so: what came between it and the one before isn't known.
4. An engine's clock may differ from the recorder's: if the fastest message seems to have travelled
   for more than half a second, or backwards, all of its stamps are moved by that much.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from indexer.core.events import EventBatch, UndecodableBatchError, batch_ts, decode_batch
from indexer.core.replay import StreamLimits
from indexer.core.stream import RankStream
from indexer.core.stream_effects import (
    ApplyBatch,
    Dropped,
    Effect,
    GapLost,
    OpenEpoch,
    RequestReplay,
)
from kvlb.audit.capture import Message

GRACE_S = 2.0
CLOCK_TOLERANCE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBatch:
    """One batch in its place."""

    epoch: int
    seq: int
    stamped_s: float
    """When the engine published it, by the recorder's clock."""
    known_s: float
    """From when on a prediction may use it."""
    batch: EventBatch
    follows_loss: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Everything one rank published, in order."""

    batches: Sequence[TimedBatch]
    counts: Counter[str]
    """Batches that only a replay had, and what was not applied, by reason."""


def order_messages(messages: Sequence[Message], replayed: Sequence[Message]) -> RankRecord:
    """Order one rank's messages; holes are filled from `replayed` where it has them."""
    recorder = _Recorder(messages, replayed)
    for message in messages:
        recorder.on_message(message)
    return RankRecord(batches=recorder.batches, counts=recorder.counts)


class _Recorder:
    def __init__(self, messages: Sequence[Message], replayed: Sequence[Message]) -> None:
        self.batches: list[TimedBatch] = []
        self.counts: Counter[str] = Counter()
        self._epoch = 1
        self._follows_loss = False
        self._live = {(message.seq, message.payload) for message in messages}
        self._life_began_s = float("-inf")
        self._replayed = sorted(replayed, key=lambda message: message.seq)
        self._clock_ahead_s = _clock_offset_s(messages)
        self._stream = RankStream(can_replay=bool(replayed), ts_of=batch_ts, limits=StreamLimits())

    def on_message(self, message: Message) -> None:
        effects = self._stream.on_live(message.seq, message.payload)
        while effects:
            asked = [effect for effect in effects if isinstance(effect, RequestReplay)]
            self._perform(effects, message.arrived_s)
            effects = self._answer(asked[-1], message) if asked else []

    def _perform(self, effects: Sequence[Effect], arrived_s: float) -> None:
        for effect in effects:
            match effect:
                case ApplyBatch():
                    self._apply(effect, arrived_s)
                case OpenEpoch():
                    self._epoch += 1
                    self._life_began_s = self.batches[-1].stamped_s if self.batches else 0.0
                case Dropped():
                    self.counts[f"dropped_{effect.reason}"] += 1
                case GapLost():
                    self._follows_loss = True
                    self.counts["lost"] += effect.last_seq - effect.first_seq + 1
                case _:
                    pass

    def _apply(self, effect: ApplyBatch, arrived_s: float) -> None:
        try:
            batch = decode_batch(effect.payload)
        except UndecodableBatchError:
            self.counts["undecodable_batches"] += 1
            return
        for reason in batch.rejected:
            self.counts[f"rejected_{reason}"] += 1
        stamped_s = batch.ts + self._clock_ahead_s
        known_s = stamped_s if arrived_s - stamped_s <= GRACE_S else arrived_s
        if (effect.seq, effect.payload) not in self._live:
            self.counts["replayed"] += 1
        if self.batches:
            known_s = max(known_s, self.batches[-1].known_s)
        timed = TimedBatch(
            epoch=self._epoch,
            seq=effect.seq,
            stamped_s=stamped_s,
            known_s=known_s,
            batch=batch,
            follows_loss=self._follows_loss,
        )
        self._follows_loss = False
        self.batches.append(timed)

    def _answer(self, asked: RequestReplay, message: Message) -> list[Effect]:
        effects: list[Effect] = []
        answers = list(self._known_before(message, asked.from_seq))
        for answer in answers:
            effects += self._stream.on_replayed(asked.ticket, answer.seq, answer.payload)
        # A recording that lacks the numbers is no proof that the engine did.
        end = self._stream.on_replay_end if answers else self._stream.on_replay_failed
        return effects + end(asked.ticket)

    def _known_before(self, message: Message, from_seq: int) -> Iterator[Message]:
        newest_ts = batch_ts(message.payload) or 0.0
        for replayed in self._replayed:
            ts = batch_ts(replayed.payload)
            if ts is None or replayed.seq < from_seq:
                continue
            if self._life_began_s < ts + self._clock_ahead_s and ts <= newest_ts:
                yield replayed


def _clock_offset_s(messages: Sequence[Message]) -> float:
    """How much to add to the engine's stamps to read them on the recorder's clock."""
    stamps = ((message.arrived_s, batch_ts(message.payload)) for message in messages)
    told = ((arrived, ts) for arrived, ts in stamps if ts is not None and ts >= 0)
    travelled = min((arrived - ts for arrived, ts in told), default=0.0)
    return travelled if travelled < 0 or travelled > CLOCK_TOLERANCE_S else 0.0
