"""What a fleet carries: the speed that loads are shares of.

A fleet is saturated at the highest speed at which the best of four good baselines
(`formulas`) still reaches a mean time to the first token of half a second + what one mean prompt
takes if none of it is cached. Found once, with the first seed, and kept here:
`kvlb bench routing --calibrate` finds it again.
"""

from collections.abc import Mapping
from math import sqrt
from statistics import fmean

from kvlb.bench.figures import SLACK_S
from kvlb.bench.formulas import FORMULAS
from kvlb.bench.run import Job, Scenario, play
from kvlb.bench.workloads import WORKLOADS

CLOSE_ENOUGH = 1.04
WIDTH = 1.3
"""How far it is looked for at first, up and down from what is kept."""

SATURATION: Mapping[tuple[str, int], float] = {
    ("conversation", 4): 1.516,
    ("conversation", 8): 3.774,
    ("conversation", 16): 8.597,
    ("arxiv", 4): 1.197,
    ("arxiv", 8): 2.964,
    ("arxiv", 16): 7.635,
    ("weka", 4): 5.249,
    ("weka", 8): 4.014,
    ("weka", 16): 6.841,
    ("swe", 4): 0.8023,
    ("swe", 8): 2.013,
    ("swe", 16): 4.026,
    ("chat", 4): 1.8,
    ("chat", 8): 3.823,
    ("chat", 16): 8.275,
    ("agents", 4): 1.548,
    ("agents", 8): 2.894,
    ("agents", 16): 6.368,
}
"""Speed by workload and engines."""


class Saturation:
    """The search for one fleet's."""

    def __init__(self, name: str, engines: int) -> None:
        workload = WORKLOADS[name]
        calls = workload.calls(engines, 1.0, 0)
        mean_s = fmean(call.prompt.tokens for call in calls) / workload.engine.prefill_tokens_per_s
        self._patience_s = (SLACK_S + mean_s) * len(calls)
        self._name = name
        self._engines = engines
        self._policies = list(FORMULAS)

    def find(self, near: float) -> float:
        """The highest speed that one of the baselines carries."""
        if self._is_carried(near):
            low, high = near, near * WIDTH
            while self._is_carried(high):
                low, high = high, high * WIDTH
        else:
            low, high = near / WIDTH, near
            while not self._is_carried(low):
                low, high = low / WIDTH, low
        while high / low > CLOSE_ENOUGH:
            speed = sqrt(low * high)
            low, high = (speed, high) if self._is_carried(speed) else (low, speed)
        return low

    def _is_carried(self, speed: float) -> bool:
        scenario = Scenario(workload=self._name, engines=self._engines, speed=speed, seed=0)
        for policy in self._policies:
            if play(Job(scenario=scenario, policy=policy), patience_s=self._patience_s):
                # It is likely to be the one that carries more, too.
                self._policies.remove(policy)
                self._policies.insert(0, policy)
                return True
        return False


def find_saturation(place: tuple[str, int]) -> float:
    """Of a workload and a number of engines that is kept, to find it anew."""
    name, engines = place
    return Saturation(name, engines).find(SATURATION[place])
