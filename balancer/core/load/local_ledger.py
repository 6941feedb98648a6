"""`LocalLedger`: the load ledger of one balancer process.

Rules:

1. A leg is queued from its booking to its first token, decoding from there to its end; `decode`
   legs wait for a transfer, so they never count as queued prefill.
2. The first token of an answer that isn't streamed can't be seen: such a leg counts as decoding
   once its expected time has passed, and teaches nothing about rates.
3. A leg that ends with an exception withdraws its prediction. Otherwise its keys count as held
   until `believed_s` after its first token, or until `believed_tokens` new ones were sent there. A `decode` leg's keys count only from its first token
   on: before the transfer is done, a sibling sent there would compute them again.
4. On a rank without events the keys of a leg that ended well go into `core.load.approximate`, which is
   asked beside the predictions. The cached tokens reported correct it first. When events come at
   last it is dropped.
5. Arrivals and work per second are exponential means over 20 s, corrected for a young rank. Recent
   work is a sum that fades over ten minutes; a leg enters it with its first token, since before
   that it counts as queued.
6. `forget` voids predictions and learned rates; legs in flight stay counted until they end.
7. Blocks of a prompt are in use from its booking to its end: a rank keeps room for what was
   promised to it. Outputs are guessed by the pace, since tokens aren't counted as they pass.

Cost: O(1) per leg plus its keys; `load` is O(legs due since the last call).
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import exp
from types import TracebackType
from typing import Self

from balancer.core.load.active_blocks import ActiveBlocks
from balancer.core.load.approximate import ApproximateBlocks
from balancer.core.load.fading import FadingSum
from balancer.core.load.learned import LearnedRates
from balancer.core.load.ledger import LegWork, RankLoad, TransferRates
from balancer.core.load.predictions import Prediction, RankPredictions
from balancer.core.load.transfers import LearnedTransfers
from indexer.core.types import BlockKey, RankId

RATE_TAU_S = 20.0
RECENT_TAU_S = 600.0
MIN_AGE_S = 1.0
"""A rank younger than this has seen too little for a rate."""


class _RankBook:
    """Everything counted for one rank."""

    __slots__ = (
        "active",
        "approximate",
        "arrivals",
        "counted_s",
        "decoding",
        "due",
        "first_s_sum",
        "last_first_s",
        "predictions",
        "queue",
        "queued_tokens",
        "recent",
        "requests",
        "since_s",
        "work_s",
    )

    def __init__(self, now_s: float, max_predicted_blocks: int) -> None:
        self.since_s = now_s
        self.requests = 0
        self.decoding = 0
        self.queued_tokens = 0
        self.queue: dict[int, _Leg] = {}
        """Legs without a first token, oldest first; `decode` legs aren't among them."""
        self.due: list[tuple[float, int]] = []
        """When queued legs whose first token can't be seen are expected to be computed."""
        self.last_first_s = now_s
        self.counted_s = now_s
        self.arrivals = 0.0
        self.work_s = 0.0
        """Both as they stood at `counted_s`."""
        self.recent = FadingSum(RECENT_TAU_S, now_s)
        self.predictions = RankPredictions(max_predicted_blocks)
        self.approximate = ApproximateBlocks(max_predicted_blocks)
        self.active = ActiveBlocks()
        self.first_s_sum = 0.0
        """Moments of the first tokens of legs that decode, added up."""

    def decoded_s(self, now_s: float) -> float:
        """Seconds since their first tokens, over the legs that decode."""
        return max(0.0, self.decoding * now_s - self.first_s_sum)

    def count_arrival(self, now_s: float, work_s: float) -> None:
        fade = exp((self.counted_s - now_s) / RATE_TAU_S)
        self.arrivals = self.arrivals * fade + 1
        self.work_s = self.work_s * fade + work_s
        self.counted_s = now_s

    def rates(self, now_s: float) -> tuple[float, float]:
        """Arrivals and work seconds per second.

        A young rank's sums stand for less time than tau.
        """
        age_s = max(MIN_AGE_S, now_s - self.since_s)
        warm_s = RATE_TAU_S * (1 - exp(-age_s / RATE_TAU_S))
        per_s = exp((self.counted_s - now_s) / RATE_TAU_S) / warm_s
        return self.arrivals * per_s, self.work_s * per_s


class _Leg:
    """A booked leg: the guard that the caller holds."""

    __slots__ = (
        "_ledger",
        "book",
        "booked_s",
        "cached_tokens",
        "ended",
        "first_s",
        "handed_over_s",
        "number",
        "others",
        "output_tokens",
        "prediction",
        "source",
        "work",
    )

    def __init__(
        self, ledger: "LocalLedger", book: _RankBook, work: LegWork, number: int, now_s: float
    ) -> None:
        self._ledger = ledger
        self.book = book
        self.work = work
        self.number = number
        self.booked_s = now_s
        self.first_s: float | None = None
        self.handed_over_s: float | None = None
        self.source: RankId | None = None
        self.others = 0
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.prediction: Prediction | None = None
        self.ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ledger.end(self, failed=kind is not None)

    def first_token(self) -> None:
        self._ledger.start_decoding(self)

    def handed_over(self, source: RankId) -> None:
        self._ledger.start_transfer(self, source)

    def generated(self, tokens: int) -> None:
        self.output_tokens = tokens

    def cached(self, tokens: int) -> None:
        self.cached_tokens = tokens


class LocalLedger:
    """A `LoadLedger` in memory. `clock` is monotonic seconds."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        learned: LearnedRates | None = None,
        transfers: LearnedTransfers | None = None,
        max_predicted_blocks: int = 100_000,
    ) -> None:
        self._clock = clock
        self._learned = learned or LearnedRates()
        self._transfers = transfers or LearnedTransfers()
        self._max_predicted_blocks = max_predicted_blocks
        self._books: dict[RankId, _RankBook] = {}
        self._numbers = count()

    def load(self, rank: RankId) -> RankLoad:
        """The rank's load now; an unknown rank is idle."""
        rates = self._learned.rates(rank)
        book = self._books.get(rank)
        if book is None:
            return RankLoad(rates=rates)
        now_s = self._clock()
        self._settle_due(book, now_s)
        head = next(iter(book.queue.values()), None)
        arrivals_per_s, work_share = book.rates(now_s)
        return RankLoad(
            requests=book.requests,
            queued_tokens=book.queued_tokens,
            decoding=book.decoding,
            oldest_queued_s=head.booked_s if head else None,
            head_tokens=head.work.uncached_tokens if head else 0,
            head_progress_s=now_s - max(head.booked_s, book.last_first_s) if head else 0.0,
            arrivals_per_s=arrivals_per_s,
            work_share=work_share,
            recent_work_s=book.recent.at(now_s),
            active_blocks=book.active.blocks,
            output_tokens=book.decoded_s(now_s)
            / (rates.step_s + rates.step_s_per_request * book.requests),
            rates=rates,
        )

    def predicted_blocks(self, rank: RankId, keys: Sequence[BlockKey], start: int) -> int:
        """How many blocks from `start` on, without a gap, are predicted on `rank`."""
        book = self._books.get(rank)
        if book is None:
            return 0
        blocks = 0
        if book.predictions.blocks:
            book.predictions.purge(self._clock())
            blocks = book.predictions.run_blocks(keys, start)
        if book.approximate:
            blocks = max(blocks, book.approximate.run_blocks(keys, start))
        return blocks

    def has_guesses(self, rank: RankId) -> bool:
        """Whether anything is guessed to be held by this rank without events."""
        book = self._books.get(rank)
        return book is not None and len(book.approximate) > 0

    def active_blocks(self, rank: RankId, keys: Sequence[BlockKey]) -> int:
        """How many of the first `keys`, without a gap, requests in flight on `rank` use."""
        book = self._books.get(rank)
        return book.active.run_blocks(keys) if book else 0

    def transfer(self, source: RankId, target: RankId) -> TransferRates:
        """What a hand-over from `source` to `target` takes."""
        return self._transfers.rates(source, target, self._clock())

    @property
    def knows_prefill(self) -> bool:
        """Whether prefill has been seen often enough for its rate to be more than a prior."""
        return self._learned.knows_prefill

    @property
    def knows_rates(self) -> bool:
        """Whether prefill and transfer have been seen often enough to compare their times."""
        return self._learned.knows_prefill and self._transfers.are_known

    def hold(self, work: LegWork) -> _Leg:
        """Book `work` at once; the guard counts it until it ends."""
        now_s = self._clock()
        self._learned.settle(work.rank, now_s)
        book = self._books.get(work.rank)
        if book is None:
            book = self._books[work.rank] = _RankBook(now_s, self._max_predicted_blocks)
        book.predictions.purge(now_s)
        if work.remembered_s:
            book.approximate.purge(now_s - work.remembered_s)
        elif work.keys:  # a leg without says nothing of events
            book.approximate.clear()
        leg = _Leg(self, book, work, next(self._numbers), now_s)
        book.requests += 1
        book.active.add(work.keys)
        book.predictions.sent(work.uncached_tokens)
        if work.kind != "decode":
            self._queue(leg, now_s)
            leg.prediction = book.predictions.add(work.keys)
        else:
            book.count_arrival(now_s, 0.0)
        return leg

    def forget(self, rank: RankId) -> None:
        """The rank restarted or left. Its legs in flight stay counted."""
        self._learned.forget(rank)
        self._transfers.forget(rank)
        book = self._books.get(rank)
        if book is None:
            return
        book.predictions.clear()
        book.approximate.clear()
        if not book.requests:
            del self._books[rank]

    def start_transfer(self, leg: _Leg, source: RankId) -> None:
        """`source` has computed the prompt of `leg`."""
        if leg.first_s is None:
            leg.handed_over_s, leg.source = self._clock(), source

    def start_decoding(self, leg: _Leg) -> None:
        """`leg` has its first token."""
        if leg.ended or leg.first_s is not None:
            return
        now_s = self._clock()
        book, work = leg.book, leg.work
        leg.first_s = now_s
        leg.others = book.decoding
        book.decoding += 1
        book.first_s_sum += now_s
        rates = self._learned.rates(work.rank)
        book.recent.add(now_s, work.uncached_tokens * rates.prefill_s_per_token)
        if book.queue.pop(leg.number, None):
            book.queued_tokens -= work.uncached_tokens
        if leg.prediction is None:  # a `decode` leg
            leg.prediction = book.predictions.add(work.keys)
            self._learn_transfer(leg, now_s)
        elif work.streamed:
            self._learned.on_first_token(
                work.rank, sent_s=leg.booked_s, now_s=now_s, tokens=work.uncached_tokens
            )
            book.last_first_s = now_s
        book.predictions.expire(
            leg.prediction, now_s + work.believed_s, after_tokens=work.believed_tokens
        )

    def end(self, leg: _Leg, *, failed: bool) -> None:
        """`leg` is over, for whatever reason."""
        if leg.ended:
            return
        if failed:
            self._drop(leg)
        else:
            self._complete(leg)
        leg.ended = True
        leg.book.requests -= 1
        leg.book.active.drop(leg.work.keys)

    def _drop(self, leg: _Leg) -> None:
        book = leg.book
        if leg.prediction:
            book.predictions.withdraw(leg.prediction)
        if leg.first_s is not None:
            book.decoding -= 1
            book.first_s_sum -= leg.first_s
        elif book.queue.pop(leg.number, None):
            book.queued_tokens -= leg.work.uncached_tokens

    def _complete(self, leg: _Leg) -> None:
        decoded = leg.first_s is not None
        if not decoded:
            self.start_decoding(leg)
        book, work, tokens = leg.book, leg.work, leg.output_tokens
        book.decoding -= 1
        book.first_s_sum -= leg.first_s or 0.0
        if work.remembered_s:
            self._remember(leg)
        if tokens is None or work.kind == "prefill":
            return
        self._learned.on_output(tokens)
        if decoded and work.streamed and leg.first_s is not None:
            self._learned.on_decoded(
                work.rank,
                decode_s=self._clock() - leg.first_s,
                tokens=tokens,
                others=(leg.others + book.decoding) / 2,
            )

    def _remember(self, leg: _Leg) -> None:
        """The blocks of a rank without events: what the leg showed to be wrong, then its own."""
        book, work, cached = leg.book, leg.work, leg.cached_tokens
        if cached is not None and work.block_size and work.kind != "decode":
            first_missing = cached // work.block_size
            if first_missing < len(work.keys):
                book.approximate.on_missing(work.keys[first_missing], leg.booked_s)
        book.approximate.add(work.keys, self._clock())
        assert leg.prediction is not None  # noqa: S101 - it has decoded
        book.predictions.withdraw(leg.prediction)

    def _learn_transfer(self, leg: _Leg, now_s: float) -> None:
        if leg.handed_over_s is None or leg.source is None or not leg.work.streamed:
            return
        rates = self._learned.rates(leg.work.rank)
        step_s = rates.step_s + rates.step_s_per_request * leg.others
        self._transfers.on_hand_over(
            leg.source,
            leg.work.rank,
            seconds=now_s - leg.handed_over_s - step_s,
            tokens=leg.work.uncached_tokens,
            now_s=now_s,
        )

    def _queue(self, leg: _Leg, now_s: float) -> None:
        book, work = leg.book, leg.work
        rates = self._learned.rates(work.rank)
        work_s = work.work_s + rates.fixed_s
        if not work.streamed:
            wait_s = book.queued_tokens * rates.prefill_s_per_token
            heappush(book.due, (now_s + wait_s + work_s, leg.number))
        book.queue[leg.number] = leg
        book.queued_tokens += work.uncached_tokens
        book.count_arrival(now_s, work_s)

    def _settle_due(self, book: _RankBook, now_s: float) -> None:
        while book.due and book.due[0][0] <= now_s:
            leg = book.queue.get(heappop(book.due)[1])
            if leg:
                self.start_decoding(leg)
