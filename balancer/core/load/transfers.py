"""How long blocks take from one rank to another, learned from the hand-overs we carry.

What is measured: from the end of the prefill leg to the first token of the decode leg, less the
step that computes that token. What is left is the transfer, and the waits for step boundaries and
for memory around it: a hand-over costs them, too.

Rules:

1. The fixed part is the fleet's, from hand-overs of so few tokens that their transfer takes next to
   nothing; the rate is the pair's, from those whose transfer clearly exceeds the fixed part. Until
   there is a rate, or where a hand-over takes longer than any fixed part may, the time itself
   tells which of both it is.
2. Both are 40 % quantiles: waits only ever add.
3. A pair with fewer than three samples uses the fleet's rate; a fleet with fewer the prior.
4. A slow estimate that nobody renews fades within minutes, a pair's to the fleet's and that to the
   prior: what looks slow isn't used, and what isn't used would look slow for ever.

Cost: a few operations per hand-over and per look.
"""

from collections.abc import Set as AbstractSet

from balancer.core.load.learned import ENOUGH_SAMPLES, MAX_FIXED_S, QuantileTracker
from balancer.core.load.ledger import TransferRates
from indexer.core.types import RankId

CLEARLY_TRANSFER = 2
"""A transfer of so many fixed parts says something about the rate."""
LITTLE_TRANSFER = 0.5
"""One of so many says something about the fixed part."""
MIN_TOKENS = 256
"""So many that take longer than any fixed part tell of the rate, even if it seemed high before."""
STALE_S = 120.0


class _Pace:
    """Seconds per token of one pair, and when it was last seen."""

    __slots__ = ("seen_s", "tracker")

    def __init__(self) -> None:
        self.tracker = QuantileTracker()
        self.seen_s = 0.0

    def add(self, sample: float, now_s: float) -> None:
        self.tracker.add(sample)
        self.seen_s = now_s

    def faded(self, toward: float, now_s: float) -> float:
        """Its value, nearer to `toward` the longer it wasn't renewed, if that is less."""
        value = self.tracker.value
        if value <= toward:
            return value
        stale = min(1.0, max(0.0, (now_s - self.seen_s) / STALE_S - 1))
        return value + (toward - value) * stale


class LearnedTransfers:
    """Transfer times of every pair of ranks that handed something over."""

    def __init__(self, prior: TransferRates | None = None) -> None:
        self._prior = prior or TransferRates()
        self._fixed = QuantileTracker()
        self._fleet = _Pace()
        self._pairs: dict[tuple[RankId, RankId], _Pace] = {}

    @property
    def are_known(self) -> bool:
        """Whether any pair has been seen often enough."""
        return self.seen >= ENOUGH_SAMPLES

    @property
    def seen(self) -> int:
        """Hand-overs of the fleet that told something of the rate."""
        return self._fleet.tracker.count

    def rates(self, source: RankId, target: RankId, now_s: float) -> TransferRates:
        """What a hand-over from `source` to `target` takes."""
        return TransferRates(
            fixed_s=self._fixed_s, s_per_token=self._s_per_token((source, target), now_s)
        )

    def on_hand_over(
        self, source: RankId, target: RankId, *, seconds: float, tokens: int, now_s: float
    ) -> None:
        """`tokens` tokens were handed over; `seconds` is what that took beyond the first step."""
        if tokens <= 0 or seconds <= 0:
            return
        fixed_s = self._fixed_s
        expected_s = tokens * self._s_per_token((source, target), now_s)
        if seconds > MAX_FIXED_S and tokens >= MIN_TOKENS:
            expected_s = seconds  # whatever was expected: this is no fixed part
        elif not self.are_known:
            expected_s = seconds
        elif expected_s < LITTLE_TRANSFER * fixed_s:
            self._fixed.add(min(max(seconds - expected_s, MAX_FIXED_S / 1000), MAX_FIXED_S))
            return
        if expected_s < CLEARLY_TRANSFER * fixed_s or seconds <= fixed_s:
            return
        sample = (seconds - fixed_s) / tokens
        self._fleet.add(sample, now_s)
        self._pairs.setdefault((source, target), _Pace()).add(sample, now_s)

    def forget(self, rank: RankId) -> None:
        """The rank restarted or left: it may come back behind another link."""
        for pair in [pair for pair in self._pairs if rank in pair]:
            del self._pairs[pair]

    def retain(self, ranks: AbstractSet[RankId]) -> None:
        """Others have left."""
        for pair in [pair for pair in self._pairs if not ranks >= set(pair)]:
            del self._pairs[pair]

    @property
    def _fixed_s(self) -> float:
        return self._fixed.value if self._fixed.count >= ENOUGH_SAMPLES else self._prior.fixed_s

    def _s_per_token(self, pair: tuple[RankId, RankId], now_s: float) -> float:
        fleet = self._prior.s_per_token
        if self.are_known:
            fleet = self._fleet.faded(fleet, now_s)
        pace = self._pairs.get(pair)
        if pace is None or pace.tracker.count < ENOUGH_SAMPLES:
            return fleet
        return pace.faded(fleet, now_s)
