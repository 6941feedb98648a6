"""What the decision log keeps of a record until it is asked for."""

from balancer.core.decision_log import DETAILED, KEPT_CANDIDATES, DecisionLog
from balancer.core.fleet.snapshot import Instance
from balancer.core.record import RequestRecord
from balancer.core.routing.plan import Candidate, Choice, Reason, RoutePlan
from indexer.core.types import InstanceId, RankId


def choice(number: int) -> Choice:
    name = InstanceId(f"http://e{number}")
    instance = Instance(id=name, alias=f"e{number}")
    return Choice(
        candidate=Candidate(rank=RankId(name, 0), instance=instance),
        cost_s=number / 10,
        terms={"work": number / 10},
    )


def record_with(candidates: int) -> RequestRecord:
    choices = [choice(number) for number in range(candidates)]
    plan = RoutePlan(decode=choices[0], reason=Reason.AGGREGATED, considered=tuple(choices[::-1]))
    return RequestRecord(request_id="r", path="/v1/completions", arrived_s=1.0, plan=plan)


def test_why_survives_the_shortening_of_a_large_fleets_plan() -> None:
    """The rival is the cheapest other candidate, wherever it stood."""
    log = DecisionLog(limit=2)
    log.add(record_with(10 * KEPT_CANDIDATES))

    assert str(log.latest(1)[0]["why"]).startswith("e0 costs 0.1 less than e1;")


def test_record_itself_stays_as_it_is() -> None:
    """Who wrote it still reads it: its log line, its metrics."""
    record = record_with(10 * KEPT_CANDIDATES)
    DecisionLog(limit=1).add(record)

    assert record.plan is not None
    assert len(record.plan.considered) == 10 * KEPT_CANDIDATES


def test_oldest_goes_first() -> None:
    """Newest first when asked for."""
    log = DecisionLog(limit=2)
    for candidates in (1, 2, 3):
        log.add(record_with(candidates))

    assert [each["why"] for each in log.latest(5)] == [
        "e0 costs 0.1 less than e1; the largest difference is `work`: 0 against 0.1",
        "e0 costs 0.1 less than e1; the largest difference is `work`: 0 against 0.1",
    ]


def test_few_decisions_are_told_with_their_candidates() -> None:
    """Who asks for many reads the log as a whole, and does without."""
    log = DecisionLog(limit=2)
    log.add(record_with(10 * KEPT_CANDIDATES))
    log.add(RequestRecord(request_id="unplanned", path="/v1/completions", arrived_s=1.0))

    few, many = log.latest(DETAILED), log.latest(DETAILED + 1)

    assert few[0]["plan"] is None
    assert [each["instance"] for each in few[1]["plan"]["decode"]["considered"]] == [
        f"e{number}" for number in range(KEPT_CANDIDATES)
    ]
    assert not any("plan" in each for each in many)
