"""A policy of the operator's own can order candidates, and can't do harm."""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from balancer.core.fleet.snapshot import Instance
from balancer.core.load.ledger import RankLoad, TransferRates
from balancer.core.routing.cost import LoadedCandidate, RequestShape, TieBreak, estimate_all
from balancer.core.routing.own_policy import OwnPolicy
from balancer.core.routing.plan import Candidate, Choice
from balancer.core.routing.policies import seeded_draw
from balancer.core.routing.ways import Offer
from indexer.core.types import InstanceId, RankId, Trust

SHAPE = RequestShape(prompt_tokens=100)


def candidate(number: int) -> LoadedCandidate:
    instance = Instance(id=InstanceId(f"http://e{number}:1"), alias=f"e{number}")
    return LoadedCandidate(
        candidate=Candidate(
            rank=RankId(instance.id, 0),
            instance=instance,
            overlap_tokens=0,
            predicted_tokens=0,
            trust=Trust.EXACT,
            block_size=16,
        ),
        load=RankLoad(requests=number),  # so that `kvlb` orders them by number
    )


CANDIDATES = [candidate(number) for number in range(3)]
ELSEWHERE = estimate_all(SHAPE, [candidate(9)])


class Answering:
    """Answers what it is told to, made of the usual choices."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.told: list[RankId] = []

    def choose(
        self,
        shape: RequestShape,
        candidates: Sequence[LoadedCandidate],
        draw: TieBreak,  # noqa: ARG002
    ) -> list[Choice]:
        answer: list[Choice] = self.answer(estimate_all(shape, candidates))
        return answer

    def chosen(self, rank: RankId) -> None:
        if self.answer is None:
            raise KeyError(rank)
        self.told.append(rank)


class Leaving(Answering):
    """Ends the process when it is told of a choice."""

    def __init__(self) -> None:
        super().__init__(list)

    def chosen(self, rank: RankId) -> None:  # noqa: ARG002
        raise SystemExit


def each(**changes: Any) -> Callable[[list[Choice]], list[Choice]]:
    """The usual choices with other fields."""
    return lambda usual: [replace(choice, **changes) for choice in usual]


def raising(error: BaseException) -> Callable[[object], None]:
    def fail(_: object) -> None:
        raise error

    return fail


def order(answer: Any) -> tuple[list[str], list[str]]:
    """Aliases in the order decided, and the failures counted."""
    failures: list[str] = []
    policy = OwnPolicy(Answering(answer), lambda error: failures.append(type(error).__name__))
    choices = policy.choose(SHAPE, CANDIDATES, seeded_draw(1))
    return [choice.candidate.instance.alias for choice in choices], failures


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(lambda usual: usual[::-1], ["e2", "e1", "e0"], id="its-own-order"),
        pytest.param(lambda usual: usual[1:2], ["e1", "e0", "e2"], id="one-named"),
        pytest.param(lambda usual: [usual[2], usual[2]], ["e2", "e0", "e1"], id="one-named-twice"),
        pytest.param(lambda usual: [*ELSEWHERE, usual[1]], ["e1", "e0", "e2"], id="one-made-up"),
        pytest.param(tuple, ["e0", "e1", "e2"], id="a-tuple"),
    ],
)
def test_answer_is_completed(answer: Any, expected: list[str]) -> None:
    """Everybody stays a candidate."""
    assert order(answer) == (expected, [])


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        pytest.param(lambda _: 1 / 0, "ZeroDivisionError", id="it-fails"),
        pytest.param(raising(SystemExit(3)), "SystemExit", id="it-exits"),
        pytest.param(raising(asyncio.CancelledError()), "CancelledError", id="it-cancels"),
        pytest.param(
            raising(BaseExceptionGroup("g", [SystemExit()])), "BaseExceptionGroup", id="a-group"
        ),
        pytest.param(lambda usual: itertools.repeat(usual[0]), "TypeError", id="no-end"),
        pytest.param(each(candidate=None), "AttributeError", id="no-candidate"),
        pytest.param(each(cost_s=None), "TypeError", id="no-cost"),
        pytest.param(each(cost_s=math.nan), "TypeError", id="cost-is-no-number"),
        pytest.param(each(terms=None), "AttributeError", id="no-terms"),
        pytest.param(each(terms={"x": "y"}), "ValueError", id="term-of-text"),
        pytest.param(each(terms={"x": math.inf}), "TypeError", id="term-without-end"),
        pytest.param(each(terms={"x": 10**400}), "OverflowError", id="term-too-large"),
        pytest.param(each(terms={1: 1.0}), "TypeError", id="name-of-a-number"),
        pytest.param(each(terms={"x\r\ny": 1.0}), "TypeError", id="name-with-a-break"),
        pytest.param(each(terms={"x" * 65: 1.0}), "TypeError", id="name-too-long"),
        pytest.param(
            each(terms={str(number): 1.0 for number in range(65)}), "TypeError", id="many-terms"
        ),
        pytest.param(lambda _: None, "TypeError", id="nothing"),
        pytest.param(lambda _: [], "TypeError", id="nobody"),
        pytest.param(lambda _: list(ELSEWHERE), "TypeError", id="a-stranger"),
        pytest.param(lambda _: ["e0"], "TypeError", id="no-choice"),
    ],
)
def test_failure_is_counted_and_kvlb_decides(answer: Any, failure: str) -> None:
    """A request is never lost by it, and the choices are the usual ones."""
    assert order(answer) == (["e0", "e1", "e2"], [failure])


def test_choice_is_told() -> None:
    """And what it makes of that can't fail a request."""
    failures: list[BaseException] = []
    well, badly, leaving = Answering(list), Answering(None), Leaving()
    rank = CANDIDATES[0].candidate.rank

    OwnPolicy(well, failures.append).chosen(rank)
    OwnPolicy(badly, failures.append).chosen(rank)
    OwnPolicy(leaving, failures.append).chosen(rank)

    assert well.told == [rank]
    assert [type(failure) for failure in failures] == [KeyError, SystemExit]


def test_nobody_to_choose_from_is_no_failure() -> None:
    """As with every other policy."""
    policy = OwnPolicy(Answering(list), lambda error: pytest.fail(str(error)))

    assert policy.choose(SHAPE, [], seeded_draw(1)) == []


def test_where_a_prompt_is_prefilled_is_not_its_business() -> None:
    """A choice it made itself says nothing of the way; the engine may need a prefill leg."""
    source = ELSEWHERE[0]
    needy = replace(
        CANDIDATES[0],
        offers=(Offer(prefill=source, transfer=TransferRates()),),
        may_local=False,
    )
    own = Answering(lambda usual: [Choice(candidate=usual[0].candidate, cost_s=7.0)])
    failures: list[BaseException] = []

    (chosen,) = OwnPolicy(own, failures.append).choose(SHAPE, [needy], seeded_draw(1))

    assert (chosen.cost_s, chosen.prefill, chosen.other) == (7.0, source, None)
    assert not failures


def test_only_cost_and_terms_of_a_choice_are_taken() -> None:
    """Whatever else it says may be nonsense; the work that is booked is the usual one."""
    wrong: Any = {"prefill": "p0", "other": "other", "cost_s": 3}
    same = OwnPolicy(Answering(each(**wrong)), lambda error: pytest.fail(str(error)))
    own = OwnPolicy(
        Answering(each(**wrong, terms={"work": -5, "price": 2})),
        lambda error: pytest.fail(str(error)),
    )
    usual = estimate_all(SHAPE, CANDIDATES)

    cheaper = same.choose(SHAPE, CANDIDATES, seeded_draw(1))
    priced = own.choose(SHAPE, CANDIDATES, seeded_draw(1))

    assert cheaper == [replace(choice, cost_s=3.0) for choice in usual]
    assert priced == [
        replace(choice, cost_s=3.0, terms={"work": choice.terms["work"], "price": 2.0})
        for choice in usual
    ]


def test_list_of_candidates_is_its_own() -> None:
    """What it does to it changes nothing for others."""

    class Clearing(Answering):
        def choose(self, shape: Any, candidates: Any, draw: Any) -> list[Choice]:
            choices = super().choose(shape, candidates, draw)
            candidates.clear()
            return choices

    given = list(CANDIDATES)
    OwnPolicy(Clearing(list), lambda error: pytest.fail(str(error))).choose(
        SHAPE, given, seeded_draw(1)
    )

    assert given == CANDIDATES
