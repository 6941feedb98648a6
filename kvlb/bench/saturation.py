"""What a fleet carries: the speed that loads are shares of.

A fleet is saturated at the highest speed at which the best of four good baselines
(`formulas`) still reaches a mean time to the first token of half a second + what one mean prompt
takes if none of it is cached. Found once, with the first seed, by halving, and kept here:
`kvlb bench routing --calibrate` finds it again.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean

from kvlb.bench.figures import SLACK_S
from kvlb.bench.formulas import FORMULAS
from kvlb.bench.run import Job, Scenario, play
from kvlb.bench.workloads import WORKLOADS

CLOSE_ENOUGH = 1.03

SATURATION: Mapping[tuple[str, int], float] = {
    ("weka", 4): 4.761,
    ("chat", 4): 9.263,
    ("agents", 4): 1.634,
    ("arxiv", 4): 1.197,
    ("conversation", 4): 1.516,
}
"""Speed by workload and engines."""


def find_saturation(place: tuple[str, int]) -> float:
    """The highest speed that one of the baselines carries, by workload and engines."""
    name, engines = place
    workload = WORKLOADS[name]
    calls = workload.calls(engines, 1.0, 0)
    mean_s = fmean(call.prompt.tokens for call in calls) / workload.engine.prefill_tokens_per_s
    limit_s = SLACK_S + mean_s
    span_s = max(call.at_s for call in calls if call.after is None)
    # Between an idle fleet and one that would have to compute four times what it can.
    most = 4 * engines * span_s / (len(calls) * mean_s)
    low, high = most / 64, most
    policies = list(FORMULAS)
    while high / low > CLOSE_ENOUGH:
        speed = sqrt(low * high)
        scenario = Scenario(workload=name, engines=engines, speed=speed, seed=0)
        carrying = _carrying(scenario, policies, limit_s * len(calls))
        if carrying is None:
            high = speed
        else:
            low = speed
            # It is likely to be the one that carries more, too.
            policies.sort(key=lambda policy: policy != carrying)
    return low


def _carrying(scenario: Scenario, policies: Sequence[str], patience_s: float) -> str | None:
    """The first policy that keeps its times to first tokens within that, added up."""
    for policy in policies:
        if play(Job(scenario=scenario, policy=policy), patience_s=patience_s):
            return policy
    return None
