"""Everything a ledger counts for one rank, and the legs it counts.

Rules:

1. Arrivals and work per second are exponential means over 20 s, corrected for a young rank. Recent
   work is a sum that fades over ten minutes.
2. A rank's load is told as one value: who looks at it later sees what was so then.
3. What a load is made of is gathered once per change of the book (`core.load.figures`). Whoever
   changes a book says so (`changed`).

Cost: constant, but for a load's first look at what has expired.
"""

from collections.abc import Sequence
from heapq import heappop
from math import exp

import msgspec

from balancer.core.load.approximate import ApproximateBlocks
from balancer.core.load.chain_tree import Begun, ChainTree, Stretch
from balancer.core.load.fading import FadingSum
from balancer.core.load.figures import FIGURES, RATE_TAU_S, RECENT_TAU_S, countable, load_of
from balancer.core.load.ledger import LegWork, RankLoad, RankRates
from balancer.core.load.predictions import Prediction, RankPredictions
from balancer.core.load.shadow_cache import Promise, ShadowCache
from balancer.core.load.whole_answers import WholeAnswer
from indexer.core.types import RankId

FAR_TOO_LONG, LEAST_SEAT_WAIT_S = 4.0, 0.25
"""Times what the prompts before it take, and seconds: who waits so long may wait for a seat."""
ENOUGH_SEAT_WAITS = 3
"""In a row: a stall looks like one."""
FAR_OFF = 0.25
"""Work that took so much of what was booked, or less, counts as what it took."""


class BookedLeg(msgspec.Struct, eq=False):
    """One leg, as far as its book knows it."""

    book: "RankBook"
    work: LegWork
    number: int
    booked_s: float
    used: list[Stretch]
    """Where its prompts end among the blocks in use."""
    work_s: float = 0.0
    """Prefill seconds it counts for; 0 for a `decode` leg."""
    alone_s: float = 0.0
    """To its first token on an idle rank; 0 for a `decode` leg."""
    computed_before: int = 0
    """Tokens that its rank had computed when it was booked, as far as expected."""
    expected_s: float = 0.0
    """To its first token, by the prompts before it and its own."""
    promises: Sequence[Promise] = ()
    """What it will leave in the shadow cache."""
    first_s: float | None = None
    handed_over_s: float | None = None
    source: RankId | None = None
    others: int = 0
    output_tokens: int | None = None
    cached_tokens: int | None = None
    prediction: Prediction | None = None
    ended: bool = False

    @property
    def found_nothing(self) -> bool:
        """The engine had not one block of what it was believed to have when this was booked."""
        work, cached_tokens = self.work, self.cached_tokens
        if cached_tokens is None or not work.block_size or work.kind == "decode":
            return False
        believed_tokens = work.prompt_tokens - work.uncached_tokens
        return cached_tokens < work.block_size <= believed_tokens


class RankBook:
    """Everything counted for one rank."""

    __slots__ = (
        "_packed",
        "arrivals",
        "chains",
        "counted_s",
        "decoding",
        "due",
        "first_s_sum",
        "freed_s",
        "guesses",
        "predictions",
        "queue",
        "queued_tokens",
        "recent",
        "requests",
        "reuse_chance",
        "running",
        "seat_waits",
        "seats",
        "sent_tokens",
        "shadow",
        "since_s",
        "turned_s",
        "work_s",
    )

    def __init__(self, now_s: float, max_predicted_blocks: int, begun: Begun, rank: RankId) -> None:
        """`begun`: where all ranks' chains begin."""
        self._packed: bytes | None = None
        """Its figures; None: the book has changed since."""
        self.since_s = now_s
        self.requests = 0
        self.decoding = 0
        self.queued_tokens = 0
        self.sent_tokens = 0
        """To be computed there, ever."""
        self.queue: dict[int, BookedLeg] = {}
        """Legs without a first token, oldest first; `decode` legs aren't among them."""
        self.due: list[tuple[float, int]] = []
        """When queued legs whose first token can't be seen are expected to be computed."""
        self.turned_s = now_s
        """When its last first token came, or its oldest queued leg went away: it works on the next."""
        self.counted_s = now_s
        self.arrivals = 0.0
        self.work_s = 0.0
        """Both as they stood at `counted_s`."""
        self.recent = FadingSum(RECENT_TAU_S, now_s)
        self.chains = ChainTree(begun, rank)
        """In use by legs in flight: KV memory that can't be evicted, a block that several share counts
        once. And expected: predicted."""
        self.predictions = RankPredictions(max_predicted_blocks, self.chains)
        self.guesses: ApproximateBlocks | None = None
        """Of a rank without events, once a leg has left something there."""
        self.first_s_sum = 0.0
        """Moments of the first tokens of legs that decode, added up."""
        self.shadow = ShadowCache()
        self.reuse_chance = 0.0
        """That what leaves the cache next is ever asked for again, as of the last booking."""
        self.running = 0
        self.seat_waits = 0
        self.freed_s = float("-inf")
        self.seats = 0
        """Most legs that ran when one that had waited far too long for its prompt began."""

    def count_arrival(self, now_s: float, work_s: float) -> None:
        """One more leg, with so much prefill work."""
        fade = exp((self.counted_s - now_s) / RATE_TAU_S)
        self.arrivals = self.arrivals * fade + 1
        self.work_s = self.work_s * fade + work_s
        self.counted_s = now_s

    def queue_up(self, leg: BookedLeg, now_s: float) -> None:
        """It is to be computed, behind those that are queued."""
        tokens = leg.work.uncached_tokens
        leg.computed_before = self.sent_tokens - self.queued_tokens
        self.sent_tokens += tokens
        self.queued_tokens += tokens
        self.queue[leg.number] = leg
        self.count_arrival(now_s, leg.work_s)

    def whole_answer(self, leg: BookedLeg, now_s: float) -> WholeAnswer:
        """What a leg that ends now, in one piece, took; its tokens are known."""
        expected = uncached = leg.work.uncached_tokens
        if leg.cached_tokens is not None:
            uncached = max(0, leg.work.prompt_tokens - leg.cached_tokens)
        computed = self.sent_tokens - self.queued_tokens - leg.computed_before
        return WholeAnswer(
            seconds=now_s - leg.booked_s,
            uncached_tokens=uncached,
            computed_tokens=computed - expected + uncached,
            tokens=leg.output_tokens or 0,
            others=(leg.others + self.decoding) / 2,
        )

    def end_queueing(self, leg: BookedLeg, now_s: float) -> None:
        """Its first token is here.

        A rate that is far off, a prior for one, would else fill an idle rank until it has faded.
        """
        if self.queue.pop(leg.number, None):
            self.queued_tokens -= leg.work.uncached_tokens
            took_s = now_s - leg.booked_s
            if took_s < FAR_OFF * leg.work.work_s:
                self.take_back(leg.work.work_s - took_s, leg.booked_s)

    def look_for_seats(self, leg: BookedLeg, now_s: float, step_s: float) -> None:
        """Its first token is here, and it counts as decoding.

        Who waits far longer than the prompts before it take, and begins when another one has just
        ended, has waited for a seat: then as many run as there are seats. More that run show more.
        """
        waited_s = now_s - leg.booked_s
        own_s = leg.alone_s + 2 * step_s
        took_a_seat = now_s - self.freed_s <= own_s
        if took_a_seat and waited_s > max(LEAST_SEAT_WAIT_S, FAR_TOO_LONG * leg.expected_s):
            self.seat_waits += 1
            self.running = max(self.running, self.decoding)
        elif self.decoding > self.running:  # it began without such a wait: there are more
            self.seat_waits, self.running = 0, self.decoding
        self.seats = self.running if self.seat_waits >= ENOUGH_SEAT_WAITS else 0

    def take_back(self, work_s: float, booked_s: float) -> None:
        """So much of what a leg was booked with, then, was no work."""
        self.work_s = max(0.0, self.work_s - work_s * exp((booked_s - self.counted_s) / RATE_TAU_S))

    def withdraw(self, leg: BookedLeg, now_s: float) -> None:
        """It went away without a first token: of its work only that counts which may be done.

        Prompts are computed in turn. So the oldest was worked on, at most for as long as it was its
        turn, and those behind it were not.
        """
        done_s = 0.0
        if self.queue and next(iter(self.queue.values())) is leg:
            done_s = min(leg.work_s, max(0.0, now_s - max(leg.booked_s, self.turned_s)))
            self.turned_s = now_s
        if self.queue.pop(leg.number, None):
            self.queued_tokens -= leg.work.uncached_tokens
            self.sent_tokens -= leg.work.uncached_tokens
        self.take_back(leg.work_s - done_s, leg.booked_s)
        faded = exp((leg.booked_s - self.counted_s) / RATE_TAU_S)
        self.arrivals = max(0.0, self.arrivals - faded)

    def take_due(self, now_s: float) -> BookedLeg | None:
        """The next leg that is expected to be computed by now, once."""
        due = self.due
        while due and due[0][0] <= now_s:
            leg = self.queue.get(heappop(due)[1])
            if leg is not None:
                return leg
        return None

    def changed(self) -> None:
        """It was, or is about to be before anyone asks."""
        self._packed = None

    def load(self, now_s: float, rates: RankRates) -> RankLoad | None:
        """The rank's load now; None: first it is to be looked who is due, and what has expired."""
        packed = self._packed
        if packed is None:
            self.predictions.purge(now_s)
            packed = self._packed = self._figures()
        return load_of(packed, now_s, rates)

    def _figures(self) -> bytes:
        """In the order in which `load_of` takes them apart."""
        head = next(iter(self.queue.values())) if self.queue else None
        due_s = self.predictions.next_s
        if self.due and self.due[0][0] < due_s:
            due_s = self.due[0][0]
        recent = self.recent
        return FIGURES.pack(
            due_s,
            self.requests,
            countable(self.queued_tokens),
            self.decoding,
            head is not None,
            0.0 if head is None else head.booked_s,
            0 if head is None else countable(head.work.uncached_tokens),
            self.since_s,
            self.turned_s,
            self.counted_s,
            self.arrivals,
            self.work_s,
            recent.value,
            recent.at_s,
            self.chains.used_blocks,
            self.first_s_sum,
            self.reuse_chance,
            self.shadow.free_tokens,
            self.seats,
        )
