"""How fast each rank is, learned from the legs we carry; nothing is measured on purpose.

Rules:

1. Prefill seconds per token: per rank, a 40 % quantile of (first token - start - fixed part) /
   uncached tokens, where start is the later of dispatch and the rank's previous first token.
   Waits for memory or a slot only ever add, so a low quantile is nearer to the truth than a mean.
2. First tokens within 2 ms of each other left the engine in one step: they are one sample.
3. Only samples whose work clearly exceeds the fixed part say anything about the rate; only those
   with next to no work say anything about the fixed part. Many tiny prompts of one step say nothing
   of either: the time since the step before is how fast they came, not how fast they were computed.
   Least squares over both is unstable where hits are common.
4. The median of the first nine samples starts a tracker, so one odd first request does not stay.
   A rank with fewer than three samples uses the fleet's rate; a fleet without samples the prior.
5. Decode step: per rank, a 40 % quantile of (seconds between tokens - growth * others decoding);
   the growth is the fleet's least squares slope, from 0 to a tenth of the step.
6. How stalled answers are: per rank, the mean of 1 - best / (seconds between tokens), weight 0.1. Best is
   the fleet's 5 % quantile of seconds between tokens, from the least of the first nine on, and at least
   5 ms. What a rate says of a rank's time is only as good as the rate: where first tokens come as fast as
   we or our clients go, any rank looks busy all the time. Only its answers show whether it is.
7. Answers in one piece teach only ranks that no stream has taught: seconds per token by how they
   differ (`core.load.whole_answers`), and steps by what of their time isn't their own prompt's. That holds waits,
   too: an answer that waited is one that was slow. Fifty a second of each rank are looked at.

Cost: a few operations per leg; `rates` is kept until the next sample, once for all ranks that nothing was seen of.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from balancer.core.load.ledger import RankRates
from balancer.core.load.whole_answers import Means, PrefillSlope, WholeAnswer
from indexer.core.types import RankId

SAME_STEP_S = 0.002
FIRST_SAMPLES = 9
ENOUGH_SAMPLES = 3
MIN_WORK_TOKENS = 64
"""Below this a first token says more about the fixed part than about the rate."""
CLEARLY_WORK = 4
"""Work of so many fixed parts says something about the rate."""
MAX_FIXED_S = 0.1
QUANTILE = 0.4
TRACKING_STEP = 0.05
OUTPUT_WEIGHT = 0.02
GROWTH_DECAY = 0.99
MAX_GROWTH_SHARE = 0.1
DECODE_WEIGHT = 0.1
BEST_QUANTILE = 0.05
"""Of seconds per token: so fast are answers that nothing stalls, even in a fleet with much to do."""
WHOLE_APART_S = 0.02
"""Fifty answers in one piece a second tell all that a rank's have to tell; learning of one takes 8 µs."""
FAST_STEP_S = 0.005
"""An answer of 200 tokens per second is stalled by nothing worth a word, however fast others were."""


class QuantileTracker:
    """Follows a quantile of positive samples, whatever their scale."""

    __slots__ = ("_first", "_first_quantile", "_quantile", "count", "value")

    def __init__(self, quantile: float = QUANTILE, *, first_quantile: float = 0.5) -> None:
        self._quantile, self._first_quantile = quantile, first_quantile
        self.count = 0
        self.value = 0.0
        self._first: list[float] = []

    def add(self, sample: float) -> None:
        """Count one sample in."""
        self.count += 1
        if self.count <= FIRST_SAMPLES:
            self._first.append(sample)
            self.value = sorted(self._first)[int(len(self._first) * self._first_quantile)]
        elif sample > self.value:
            self.value *= 1 + TRACKING_STEP * self._quantile
        else:
            self.value *= 1 - TRACKING_STEP * (1 - self._quantile)


@dataclass(slots=True)
class _Step:
    """First tokens that left one rank in one engine step."""

    start_s: float
    first_s: float
    tokens: int
    longest_tokens: int
    """Of its prompts."""


@dataclass(slots=True)
class _RankSpeed:
    prefill: QuantileTracker = field(default_factory=QuantileTracker)
    step: QuantileTracker = field(default_factory=QuantileTracker)
    stalled_share: float = 0.0
    """As in `RankRates`."""
    pending: _Step | None = None
    mean_others: float = 0.0
    mean_step_s: float = 0.0
    decode_s: float = 0.0
    decodes: int = 0
    next_whole_s: float = 0.0
    """Answers in one piece that end before teach nothing."""
    means: Means = field(default_factory=Means)
    """Of answers in one piece."""
    slope: PrefillSlope = field(default_factory=PrefillSlope)

    def add_decode(self, seconds: float) -> None:
        self.decodes += 1
        self.decode_s += self._weight * (seconds - self.decode_s)

    def add_step(self, best_s: float, step_s: float) -> None:
        share = max(0.0, 1 - best_s / step_s)
        self.stalled_share += self._weight * (share - self.stalled_share)

    @property
    def _weight(self) -> float:
        return max(DECODE_WEIGHT, 1 / self.decodes)


class LearnedRates:
    """Rates of every rank, and of the fleet for ranks that are new."""

    def __init__(self, prior: RankRates | None = None) -> None:
        self._prior = prior or RankRates()
        self._ranks: dict[RankId, _RankSpeed] = {}
        self._fleet_prefill = QuantileTracker()
        self._fleet_step = QuantileTracker()
        self._best_step = QuantileTracker(BEST_QUANTILE, first_quantile=0.0)
        self._slope = PrefillSlope()
        self._fixed = QuantileTracker()
        self._output_tokens = self._prior.output_tokens
        self._outputs = 0
        self._covariance = 0.0
        self._variance = 0.0
        self._cache: dict[RankId, RankRates] = {}
        self._of_new: RankRates | None = None
        """Of ranks of which nothing was seen: the same for all of them."""
        self._prefill_cache: dict[RankId, RankRates] = {}
        """The same, perhaps with the answer lengths of a while ago."""

    @property
    def knows_prefill(self) -> bool:
        """Whether the fleet's prefill rate is more than a prior."""
        return self.seen >= ENOUGH_SAMPLES or self._slope.s_per_token is not None

    @property
    def seen(self) -> int:
        """Prefills of the fleet that told something."""
        return self._fleet_prefill.count

    @property
    def ranks(self) -> AbstractSet[RankId]:
        """Those of which something was learned."""
        return self._ranks.keys()

    def rates(self, rank: RankId) -> RankRates:
        """What is known of `rank`, else of the fleet, else the prior."""
        rates = self._cache.get(rank)
        if rates is not None:
            return rates
        speed = self._ranks.get(rank)
        if speed is not None:
            rates = self._cache[rank] = self._build(speed)
            return rates
        if self._of_new is None:
            self._of_new = self._build(None)
        return self._of_new

    def prefill_rates(self, rank: RankId) -> RankRates:
        """As `rates`, for who reads of it what prefill takes and nothing else."""
        rates = self._prefill_cache.get(rank)
        if rates is None:
            rates = self._prefill_cache[rank] = self.rates(rank)
        return rates

    def on_first_token(self, rank: RankId, *, sent_s: float, now_s: float, tokens: int) -> None:
        """A prompt with `tokens` uncached tokens, sent at `sent_s`, is computed."""
        speed = self._speed(rank)
        step = speed.pending
        if step is not None and now_s - step.first_s <= SAME_STEP_S:
            step.tokens += tokens
            step.longest_tokens = max(step.longest_tokens, tokens)
            return
        self.settle(rank, now_s)
        start_s = sent_s if step is None else max(sent_s, step.first_s)
        speed.pending = _Step(start_s, now_s, tokens, tokens)

    def settle(self, rank: RankId, now_s: float) -> None:
        """Turn the rank's last step into a sample, if nothing can join it any more."""
        speed = self._ranks.get(rank)
        step = speed.pending if speed else None
        if speed is None or step is None or step.tokens < 0:
            return
        if now_s - step.first_s <= SAME_STEP_S:
            return
        if step.tokens < MIN_WORK_TOKENS or step.longest_tokens >= MIN_WORK_TOKENS:
            self._sample_prefill(speed, step.first_s - step.start_s, step.tokens)
        step.tokens = -1  # taken; its time stays as the start of the next one
        self._note_change()

    def on_decoded(self, rank: RankId, *, decode_s: float, tokens: int, others: float) -> None:
        """A leg streamed `tokens` tokens in `decode_s` beside `others` decoding legs."""
        if tokens < 2 or decode_s <= 0:
            return
        speed = self._speed(rank)
        speed.add_decode(decode_s)
        step_s = decode_s / (tokens - 1)
        self._learn_growth(speed, step_s, others)
        alone_s = max(step_s - self._growth(step_s) * others, step_s * MAX_GROWTH_SHARE)
        speed.step.add(alone_s)
        self._best_step.add(step_s)
        speed.add_step(max(self._best_step.value, FAST_STEP_S), step_s)
        self._fleet_step.add(alone_s)
        self._note_change()

    def takes_whole(self, rank: RankId, now_s: float) -> bool:
        """Whether an answer in one piece that ends now is to be told with `on_whole`."""
        speed = self._speed(rank)
        if speed.prefill.count >= ENOUGH_SAMPLES or now_s < speed.next_whole_s:
            return False
        speed.next_whole_s = now_s + WHOLE_APART_S
        return True

    def on_whole(self, rank: RankId, answer: WholeAnswer) -> None:
        """An answer came in one piece."""
        speed = self._speed(rank)
        off = speed.means.off(answer)
        speed.slope.add(off)
        self._slope.add(off)
        prompt_s = 0.0
        if self.knows_prefill:
            prompt_s = self._fixed_s + answer.uncached_tokens * self._prefill_s(speed)
        self._note_change()
        self.on_decoded(
            rank, decode_s=answer.seconds - prompt_s, tokens=answer.tokens, others=answer.others
        )

    def on_output(self, tokens: int) -> None:
        """An answer had `tokens` tokens."""
        self._outputs += 1
        weight = max(OUTPUT_WEIGHT, 1 / (self._outputs + 1))
        self._output_tokens += weight * (tokens - self._output_tokens)
        self._note_output()

    def forget(self, rank: RankId) -> None:
        """The rank restarted or left: it may come back on other hardware."""
        self._ranks.pop(rank, None)
        self._cache.pop(rank, None)
        self._prefill_cache.pop(rank, None)

    def _note_change(self) -> None:
        self._prefill_cache.clear()
        self._note_output()

    def _note_output(self) -> None:
        self._cache.clear()
        self._of_new = None

    def _speed(self, rank: RankId) -> _RankSpeed:
        speed = self._ranks.get(rank)
        if speed is None:
            speed = self._ranks[rank] = _RankSpeed()
        return speed

    def _sample_prefill(self, speed: _RankSpeed, seconds: float, tokens: int) -> None:
        fixed_s = self._fixed_s
        if tokens < MIN_WORK_TOKENS:
            rest_s = seconds - tokens * self._prefill_s(speed)
            self._fixed.add(min(max(rest_s, MAX_FIXED_S / 1000), MAX_FIXED_S))
            return
        # Before a rate is known only the duration can tell work from overhead.
        if self._fleet_prefill.count < FIRST_SAMPLES:
            is_work = seconds >= CLEARLY_WORK / 2 * fixed_s
        else:
            is_work = tokens * self._prefill_s(speed) >= CLEARLY_WORK * fixed_s
        if not is_work or seconds <= fixed_s:
            return
        sample = (seconds - fixed_s) / tokens
        speed.prefill.add(sample)
        self._fleet_prefill.add(sample)

    def _learn_growth(self, speed: _RankSpeed, step_s: float, others: float) -> None:
        """Least squares slope, each rank centred on its own means: ranks differ in speed."""
        weight = max(OUTPUT_WEIGHT, 1 / (speed.step.count + 1))
        off_others, off_step = others - speed.mean_others, step_s - speed.mean_step_s
        speed.mean_others += weight * off_others
        speed.mean_step_s += weight * off_step
        if speed.step.count > 0:
            self._covariance = GROWTH_DECAY * self._covariance + off_others * off_step
            self._variance = GROWTH_DECAY * self._variance + off_others * off_others

    def _growth(self, step_s: float) -> float:
        slope = self._prior.step_s_per_request
        if self._variance > 1:
            slope = self._covariance / self._variance
        return min(max(slope, 0.0), MAX_GROWTH_SHARE * step_s)

    @property
    def _fixed_s(self) -> float:
        return self._fixed.value if self._fixed.count >= ENOUGH_SAMPLES else self._prior.fixed_s

    def _prefill_s(self, speed: _RankSpeed | None) -> float:
        if speed and speed.prefill.count >= ENOUGH_SAMPLES:
            return speed.prefill.value
        slope = self._slope if self.seen < ENOUGH_SAMPLES else None
        for each in (speed and speed.slope, slope):
            if each and each.s_per_token is not None:
                return each.s_per_token
        return self._fleet_prefill.value or self._prior.prefill_s_per_token

    def _build(self, speed: _RankSpeed | None) -> RankRates:
        if speed and speed.step.count >= ENOUGH_SAMPLES:
            step_s = speed.step.value
        else:
            step_s = self._fleet_step.value or self._prior.step_s
        return RankRates(
            prefill_s_per_token=self._prefill_s(speed),
            fixed_s=self._fixed_s,
            step_s=step_s,
            step_s_per_request=self._growth(step_s),
            output_tokens=self._output_tokens,
            decode_s=speed.decode_s if speed else 0.0,
            stalled_share=speed.stalled_share if speed else 0.0,
        )
