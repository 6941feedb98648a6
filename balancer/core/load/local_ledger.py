"""`LocalLedger`: the load ledger of one balancer process.

Rules:

1. A leg is queued from its booking to its first token, decoding from there to its end; `decode`
   legs wait for a transfer, so they never count as queued prefill.
2. The first token of an answer that isn't streamed can't be seen: such a leg counts as decoding
   once its expected time has passed, and teaches about rates as its end shows (`core.load.whole_answers`).
3. A leg that ends with an exception withdraws its prediction; before its first token also its
   arrival, its place in the shadow cache, and its work but for what may have been done. Otherwise
   its keys count as held until `believed_s` after its first token, or until `believed_tokens` new
   ones were sent there. A `decode` leg's keys count only from its first token on: before the
   transfer is done, a sibling sent there would compute them again.
4. On a rank without events the keys of a leg that ended well go into `core.load.approximate`, which is
   asked beside the predictions. The cached tokens reported correct it first. When events come at
   last it is dropped.
5. A leg enters recent work with its first token, since before that it counts as queued.
6. `forget` voids predictions and learned rates; legs in flight stay counted until they end. `empty`
   voids predictions of what was computed by then. So does a leg that found nothing of what it was
   booked with, of those made before it: its cache was emptied, and no event has told so yet. Of a rank
   outside the fleet (`retain`) nothing is left when its last leg has ended: a peer may book one there,
   and a leg may end there, long after it has left.
7. Blocks of a prompt are in use from its booking to its end: a rank keeps room for what was
   promised to it. Outputs are guessed by the pace, since tokens aren't counted as they pass.

Cost: O(1) per leg, and its keys as `core.load.chain_tree` takes them; `load` is O(legs due since the last
call).
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from heapq import heappush
from itertools import count
from types import TracebackType
from typing import Self

from balancer.core.load.approximate import ApproximateBlocks
from balancer.core.load.chain_tree import Begun, Stretch, run_blocks
from balancer.core.load.learned import ENOUGH_SAMPLES, LearnedRates
from balancer.core.load.ledger import Learning, LegWork, RankLoad, RankRates, TransferRates
from balancer.core.load.rank_book import BookedLeg, RankBook
from balancer.core.load.reuse import ReuseTimes, sampled
from balancer.core.load.shadow_cache import Promise
from balancer.core.load.transfers import LearnedTransfers
from indexer.core.types import BlockKey, RankId


class _Leg(BookedLeg, eq=False, kw_only=True):
    """A booked leg: the guard that the caller holds."""

    ledger: "LocalLedger"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ledger.end(self, failed=kind is not None)

    def first_token(self) -> None:
        self.ledger.start_decoding(self)

    def handed_over(self, source: RankId) -> None:
        self.ledger.start_transfer(self, source)

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
        self._reuse = ReuseTimes()
        self._begun: Begun = {}
        self._asked: Sequence[BlockKey] = ()
        self._parted = 0
        """How far, at most, a rank that was asked about these had them: often where the next one parts
        from them."""
        self._books: dict[RankId, RankBook] = {}
        self._numbers = count()
        self._fleet: AbstractSet[RankId] | None = None
        """Ranks that are worth keeping; None: nobody said."""

    def load(self, rank: RankId) -> RankLoad:
        """The rank's load now; an unknown rank is idle."""
        rates = self._learned.rates(rank)
        book = self._books.get(rank)
        if book is None:
            return RankLoad(rates=rates)
        now_s = self._clock()
        while (load := book.load(now_s, rates)) is None:
            self._settle_due(book, now_s)
            book.predictions.purge(now_s)
        return load

    def busy(self, rank: RankId) -> tuple[int, int]:
        """Of what `load` tells its requests and queued tokens, for who needs no more."""
        book = self._books.get(rank)
        if book is None:
            return 0, 0
        if book.due:
            self._settle_due(book, self._clock())
        return book.requests, book.queued_tokens

    def prefill_rates(self, rank: RankId) -> RankRates:
        """How fast the rank computes prompts, as far as it was learned; nothing else of it counts."""
        return self._learned.prefill_rates(rank)

    def predicted_blocks(self, rank: RankId, keys: Sequence[BlockKey], start: int) -> int:
        """How many blocks from `start` on, without a gap, are predicted on `rank`."""
        book = self._books.get(rank)
        if book is None:
            return 0
        blocks = 0
        if book.predictions.blocks:
            book.predictions.purge(self._clock())
            blocks = max(0, run_blocks(self._top(rank, keys), keys)[0] - start)
        if book.guesses is not None:
            blocks = max(blocks, book.guesses.run_blocks(keys, start))
        return blocks

    def promised_blocks(
        self, rank: RankId, keys: Sequence[BlockKey], start: int
    ) -> tuple[int, int]:
        """Predicted as of the last `load` of the rank; of the first `keys`, what is in use there.

        Both without a gap. In use: by requests in flight.
        """
        book = self._books.get(rank)
        if book is None:
            return 0, 0
        near = self._parted if keys is self._asked else 0
        expected, used = run_blocks(self._top(rank, keys), keys, near)
        self._asked, self._parted = keys, max(near, expected, used)
        blocks = max(0, expected - start)
        if book.guesses is not None:
            blocks = max(blocks, book.guesses.run_blocks(keys, start))
        return blocks, used

    def _top(self, rank: RankId, keys: Sequence[BlockKey]) -> Stretch | None:
        ranks = self._begun.get(keys[0]) if keys else None
        return ranks.get(rank) if ranks else None

    def has_guesses(self, rank: RankId) -> bool:
        """Whether anything is guessed to be held by this rank without events."""
        book = self._books.get(rank)
        return book is not None and book.guesses is not None and len(book.guesses) > 0

    def transfer(self, source: RankId, target: RankId) -> TransferRates:
        """What a hand-over from `source` to `target` takes."""
        return self._transfers.rates(source, target, self._clock())

    @property
    def knows_prefill(self) -> bool:
        """Whether prefill has been seen often enough for its rate to be more than a prior."""
        return self._learned.knows_prefill

    @property
    def learning(self) -> Learning | None:
        """None: prefill and transfer have been seen often enough to compare their times."""
        if self._learned.knows_prefill and self._transfers.are_known:
            return None
        return Learning(
            prefills=self._learned.seen, hand_overs=self._transfers.seen, needed=ENOUGH_SAMPLES
        )

    def hold(self, work: LegWork) -> _Leg:
        """Book `work` at once; the guard counts it until it ends."""
        now_s = self._clock()
        self._learned.settle(work.rank, now_s)
        book = self._books.get(work.rank)
        if book is None:
            book = self._books[work.rank] = RankBook(
                now_s, self._max_predicted_blocks, self._begun, work.rank
            )
        book.changed()
        book.predictions.purge(now_s)
        if work.keys and not work.remembered_s:  # a leg without keys says nothing of events
            book.guesses = None
        elif book.guesses is not None:
            book.guesses.purge(now_s - work.remembered_s)
        has_keys = len(work.keys) > 0
        chains = work.chains if has_keys else ()
        used = [book.chains.add(keys, used=True) for keys in chains] if has_keys else []
        leg = _Leg(book, work, next(self._numbers), now_s, used, ledger=self)
        book.requests += 1
        book.predictions.sent(work.uncached_tokens)
        if work.block_size:
            leg.promises = self._use_cache(book, work, now_s)
        if work.kind != "decode":
            self._queue(leg, now_s)
            if has_keys:
                leg.prediction = book.predictions.add(chains)
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
        book.changed()
        book.predictions.clear()
        book.guesses = None
        book.shadow.clear()
        if not book.requests:
            del self._books[rank]

    def empty(self, rank: RankId) -> None:
        """The rank's cache was emptied: what was computed there before is gone."""
        book = self._books.get(rank)
        if book is not None:
            book.changed()
            book.predictions.end_computed()
            book.shadow.clear()

    def retain(self, ranks: AbstractSet[RankId]) -> None:
        """These are the fleet from now on: of others only legs in flight are kept."""
        self._fleet = ranks
        for rank in (self._books.keys() | self._learned.ranks) - ranks:
            self.forget(rank)
        self._transfers.retain(ranks)

    def start_transfer(self, leg: BookedLeg, source: RankId) -> None:
        """`source` has computed the prompt of `leg`."""
        if leg.first_s is None:
            leg.handed_over_s, leg.source = self._clock(), source

    def start_decoding(self, leg: BookedLeg) -> None:
        """`leg` has its first token."""
        if leg.ended or leg.first_s is not None:
            return
        now_s = self._clock()
        book, work = leg.book, leg.work
        book.changed()
        leg.first_s = now_s
        leg.others = book.decoding
        book.decoding += 1
        book.first_s_sum += now_s
        if leg.promises:
            book.shadow.computed(leg.promises)
        rates = self._learned.prefill_rates(work.rank)
        book.recent.add(now_s, work.uncached_tokens * rates.prefill_s_per_token)
        book.end_queueing(leg, now_s)
        if work.kind == "decode":
            if len(work.keys) > 0:
                leg.prediction = book.predictions.add(work.chains)
            self._learn_transfer(leg, now_s)
        elif work.streamed:
            book.look_for_seats(leg, now_s, self._learned.rates(work.rank).step_s)
            self._learned.on_first_token(
                work.rank, sent_s=leg.booked_s, now_s=now_s, tokens=work.uncached_tokens
            )
            book.turned_s = now_s
        if leg.prediction is not None:
            book.predictions.expire(
                leg.prediction, now_s + work.believed_s, after_tokens=work.believed_tokens
            )

    def end(self, leg: BookedLeg, *, failed: bool) -> None:
        """`leg` is over, for whatever reason."""
        if leg.ended:
            return
        if failed:
            self._drop(leg)
        else:
            self._complete(leg)
        leg.ended = True
        leg.book.changed()
        leg.book.freed_s = self._clock()
        leg.book.requests -= 1
        for end in leg.used:
            leg.book.chains.drop(end, used=True)
        rank = leg.work.rank
        if self._fleet is not None and rank not in self._fleet and not leg.book.requests:
            self.forget(rank)

    def _drop(self, leg: BookedLeg) -> None:
        book, now_s = leg.book, self._clock()
        self._settle_due(book, now_s)
        if leg.prediction:
            book.predictions.withdraw(leg.prediction)
        if leg.first_s is not None:
            book.decoding -= 1
            book.first_s_sum -= leg.first_s
            return
        book.withdraw(leg, now_s)
        book.predictions.sent(-leg.work.uncached_tokens)
        if leg.promises:
            book.shadow.withdraw(leg.promises)
            book.reuse_chance = self._reuse.chance(book.shadow.oldest_s(now_s))

    def _complete(self, leg: BookedLeg) -> None:
        decoded = leg.first_s is not None
        if not decoded:
            self.start_decoding(leg)
        book, work, tokens = leg.book, leg.work, leg.output_tokens
        book.decoding -= 1
        book.first_s_sum -= leg.first_s or 0.0
        self._correct(leg)
        if tokens is None or work.kind == "prefill":
            return
        self._learned.on_output(tokens)
        if work.block_size:  # of other prompts it doesn't know either
            book.shadow.answer(tokens, self._clock())
        if work.kind == "whole" and not work.streamed:
            now_s = self._clock()
            if self._learned.takes_whole(work.rank, now_s):
                self._settle_due(book, now_s)
                self._learned.on_whole(work.rank, book.whole_answer(leg, now_s))
        elif decoded and work.streamed and leg.first_s is not None:
            self._learned.on_decoded(
                work.rank,
                decode_s=self._clock() - leg.first_s,
                tokens=tokens,
                others=(leg.others + book.decoding) / 2,
            )

    def _correct(self, leg: BookedLeg) -> None:
        """What was expected of the rank's cache, by what the leg found in it."""
        if leg.work.remembered_s:
            self._remember(leg)
        elif leg.found_nothing and leg.prediction is not None:
            leg.book.predictions.end_computed(before=leg.prediction)

    def _remember(self, leg: BookedLeg) -> None:
        """The blocks of a rank without events: what the leg showed to be wrong, then its own."""
        book, work, cached = leg.book, leg.work, leg.cached_tokens
        if book.guesses is None:
            book.guesses = ApproximateBlocks(self._max_predicted_blocks)
        if cached is not None and work.block_size and work.kind != "decode":
            first_missing = cached // work.block_size
            if first_missing < len(work.keys):
                book.guesses.on_missing(work.keys[first_missing], leg.booked_s)
        book.guesses.add(work.keys, self._clock())
        if leg.prediction is not None:
            book.predictions.withdraw(leg.prediction)

    def _learn_transfer(self, leg: BookedLeg, now_s: float) -> None:
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

    def _use_cache(self, book: RankBook, work: LegWork, now_s: float) -> Sequence[Promise]:
        keys = sampled(work.keys, work.block_size)
        if work.kind != "decode":  # its prefill leg has asked for them
            self._reuse.used(keys, now_s)
        book.shadow.capacity_tokens = work.cache_tokens or book.shadow.capacity_tokens
        promises = book.shadow.use(keys, work.block_size, now_s)
        book.reuse_chance = self._reuse.chance(book.shadow.oldest_s(now_s))
        return promises

    def _queue(self, leg: BookedLeg, now_s: float) -> None:
        book, work = leg.book, leg.work
        rates = self._learned.prefill_rates(work.rank)
        # Tiny prompts share a step, and so its fixed part: it counts up to the work it comes with.
        leg.work_s = work.work_s + min(rates.fixed_s, work.work_s)
        leg.alone_s = work.work_s + rates.fixed_s
        wait_s = book.queued_tokens * rates.prefill_s_per_token
        leg.expected_s = wait_s + leg.alone_s
        if not work.streamed:
            heappush(book.due, (now_s + leg.expected_s, leg.number))
        book.queue_up(leg, now_s)

    def _settle_due(self, book: RankBook, now_s: float) -> None:
        book.changed()
        while leg := book.take_due(now_s):
            self.start_decoding(leg)
