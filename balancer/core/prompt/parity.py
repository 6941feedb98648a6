"""Whether a model's local tokens are still to be believed, by comparison with its engine's own.

Rules:

1. The first `EAGER` prompts of a model are compared, then one each `interval_s`; where an engine counted
   another number of tokens than we did, the next one is, but no more than one a second.
2. One difference, seen twice in a row of the same prompt, and the model's local tokens are no longer
   used: wrong tokens are worse than none. That holds until the balancer is restarted.
3. Of a difference its place is kept, never the tokens.

Cost: constant per prompt; a comparison is linear in its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

EAGER: Final = 5
DOUBT_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two readings of a prompt part."""

    index: int
    """Of the first token that differs, or that only one of them has."""
    own_tokens: int
    engine_tokens: int
    instance: str = ""
    """Alias of the engine."""


@dataclass(slots=True, kw_only=True)
class ModelParity:
    """What is known of one model."""

    compared: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    compared_s: float | None = None
    is_doubted: bool = False
    difference: Difference | None = None


class ParityBook:
    """One per process. Times are monotonic."""

    def __init__(self, interval_s: float) -> None:
        """`interval_s` 0: nothing is ever compared."""
        self._interval_s = interval_s
        self.models: dict[str, ModelParity] = {}

    def is_due(self, model: str, now_s: float) -> bool:
        """Tell if a prompt of `model` should be compared now; if so, that is noted as done."""
        known = self.models.setdefault(model, ModelParity())
        if not self._interval_s or known.difference is not None:
            return False
        pause_s = DOUBT_PAUSE_S if known.is_doubted else self._interval_s
        is_over = known.compared_s is None or now_s - known.compared_s >= pause_s
        if not is_over and known.compared >= EAGER:
            return False
        known.compared += 1
        known.compared_s = now_s
        known.is_doubted = False
        return True

    def doubt(self, model: str) -> None:
        """An engine has counted other tokens than we did."""
        if model in self.models:
            self.models[model].is_doubted = True

    def count(self, model: str, outcome: str) -> None:
        """A comparison has ended: `same`, `different`, or why it couldn't be made."""
        outcomes = self.models.setdefault(model, ModelParity()).outcomes
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    def distrust(self, model: str, difference: Difference) -> None:
        """Its local tokens are not used any more."""
        self.models.setdefault(model, ModelParity()).difference = difference

    def is_distrusted(self, model: str) -> bool:
        known = self.models.get(model)
        return known is not None and known.difference is not None


def find_difference(own: Sequence[int], engine: Sequence[int]) -> Difference | None:
    """Where they part; None if they are equal."""
    if list(own) == list(engine):
        return None
    pairs = enumerate(zip_longest(own, engine))
    index = next(at for at, (left, right) in pairs if left != right)
    return Difference(index=index, own_tokens=len(own), engine_tokens=len(engine))
