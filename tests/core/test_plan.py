"""The values of a decision: names that are also header values and metric labels."""

import re

import pytest

from balancer.core.fleet.snapshot import Instance
from balancer.core.routing.plan import Candidate, Choice, Reason, RoutePlan
from indexer.core.types import InstanceId, RankId, Trust

CANDIDATE = Candidate(
    rank=RankId(InstanceId("http://e0:8000"), 0),
    instance=Instance(id=InstanceId("http://e0:8000"), alias="e0"),
)


@pytest.mark.parametrize("reason", list(Reason))
def test_a_reason_is_a_label(reason: Reason) -> None:
    """Lower case, no spaces: fit for a header and for Prometheus."""
    assert re.fullmatch(r"[a-z_]+", reason)


def test_a_candidate_is_not_trusted_by_default() -> None:
    """Whoever knows nothing claims nothing."""
    assert (CANDIDATE.trust, CANDIDATE.overlap_tokens) == (Trust.LOAD_ONLY, 0)


def test_a_plan_is_a_value() -> None:
    """Equal plans are equal, and none can be changed."""
    choice = Choice(candidate=CANDIDATE, cost_s=1.0)
    plan = RoutePlan(decode=choice, reason=Reason.AGGREGATED)

    assert plan == RoutePlan(
        decode=Choice(candidate=CANDIDATE, cost_s=1.0), reason=Reason.AGGREGATED
    )
    with pytest.raises(AttributeError):
        choice.cost_s = 2.0  # type: ignore[misc]
