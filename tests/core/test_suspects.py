"""Who is asked again after a failure, and who isn't."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.errors import (
    BalancerError,
    ConnectTimeoutError,
    EngineClosedError,
    EngineError,
    EngineLostError,
    EngineRefusedError,
    EngineUnreachableError,
    HandOverFailedError,
    LeaseEndedError,
    StreamCutError,
)
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.reliability.suspects import Suspects
from balancer.core.routing.plan import Candidate, Choice, Reason, RoutePlan
from indexer.core.types import InstanceId, RankId

CLOSED = EngineClosedError("closed")
NOT_LOADED = HandOverFailedError("not loaded")


def choice(name: str, role: Role) -> Choice:
    instance = Instance(id=InstanceId(f"http://{name}"), alias=name, role=role, ranks=(0, 1))
    return Choice(
        candidate=Candidate(instance=instance, rank=next(iter(instance.rank_ids()))), cost_s=0.0
    )


def plan(decode: str, prefill: str | None = None) -> RoutePlan:
    return RoutePlan(
        decode=choice(decode, Role.DECODE),
        prefill=None if prefill is None else choice(prefill, Role.PREFILL),
        reason=Reason.REMOTE_PREFILL,
        prompt_tokens=10,
    )


def names(ranks: frozenset[RankId]) -> set[str]:
    return {rank.instance.removeprefix("http://") for rank in ranks}


@pytest.mark.parametrize(
    ("failures", "out"),
    [
        pytest.param([(CLOSED, plan("d0", "p0"))], {"d0"}, id="answer"),
        pytest.param([(NOT_LOADED, plan("d0", "p0"))], {"p0"}, id="hand-over"),
        pytest.param(
            [(NOT_LOADED, plan("d0", "p0")), (NOT_LOADED, plan("d1", "p1"))],
            {"p0", "p1"},
            id="hand-overs-to-two",
        ),
        pytest.param(
            [(NOT_LOADED, plan("d0", "p0")), (NOT_LOADED, plan("d0", "p1"))],
            {"p0", "p1", "d0"},
            id="hand-overs-to-one",
        ),
        pytest.param([(NOT_LOADED, plan("d0"))], {"d0"}, id="loaded-from-a-peer"),
        pytest.param([(LeaseEndedError("late"), plan("d0", "p0"))], set(), id="nobodys-fault"),
    ],
)
def test_failures_say_who_is_out(
    failures: list[tuple[BalancerError, RoutePlan]], out: set[str]
) -> None:
    """Every rank of an instance, or none."""
    suspects = Suspects()
    for error, failed in failures:
        suspects.note(error, failed)

    assert names(suspects.ranks) == out
    assert len(suspects.ranks) == 2 * len(out)


def test_who_may_be_another_engine_is_told() -> None:
    """The source of a hand-over that failed, and nobody else."""
    source = Suspects().note(NOT_LOADED, plan("d0", "p0"))

    assert source is not None
    assert source.alias == "p0"
    assert Suspects().note(CLOSED, plan("d0", "p0")) is None


@given(st.lists(st.sampled_from([CLOSED, NOT_LOADED]), max_size=4))
def test_nobody_comes_back_within_a_request(errors: list[BalancerError]) -> None:
    """The law: who is out stays out."""
    suspects = Suspects()
    for number, error in enumerate(errors):
        before = suspects.ranks
        suspects.note(error, plan("d0", f"p{number}"))

        assert before <= suspects.ranks


def test_the_latest_failure_is_known_by_itself() -> None:
    """What comes after it takes its place; nobody's fault leaves nobody there."""
    suspects = Suspects()
    seen = []
    failures = (
        (CLOSED, plan("d0")),
        (NOT_LOADED, plan("d1", "p0")),
        (LeaseEndedError("late"), plan("d1")),
    )
    for error, failed in failures:
        suspects.note(error, failed)
        seen.append(names(suspects.latest))

    assert seen == [{"d0"}, {"p0"}, set()]
    assert names(suspects.ranks) == {"d0", "p0"}


@pytest.mark.parametrize(
    ("failures", "exclusions"),
    [
        pytest.param([(CLOSED, plan("d0"))], [{"d0"}, {"d0"}], id="answer"),
        pytest.param([(NOT_LOADED, plan("d0", "p0"))], [{"p0"}, {"p0"}, {"d0"}], id="hand-over"),
        pytest.param(
            [(NOT_LOADED, plan("d0", "p0")), (CLOSED, plan("d1", "p0"))],
            [{"p0", "d1"}, {"d1"}, {"d0", "d1"}],
            id="hand-over-and-answer",
        ),
        pytest.param(
            [(CLOSED, plan("d1", "p0")), (NOT_LOADED, plan("d0", "p0"))],
            [{"p0", "d1"}, {"p0", "d1"}, {"d0", "d1"}],
            id="answer-and-hand-over",
        ),
        pytest.param(
            [(NOT_LOADED, plan("d0", "p0")), (NOT_LOADED, plan("d1", "p0"))],
            [{"p0"}, {"p0"}, {"d0", "d1"}],
            id="nobody-can-load",
        ),
    ],
)
def test_who_was_to_load_is_out_in_place_of_who_handed_over(
    failures: list[tuple[BalancerError, RoutePlan]], exclusions: list[set[str]]
) -> None:
    """Last of all, where there was a hand-over."""
    suspects = Suspects()
    for error, failed in failures:
        suspects.note(error, failed)

    assert [names(each) for each in suspects.exclusions()] == exclusions


def refused(status: int) -> EngineRefusedError:
    return EngineRefusedError(status, (), b"", alias="d0")


@pytest.mark.parametrize(
    ("error", "is_spent"),
    [
        (CLOSED, True),
        (StreamCutError("cut"), True),
        (EngineLostError("lost"), True),
        (refused(500), True),
        (refused(503), False),
        (EngineUnreachableError("no"), False),
        (ConnectTimeoutError("late"), False),
    ],
)
def test_what_may_be_the_prompts_doing_is_asked_of_nobody_twice(
    error: EngineError, is_spent: bool
) -> None:
    """Who was full or out of reach saw nothing of it, and may be asked when nobody else is left."""
    suspects = Suspects()
    suspects.note(error, plan("d0"))
    suspects.note(refused(503), plan("d1"))

    assert [names(each) for each in suspects.exclusions()] == [
        {"d0", "d1"},
        {"d0", "d1"} if is_spent else {"d1"},
    ]
