"""A policy of the operator's own, kept from doing harm.

Rules:

1. Whatever it answers, every candidate stays one: those it leaves out come last, in the order of
   `kvlb`; what it makes up or names twice is passed over.
2. If it fails, or answers nothing that can be used, `kvlb` decides. That is counted, so it shows.
3. It orders; whether and where a candidate's prompt is prefilled elsewhere isn't its business.
4. What it is told of a choice can't fail a request either.

Cost: its own, and one pass over its answer.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from balancer.core.routing.cost import LoadedCandidate, RequestShape, TieBreak
from balancer.core.routing.plan import Choice
from balancer.core.routing.policies import LeastCost, Policy
from indexer.core.types import RankId


class OwnPolicy:
    """A `Policy` around one."""

    def __init__(self, own: Policy, on_failure: Callable[[Exception], None]) -> None:
        self._own = own
        self._on_failure = on_failure
        self._stand_in = LeastCost()

    def choose(
        self, shape: RequestShape, candidates: Sequence[LoadedCandidate], draw: TieBreak
    ) -> list[Choice]:
        usual = self._stand_in.choose(shape, candidates, draw)
        try:
            return _completed(self._own.choose(shape, candidates, draw), usual)
        except Exception as error:  # noqa: BLE001 - somebody else's code, whatever it does
            self._on_failure(error)
            return usual

    def chosen(self, rank: RankId) -> None:
        self._stand_in.chosen(rank)
        try:
            self._own.chosen(rank)
        except Exception as error:  # noqa: BLE001 - likewise
            self._on_failure(error)


def _completed(answer: Sequence[Choice], usual: Sequence[Choice]) -> list[Choice]:
    """Raise TypeError for an answer that holds no choice among the candidates."""
    known = {choice.candidate.rank: choice for choice in usual}
    ordered: dict[RankId, Choice] = {}
    for choice in answer:
        if not isinstance(choice, Choice):
            raise TypeError(
                f"a policy's answer is a list of Choice, not of {type(choice).__name__}"
            )
        if choice.candidate.rank in known:
            ordered.setdefault(
                choice.candidate.rank, _with_way(choice, known[choice.candidate.rank])
            )
    if known and not ordered:
        raise TypeError("a policy's answer names no candidate")
    return [*ordered.values(), *(known[rank] for rank in known if rank not in ordered)]


def _with_way(choice: Choice, usual: Choice) -> Choice:
    """A policy decides who answers; where its prompt is prefilled is decided as always."""
    if choice.terms == usual.terms:
        return choice
    return replace(choice, prefill=usual.prefill, other=None)
