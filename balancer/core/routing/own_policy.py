"""A policy of the operator's own, kept from doing harm.

Rules:

1. Whatever it answers, every candidate stays one: those it leaves out come last, in the order of
   `kvlb`; what it makes up or names twice is passed over.
2. If it fails, whatever it raises, or answers nothing that can be used, `kvlb` decides. That is counted,
   so it shows.
3. It orders. Of a choice only the order, the cost and the terms are taken, numbers all: who the candidate
   is, where its prompt is prefilled, and the work that is booked are as `kvlb` says.
4. What it is told of a choice can't fail a request either.
5. The candidates are its own copy of the list. An answer that doesn't end is left; one that doesn't come
   can't be: it holds up the loop.

Cost: its own, and one pass over its answer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite, isnan
from typing import Any, Final

from msgspec.structs import replace

from balancer.core.routing.cost import LoadedCandidate, RequestShape, TieBreak
from balancer.core.routing.plan import Choice
from balancer.core.routing.policies import LeastCost, Policy
from indexer.core.types import RankId

_SPARE: Final = 1024
"""Choices more than twice the candidates that an answer may have, repeated and made up."""
_MAX_TERMS: Final = 64
_MAX_NAME_CHARS: Final = 64
_WORK: Final = "work"
"""The term that is booked as the rank's load."""


class OwnPolicy:
    """A `Policy` around one."""

    def __init__(self, own: Policy, on_failure: Callable[[BaseException], None]) -> None:
        self._own = own
        self._on_failure = on_failure
        self._stand_in = LeastCost()

    def choose(
        self, shape: RequestShape, candidates: Sequence[LoadedCandidate], draw: TieBreak
    ) -> list[Choice]:
        usual = self._stand_in.choose(shape, candidates, draw)
        try:
            return _completed(self._own.choose(shape, list(candidates), draw), usual)
        except BaseException as error:  # noqa: BLE001 - somebody else's code, whatever it does
            self._on_failure(error)
            return usual

    def chosen(self, rank: RankId) -> None:
        self._stand_in.chosen(rank)
        try:
            self._own.chosen(rank)
        except BaseException as error:  # noqa: BLE001 - likewise
            self._on_failure(error)


def _completed(answer: Iterable[Choice], usual: Sequence[Choice]) -> list[Choice]:
    """Raise TypeError for an answer that holds no choice among the candidates, or what is none."""
    known = {choice.candidate.rank: choice for choice in usual}
    ordered: dict[RankId, Choice] = {}
    most = 2 * len(known) + _SPARE
    for number, choice in enumerate(islice(answer, most + 1)):
        if not isinstance(choice, Choice):
            raise TypeError(
                f"a policy's answer is a list of Choice, not of {type(choice).__name__}"
            )
        if number == most:
            raise TypeError("a policy's answer doesn't end")
        rank = choice.candidate.rank
        if rank in known and rank not in ordered:
            ordered[rank] = _weighed(choice, known[rank])
    if known and not ordered:
        raise TypeError("a policy's answer names no candidate")
    return [*ordered.values(), *(known[rank] for rank in known if rank not in ordered)]


def _weighed(choice: Choice, usual: Choice) -> Choice:
    """The usual choice at the policy's cost. Raises TypeError for what is no number."""
    cost_s = float(choice.cost_s)
    if isnan(cost_s):
        raise TypeError("the cost of a policy's choice is a number")
    if choice.terms == usual.terms:
        return usual if cost_s == usual.cost_s else replace(usual, cost_s=cost_s)
    terms = _checked(choice.terms)
    if _WORK in usual.terms:
        terms[_WORK] = usual.terms[_WORK]
    # What the way not taken would cost can't be held against terms that `kvlb` doesn't know.
    return replace(usual, cost_s=cost_s, terms=terms, other=None)


def _checked(terms: Mapping[Any, Any]) -> dict[str, float]:
    checked: dict[str, float] = {}
    for name, value in islice(terms.items(), _MAX_TERMS + 1):
        if not isinstance(name, str) or not name.isprintable() or len(name) > _MAX_NAME_CHARS:
            raise TypeError("a term of a policy's choice has a short printable name")
        checked[name] = float(value)
    if len(checked) > _MAX_TERMS or not all(map(isfinite, checked.values())):
        raise TypeError("the terms of a policy's choice are a few finite numbers")
    return checked
