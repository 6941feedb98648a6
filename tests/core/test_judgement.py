"""Was the way taken the right one: estimates, what was paid, regret."""

from typing import Any

import pytest

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.routing.judgement import judge, judge_record
from balancer.core.routing.plan import Candidate, Choice, OtherWay, Reason, RoutePlan
from indexer.core.types import InstanceId, RankId


def choice(alias: str, terms: dict[str, float], **fields: Any) -> Choice:
    instance = Instance(id=InstanceId(f"http://{alias}:8000"), alias=alias, role=Role.DECODE)
    candidate = Candidate(rank=RankId(instance.id, 0), instance=instance)
    return Choice(candidate=candidate, cost_s=sum(terms.values()), terms=terms, **fields)


def other(cost_s: float, *, remote: bool) -> OtherWay:
    return OtherWay(remote=remote, cost_s=cost_s, terms={})


LOCAL = RoutePlan(
    decode=choice(
        "d0", {"work": 1.0, "stall": 0.5, "in_flight": 9.0}, other=other(2.0, remote=True)
    ),
    reason=Reason.LOCAL_FASTER,
)
SOURCE = choice("p0", {"work": 1.0, "delay": 3.0})
REMOTE = RoutePlan(
    decode=choice(
        "d0",
        {"prefill": 4.0, "transfer": 0.5, "step": 0.5},
        prefill=SOURCE,
        other=other(6.0, remote=False),
    ),
    prefill=SOURCE,
    reason=Reason.REMOTE_PREFILL,
)


def leg(kind: str, started_s: float, first_byte_s: float | None, **fields: Any) -> LegRecord:
    return LegRecord(
        kind=kind,
        alias="e",
        overlap_tokens=0,
        started_s=started_s,
        first_byte_s=first_byte_s,
        **fields,
    )


def record(plan: RoutePlan | None, *legs: LegRecord, stream: bool = True) -> RequestRecord:
    return RequestRecord(
        request_id="r", path="/", arrived_s=0.0, plan=plan, stream=stream, legs=list(legs)
    )


@pytest.mark.parametrize(
    ("took_s", "paid_s", "regret_s"),
    [pytest.param(1.2, 1.7, 0.0, id="right"), pytest.param(2.0, 2.5, 0.5, id="late")],
)
def test_regret_is_what_was_paid_beyond_the_alternative(
    took_s: float, paid_s: float, regret_s: float
) -> None:
    """The wait as it was, what others pay as it was expected."""
    judged = judge(LOCAL, took_s)

    assert judged is not None
    assert not judged.remote
    assert (judged.estimated_s, judged.alternative_s) == (1.5, 2.0)
    assert (judged.paid_s, judged.regret_s) == pytest.approx((paid_s, regret_s))


def test_a_remote_way_is_judged_by_both_legs() -> None:
    """From the first leg's sending to the decode leg's first byte; what P's others pay counts."""
    judged = judge_record(record(REMOTE, leg("prefill", 1.0, 2.0), leg("decode", 2.0, 5.0)))

    assert judged is not None
    assert judged.remote
    assert (judged.took_s, judged.paid_s, judged.regret_s) == pytest.approx((4.0, 7.0, 1.0))


def test_without_an_alternative_there_is_nothing_to_judge() -> None:
    """Nor without a plan."""
    forced = RoutePlan(decode=choice("d0", {"work": 1.0}), reason=Reason.FORCED_LOCAL)

    assert judge(forced, 1.0) is None
    assert judge_record(record(None)) is None


@pytest.mark.parametrize(
    "spoilt",
    [
        pytest.param(record(LOCAL, leg("decode", 0, 1), stream=False), id="not-streamed"),
        pytest.param(record(LOCAL, leg("decode", 0, 1), leg("decode", 1, 2)), id="retried"),
        pytest.param(record(LOCAL, leg("decode", 0, 1, error="cut")), id="failed"),
        pytest.param(record(LOCAL, leg("decode", 0, None)), id="no-first-byte"),
        pytest.param(record(LOCAL), id="never-sent"),
    ],
)
def test_what_did_not_go_as_planned_has_no_regret(spoilt: RequestRecord) -> None:
    """Its time says nothing about the choice; the estimates still count."""
    judged = judge_record(spoilt)

    assert judged is not None
    assert (judged.took_s, judged.paid_s, judged.regret_s) == (None, None, None)
    assert judged.estimated_s == 1.5


def test_encode_legs_are_no_part_of_the_judgement() -> None:
    """Both ways would have needed them."""
    encode = leg("encode", 0.0, 5.0)
    plain = record(LOCAL, leg("decode", 5.0, 7.0))
    with_media = record(LOCAL, encode, leg("decode", 5.0, 7.0))

    assert judge_record(with_media) == judge_record(plain)
