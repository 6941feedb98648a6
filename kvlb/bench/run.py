"""One run: a workload on a fleet under a policy."""

from collections.abc import Sequence
from math import inf
from typing import get_args

import msgspec

from balancer.core.routing.policies import Policy, named_policy
from balancer.core.settings.routing import PolicyName
from kvlb.bench.clock import VirtualClock
from kvlb.bench.figures import Figures, summarize
from kvlb.bench.fleet import VirtualFleet, equal_engines
from kvlb.bench.formulas import FORMULAS, Formula
from kvlb.bench.play import Outcome, Play
from kvlb.bench.workloads import WORKLOADS

POLICIES: Sequence[PolicyName] = (
    "round_robin",
    "least_loaded",
    "session",
    "prefix_overlap",
    "kvlb",
)
OURS = "kvlb"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent where."""

    workload: str
    engines: int
    speed: float
    seed: int
    one_slow: bool = False
    limit: int | None = None
    """Only the first calls of the workload; None: all."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario under a policy."""

    scenario: Scenario
    policy: str


def policy_by_name(name: str) -> Policy:
    """A fresh one: our own, or another balancer's formula."""
    if name in FORMULAS:
        return Formula(FORMULAS[name])
    (own,) = (each for each in get_args(PolicyName) if each == name)
    return named_policy(own)


def play(job: Job, *, patience_s: float = inf) -> list[Outcome]:
    """Outcomes of all calls; none if their times to first tokens add up to more than that."""
    scenario = job.scenario
    workload = WORKLOADS[scenario.workload]
    fleet = VirtualFleet(
        VirtualClock(),
        engines=equal_engines(workload.engine, scenario.engines, one_slow=scenario.one_slow),
        policy=policy_by_name(job.policy),
        seed=scenario.seed,
    )
    calls = workload.calls(scenario.engines, scenario.speed, scenario.seed)[: scenario.limit]
    return Play(fleet, calls, patience_s=patience_s).run()


def run(job: Job) -> Figures:
    """Figures of one run."""
    scenario = job.scenario
    return summarize(play(job), WORKLOADS[scenario.workload].engine, scenario.engines)
