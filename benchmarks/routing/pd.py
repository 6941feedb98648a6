"""Prefill here or elsewhere: the decision against both extremes, in virtual time.

    python -m benchmarks.routing.pd

Fleets of 2P2D and 4P4D serve public traces at a share of what the better extreme carries; every
run is repeated with other arrival times and ties. It prints two markdown tables and whether the
aims are met; exit status 1 if one isn't. `--calibrate` finds anew what the better extreme carries.

An extreme carries a pace (a factor on the trace's own) as long as its mean time to the first token
is at most half a second more than one uncached mean prompt takes.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from math import exp, log, sqrt
from statistics import fmean

from balancer.core.routing.judgement import judge
from balancer.core.settings.routing import PdSettings
from benchmarks.routing.fleet import ENGINE, LINKS, SimulatedFleet
from benchmarks.routing.replay import Outcome, replay
from benchmarks.routing.traces import TRACES, load_calls
from benchmarks.routing.virtual_time import VirtualClock

WAYS = {
    "remote": PdSettings(force="remote"),
    "local": PdSettings(force="local"),
    "threshold": PdSettings(decide="threshold"),
    "time": PdSettings(),
}
EXTREMES = ("remote", "local")
LEVEL = 0.6
SEEDS = 5
SLACK_S = 0.5
CLOSE_ENOUGH = 1.03

CARRIES: dict[tuple[str, int, str], float] = {
    ("weka", 2, "fast"): 6.727,
    ("weka", 4, "fast"): 16.708,
    ("weka", 2, "slow"): 6.373,
    ("weka", 4, "slow"): 14.88,
    ("arxiv", 2, "fast"): 0.549,
    ("arxiv", 4, "fast"): 1.656,
    ("arxiv", 2, "slow"): 0.531,
    ("arxiv", 4, "slow"): 1.373,
}
"""Pace that the better extreme carries, by trace, ranks of each role, and link; `--calibrate`."""

MOST_TTFT = 0.8
WORST_TTFT = 1.25
MOST_E2E_P99 = 1.0
MOST_REGRET = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is replayed where, but for how it is decided."""

    trace: str
    ranks: int
    """Of each role."""
    link: str
    speed: float
    seed: int = 0
    limit: int | None = None
    """Calls, from the first one; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run."""

    ttft_s: float
    ttft_p99_s: float
    e2e_p99_s: float
    cached: float
    """Share of prompt tokens that nobody computed."""
    remote: float
    """Share of calls with a prefill leg."""
    regret: float
    """Regret over what was paid, of calls with an alternative; 0 without any."""


def run(scenario: Scenario, pd: PdSettings) -> Result:
    """Replay `scenario`."""
    clock = VirtualClock()
    fleet = SimulatedFleet(
        clock,
        prefill=scenario.ranks,
        decode=scenario.ranks,
        link=LINKS[scenario.link],
        pd=pd,
        seed=scenario.seed,
    )
    calls = load_calls(
        scenario.trace, speed=scenario.speed, seed=scenario.seed, limit=scenario.limit
    )
    return summarize(replay(clock, fleet, calls), fleet)


def summarize(outcomes: Sequence[Outcome], fleet: SimulatedFleet) -> Result:
    """Figures of a run. Raises RuntimeError if a call failed: nothing here may."""
    if any(outcome.failed for outcome in outcomes):
        raise RuntimeError("a call failed")
    judged = [judge(each.plan, each.first_token_s) for each in outcomes]
    paid_s = sum(each.paid_s or 0.0 for each in judged if each)
    regret_s = sum(each.regret_s or 0.0 for each in judged if each)
    counts = [rank.core.statistics for rank in fleet.ranks.values()]
    prompt_tokens = sum(len(each.call.token_ids) for each in outcomes)
    # A handed-over prompt's last token is computed once more, by the decode rank.
    computed_tokens = sum(each.computed_prompt_tokens for each in counts)
    return Result(
        ttft_s=fmean(each.first_token_s for each in outcomes),
        ttft_p99_s=_percentile([each.first_token_s for each in outcomes], 0.99),
        e2e_p99_s=_percentile([each.duration_s for each in outcomes], 0.99),
        cached=1 - computed_tokens / prompt_tokens,
        remote=fmean(each.plan.prefill is not None for each in outcomes),
        regret=regret_s / paid_s if paid_s else 0.0,
    )


def find_pace(trace: str, ranks: int, link: str) -> float:
    """The highest pace that one of the extremes carries."""
    calls = load_calls(trace, speed=1.0, seed=0)
    mean_tokens = fmean(len(call.token_ids) for call in calls)
    limit_s = SLACK_S + mean_tokens / ENGINE.prefill_tokens_per_s
    span_s = calls[-1].at_s - calls[0].at_s
    # Between an idle fleet and one that would have to compute four times what it can.
    most = 4 * 2 * ranks * ENGINE.prefill_tokens_per_s / (len(calls) * mean_tokens / span_s)
    low, high = most / 64, most
    while high / low > CLOSE_ENOUGH:
        pace = sqrt(low * high)
        scenario = Scenario(trace=trace, ranks=ranks, link=link, speed=pace)
        if any(run(scenario, WAYS[way]).ttft_s <= limit_s for way in EXTREMES):
            low = pace
        else:
            high = pace
    return low


def _percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _geometric_mean(values: Iterable[float]) -> float:
    return exp(fmean(log(value) for value in values))


def _run_named(job: tuple[Scenario, str]) -> Result:
    scenario, way = job
    return run(scenario, WAYS[way])


@dataclass(frozen=True, slots=True)
class Ratio:
    """One way against the better extreme, metric by metric, in one scenario."""

    ttft: float
    ttft_p99: float
    e2e_p99: float


def compare(results: dict[str, Result], way: str) -> Ratio:
    """`way` over the better of both extremes, chosen anew for every metric."""
    mine, extremes = results[way], [results[extreme] for extreme in EXTREMES]
    return Ratio(
        mine.ttft_s / min(each.ttft_s for each in extremes),
        mine.ttft_p99_s / min(each.ttft_p99_s for each in extremes),
        mine.e2e_p99_s / min(each.e2e_p99_s for each in extremes),
    )


class Report:
    """All results, and what they say."""

    def __init__(self, results: dict[Scenario, dict[str, Result]]) -> None:
        self._results = results

    def print_runs(self) -> None:
        """One row per fleet, trace and link: means over seeds."""
        print(
            "| trace | fleet | link | pace | decided by | TTFT mean, p99 | E2E p99 | cached | remote |"
        )
        print("| --- | --- | --- | ---: | --- | ---: | ---: | ---: | ---: |")
        groups: dict[tuple[str, int, str], list[dict[str, Result]]] = {}
        paces: dict[tuple[str, int, str], float] = {}
        for scenario, results in self._results.items():
            key = (scenario.trace, scenario.ranks, scenario.link)
            groups.setdefault(key, []).append(results)
            paces[key] = scenario.speed
        for key, runs in groups.items():
            trace, ranks, link = key
            for way in runs[0]:
                each = [results[way] for results in runs]
                print(
                    f"| {trace} | {ranks}P{ranks}D | {link} | {paces[key]:.3g} | {way} "
                    f"| {fmean(one.ttft_s for one in each):.3f}, "
                    f"{fmean(one.ttft_p99_s for one in each):.2f} "
                    f"| {fmean(one.e2e_p99_s for one in each):.1f} "
                    f"| {fmean(one.cached for one in each):.3f} "
                    f"| {fmean(one.remote for one in each):.2f} |"
                )

    def print_ratios(self) -> None:
        """How each way compares with the better extreme, over all scenarios."""
        print("| decided by | mean TTFT (worst) | TTFT p99 | E2E p99 (worst) | regret |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for way in next(iter(self._results.values())):
            ratios = self._ratios(way)
            print(
                f"| {way} | {_geometric_mean(each.ttft for each in ratios):.2f} "
                f"({max(each.ttft for each in ratios):.2f}) "
                f"| {_geometric_mean(each.ttft_p99 for each in ratios):.2f} "
                f"| {_geometric_mean(each.e2e_p99 for each in ratios):.2f} "
                f"({max(each.e2e_p99 for each in ratios):.2f}) "
                f"| {self._regret(way):.1%} |"
            )

    def check(self) -> bool:
        """Say which aims are met."""
        ratios = self._ratios("time")
        aims = (
            ("mean TTFT, on average", _geometric_mean(each.ttft for each in ratios), MOST_TTFT),
            ("mean TTFT, worst", max(each.ttft for each in ratios), WORST_TTFT),
            ("E2E p99, on average", _geometric_mean(each.e2e_p99 for each in ratios), MOST_E2E_P99),
            ("regret", self._regret("time"), MOST_REGRET),
        )
        for name, value, most in aims:
            print(f"- {name}: {value:.3f}, at most {most}: {'met' if value <= most else 'MISSED'}")
        return all(value <= most for _, value, most in aims)

    def _ratios(self, way: str) -> list[Ratio]:
        return [compare(results, way) for results in self._results.values()]

    def _regret(self, way: str) -> float:
        return fmean(results[way].regret for results in self._results.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    asked = _read_arguments(arguments)
    places = list(product(asked.traces, asked.ranks, asked.links))
    if asked.calibrate:
        for place in places:
            print(f"    {place!r}: {find_pace(*place):.4g},".replace("'", '"'), flush=True)
        return 0
    started_s = time.monotonic()
    jobs = [
        (
            Scenario(
                trace=trace,
                ranks=ranks,
                link=link,
                speed=asked.level * CARRIES[trace, ranks, link],
                seed=seed,
            ),
            way,
        )
        for (trace, ranks, link), seed, way in product(places, range(asked.seeds), asked.ways)
    ]
    results: dict[Scenario, dict[str, Result]] = {}
    with ProcessPoolExecutor(asked.jobs) as pool:
        for (scenario, way), result in zip(jobs, pool.map(_run_named, jobs), strict=True):
            results.setdefault(scenario, {})[way] = result
            print(scenario, way, result, file=sys.stderr, flush=True)
    report = Report(results)
    report.print_runs()
    print()
    report.print_ratios()
    print()
    is_met = report.check()
    print(f"\n{len(jobs)} runs, {time.monotonic() - started_s:.0f} s.", file=sys.stderr)
    return 0 if is_met else 1


def _read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing.pd", description=__doc__)
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument(
        "--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4], help="of each role"
    )
    parser.add_argument("--links", nargs="+", choices=LINKS, default=["fast"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--level", type=float, default=LEVEL, help="share of what is carried")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--calibrate", action="store_true", help="print what is carried, and stop")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
