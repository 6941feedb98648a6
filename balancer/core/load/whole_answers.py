"""What answers in one piece tell of prefill: seconds per uncached token, by how they differ. Pure.

Nobody sees when the prompt of such an answer was computed. Over many answers it shows all the same: of two
that generate as much, the one whose rank computed more meanwhile takes longer.

Rules:

1. Seconds from dispatch to end = wait + slope * tokens computed meanwhile + step * tokens generated. Computed
   meanwhile are those queued there before it, its own, and those that came while it was there: an engine
   computes in the same steps in which it decodes. What else it waited for is noise around a mean. Each
   rank is centred on its own means: ranks differ.
2. Who stays longer for any other reason also has more prompts come meanwhile. So what is computed explains
   times only as far as it was ahead when the answer's prompt was sent (an instrument, as statisticians
   say): that was given before its time.
3. A slope counts only once it is CLEARLY_SEEN: so many times its standard error, of at least LEAST answers,
   where what was ahead says as clearly what was computed. It holds until another does. Prompts that are
   all alike tell nothing, nor do those that are long as their answers are; noise doesn't decide.
4. Old answers fade: half of what is known is of the last 350.

Cost: some forty operations per answer.
"""

from math import inf
from typing import Final, NamedTuple

import msgspec

MEMORY = 0.998
LEAST = 20
CLEARLY_SEEN = 4.0
PARAMETERS = 3
ALIKE = 0.05
"""Of the variance of what was ahead: if the answers' lengths leave no more of it, nobody can tell
prompts from answers."""


_PAIRS: Final = ((0, 0), (0, 1), (0, 3), (0, 2), (1, 1), (1, 3), (1, 2), (3, 3), (3, 2), (2, 2))
"""Of which columns of `Off` products are summed, in the order in which `_fit` takes them."""


class WholeAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One answer that came in one piece."""

    seconds: float
    """From dispatch to its end."""
    uncached_tokens: int
    """Of its own prompt."""
    ahead_tokens: int
    """To be computed when it was sent, its own among them."""
    computed_tokens: int
    """By its rank until its end, those among them."""
    tokens: int
    """That were generated."""
    others: float
    """Legs that decoded beside it."""


class Off(NamedTuple):
    """An answer as it differs from a rank's means."""

    ahead: float = 0.0
    computed: float = 0.0
    generated: float = 0.0
    seconds: float = 0.0


class Means:
    """What answers of one rank have in common."""

    __slots__ = ("_count", "_means")

    def __init__(self) -> None:
        self._count = 0.0
        self._means = Off()

    def off(self, answer: WholeAnswer) -> "Off":
        """How far it is from those before. It is counted then."""
        self._count = MEMORY * self._count + 1
        weight = 1 / self._count
        means = self._means
        off = Off(
            answer.ahead_tokens - means.ahead,
            answer.computed_tokens - means.computed,
            answer.tokens - means.generated,
            answer.seconds - means.seconds,
        )
        self._means = Off(*(was + weight * more for was, more in zip(means, off, strict=True)))
        # The mean is of few: of a second answer half the difference is the first one's.
        return Off(*(each * (1 - weight) ** 0.5 for each in off))


class PrefillSlope:
    """Of a rank or of a fleet."""

    __slots__ = ("_count", "_sums", "s_per_token")

    def __init__(self) -> None:
        self._count = 0.0
        self._sums = [0.0] * len(_PAIRS)
        self.s_per_token: float | None = None
        """As it was clearly seen last; None: it never was."""

    def add(self, off: Off) -> None:
        """One more answer."""
        self._count = MEMORY * self._count + 1
        self._sums = [
            MEMORY * total + off[one] * off[other]
            for total, (one, other) in zip(self._sums, _PAIRS, strict=True)
        ]
        slope, error = self._fit()
        if slope > CLEARLY_SEEN * error:
            self.s_per_token = slope

    def _fit(self) -> tuple[float, float]:
        """The slope and its standard error."""
        aa, ac, as_, ag, cc, cs, cg, ss, sg, gg = self._sums
        # What the answers' lengths explain is taken out of everything.
        per_g = 1 / gg if gg else 0.0
        varied = aa - ag * ag * per_g
        moved_c, moved_s = ac - ag * cg * per_g, as_ - ag * sg * per_g
        computed = cc - cg * cg * per_g
        if self._count < LEAST or varied <= ALIKE * aa or moved_c <= 0:
            return 0.0, inf
        if self._count * moved_c * moved_c < CLEARLY_SEEN**2 * varied * computed:
            return 0.0, inf  # what was ahead says too little of what was computed
        slope = moved_s / moved_c
        left = ss - sg * sg * per_g
        left += slope * (slope * computed - 2 * (cs - cg * sg * per_g))
        return slope, (max(0.0, left) / (self._count - PARAMETERS) * varied) ** 0.5 / moved_c
