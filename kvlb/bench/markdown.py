"""The result as the page docs/routing-benchmark.md: every figure, and plainly where we aren't best."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from kvlb.bench.compare import Difference
from kvlb.bench.figures import METRICS
from kvlb.bench.oracle import OracleResult
from kvlb.bench.report import (
    SUMMARY_TITLES,
    Column,
    mean_of,
    metric_rows,
    oracle_rows,
    render_figure,
    unevenness,
)
from kvlb.bench.run import OURS
from kvlb.bench.workloads import WORKLOADS

ABOUT = """# Routing benchmark

Written by `{command}`: {runs} runs in {minutes:.1f} minutes. Traces and synthetic workloads go through the
balancer's own router, ledger, planner and index to fleets of simulated engines, in virtual time. Nothing here was measured on a GPU.

- **Engines**: 20,000 prompt tokens/s (`chat`: 8,000), steps of 10 ms, 8,192 tokens a step, 64 seats, no role (they prefill and decode). Too little cache for everything, as below. What they evict
  and store is known to the balancer 10 ms later.
- **Load**: share of saturation: of the pace at which the best of four other balancers' formulas still has a mean TTFT of 0.5 s + what a mean prompt takes uncached.
- **Seeds**: {seeds}, each with other arrival times, ties and, where a workload is synthetic, prompts.
- **Goodput**: share of calls whose first token came within 0.5 s + what the whole prompt takes uncached, and whose tokens took at most three times an idle engine's time.
- **Most / mean**: uncached prompt tokens of the engine that had most, over the mean.
- `{ours}` is held against the best of the others, chosen anew for each metric and column, by differences paired by seed: *better* or *worse* if their 95 % interval (Student's)
  is on one side of 0, else *level*.

| workload | | cache per engine (tokens), block |
| --- | --- | --- |
"""

SUMMARY = """
Of {columns} columns. *Than a slow one*: so many of the worse ones are worse than a policy whose mean TTFT is over twice as long there (one that piles everything up has idle engines for the few
that go elsewhere). *Ratio*: geometric mean of ours over the best other's; *worst*: in the column where it is worst. {uneven}
"""


def render_markdown(
    measured: Sequence[Column],
    oracle: Sequence[OracleResult],
    *,
    command: str,
    minutes: float,
) -> str:
    """The whole page."""
    runs = sum(len(each) for column in measured for each in column.runs.values())
    seeds = max(len(each) for column in measured for each in column.runs.values())
    parts = [ABOUT.format(command=command, runs=runs, minutes=minutes, seeds=seeds, ours=OURS)]
    names = list(dict.fromkeys(column.place.workload for column in measured))
    for name in names:
        its = WORKLOADS[name]
        parts.append(f"| {name} | {its.about} | {its.cache_tokens:,}, {its.block_size} |\n")
    rows = metric_rows(measured)
    if rows:
        parts.append("\n## Against the best other policy\n\n")
        parts += _table(SUMMARY_TITLES, rows)
        parts.append(SUMMARY.format(columns=len(measured), uneven=unevenness(measured)))
        parts.append("\n## Where it isn't best\n\n")
        parts += _worse(measured)
    if oracle:
        parts.append("\n## Distance from a clairvoyant\n\n")
        parts += _oracle(oracle)
    parts.append("\n## Every figure\n\nMeans over seeds; seconds.\n\n")
    parts.append("![mean TTFT over load](routing-benchmark.svg)\n")
    for name, columns in groupby(measured, key=lambda column: column.place.workload):
        parts.append(f"\n### {name}\n\n")
        parts += _figures(columns)
    return "".join(parts)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |\n"
    yield f"| --- |{' ---: |' * (len(titles) - 1)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n"


def _worse(measured: Sequence[Column]) -> Iterator[str]:
    found = [
        (str(column.place), each)
        for column in measured
        for each in column.differences
        if each.standing == "worse"
    ]
    if not found:
        yield "Nowhere: better or level in every metric of every column.\n"
        return
    titles = ("column", "metric", OURS, "best other", "", "difference", "a slow one")
    yield from _table(titles, (_worse_row(place, each) for place, each in found))


def _worse_row(place: str, each: Difference) -> Sequence[str]:
    return (
        place,
        METRICS[each.metric].title,
        render_figure(each.metric, each.ours),
        render_figure(each.metric, each.theirs),
        each.other,
        f"{each.mean:+.3f} ± {each.half_width:.3f}",
        "yes" if each.other_is_slow else "",
    )


def _oracle(results: Sequence[OracleResult]) -> Iterator[str]:
    moves = results[0].moves
    yield (
        f"The best placement that {moves:,} moves of a local search found, from every policy's own placement, with all "
        "arrivals known and work spread as evenly as asked of policies (1.3). *Endless* is one cache "
        "for the whole fleet that forgets nothing: no placement reaches it.\n\n"
    )
    titles = ("column", f"{OURS} cached", "found", f"{OURS} / found", "endless", "most / mean")
    yield from _table(titles, oracle_rows(results))


def _figures(columns: Iterable[Column]) -> Iterator[str]:
    titles = ("engines, load", "policy", *(each.title for each in METRICS.values()))
    yield from _table(
        (*titles, "cached", "most / mean"),
        (
            (
                f"{column.place.engines}, {column.place.load:.0%}",
                policy,
                *(render_figure(name, mean_of(runs, name)) for name in (*METRICS, "cached")),
                f"{mean_of(runs, 'most_over_mean'):.2f}",
            )
            for column in columns
            for policy, runs in column.runs.items()
        ),
    )
