"""What answers in one piece tell of prefill: seconds per computed token, by how they differ. Pure.

Nobody sees when the prompt of such an answer was computed. Over many answers it shows all the same: of two
that generate as much, the one whose rank computed more meanwhile takes longer.

Rules:

1. Seconds from dispatch to end = wait + slope * tokens computed meanwhile + step * tokens generated, by least
   squares. Computed meanwhile are those queued there before it, its own, and those that came while it was
   there: an engine computes in the same steps in which it decodes. What else it waited for is noise
   around a mean. Each rank is centred on its own means: ranks differ.
2. A slope counts only once it is CLEARLY_SEEN: so many times its standard error, of at least LEAST answers.
   Prompts that are all alike tell nothing, nor do those that are long as their answers are.
3. Who stays longer for any other reason sees more prompts come, too, at the pace at which they always come;
   who stays longer because of prompts has seen more than that. So a slope counts only where stays that
   are longer by a second have seen CLEARLY_MORE than a usual second of that rank.
4. What was clearly seen holds until something else is. Old answers fade: half of what is known is of the
   last 350.

Cost: some forty operations per answer.
"""

import msgspec

MEMORY = 0.998
LEAST = 20
PARAMETERS = 3
CLEARLY_SEEN = 4.0
CLEARLY_MORE = 1.25
ALIKE = 0.05
"""Of the variance of what is computed: if the answers' lengths leave no more of it, nobody can tell
prompts from answers."""


class WholeAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One answer that came in one piece."""

    seconds: float
    """From dispatch to its end."""
    uncached_tokens: int
    """Of its own prompt."""
    computed_tokens: int
    """By its rank meanwhile, those among them."""
    tokens: int
    """That were generated."""
    others: float
    """Legs that decoded beside it."""


class Off(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How one answer differs from those before it on its rank."""

    computed: float
    generated: float
    seconds: float
    usual_per_s: float
    """Tokens that the rank computes in a usual second of a stay."""


class Means:
    """What answers of one rank have in common."""

    __slots__ = ("_computed", "_count", "_generated", "_seconds")

    def __init__(self) -> None:
        self._count = 0.0
        self._computed = self._generated = self._seconds = 0.0

    def off(self, answer: WholeAnswer) -> Off:
        """How far it is from those before. It is counted then."""
        self._count = MEMORY * self._count + 1
        weight = 1 / self._count
        computed = answer.computed_tokens - self._computed
        generated = answer.tokens - self._generated
        seconds = answer.seconds - self._seconds
        self._computed += weight * computed
        self._generated += weight * generated
        self._seconds += weight * seconds
        # The mean is of few: of a second answer half the difference is the first one's.
        own = (1 - weight) ** 0.5
        return Off(
            computed=computed * own,
            generated=generated * own,
            seconds=seconds * own,
            usual_per_s=self._computed / max(self._seconds, 1e-9),
        )


class PrefillSlope:
    """Of a rank or of a fleet."""

    __slots__ = ("_cc", "_cg", "_count", "_cs", "_gg", "_gs", "_ss", "s_per_token")

    def __init__(self) -> None:
        self._count = 0.0
        self._cc = self._gg = self._ss = 0.0
        self._cg = self._cs = self._gs = 0.0
        self.s_per_token: float | None = None
        """As it was clearly seen last; None: it never was."""

    def add(self, off: Off) -> None:
        """One more answer."""
        computed, generated, seconds = off.computed, off.generated, off.seconds
        self._count = MEMORY * self._count + 1
        self._cc = MEMORY * self._cc + computed * computed
        self._gg = MEMORY * self._gg + generated * generated
        self._ss = MEMORY * self._ss + seconds * seconds
        self._cg = MEMORY * self._cg + computed * generated
        self._cs = MEMORY * self._cs + computed * seconds
        self._gs = MEMORY * self._gs + generated * seconds
        if self._count >= LEAST:
            self._fit(off.usual_per_s)

    def _fit(self, usual_per_s: float) -> None:
        # What the answers' lengths explain is taken out of both.
        per_g = 1 / self._gg if self._gg else 0.0
        computed = self._cc - self._cg * self._cg * per_g
        seconds = self._ss - self._gs * self._gs * per_g
        both = self._cs - self._cg * self._gs * per_g
        if computed <= ALIKE * self._cc or both <= CLEARLY_MORE * usual_per_s * seconds:
            return
        slope = both / computed
        left = max(0.0, seconds - slope * both)
        if slope > CLEARLY_SEEN * (left / (self._count - PARAMETERS) / computed) ** 0.5:
            self.s_per_token = slope
