"""The table of a chaos run, and what was complained of."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.chaos.judge import Verdict
from benchmarks.chaos.stage import Run

_HEAD = (
    *("seed", "connector", "pd", "requests", "answered", "left", "error events"),
    *("502", "503", "504", "other", "errors", "avoidable", "legs again", "faults"),
    *("stranded", "corrupt", "wrong", "hung", "starved", "s"),
)
_SHOWN = 12


def render(runs: Sequence[Run]) -> str:
    """One row per seed, one for all, in Markdown."""
    rows = [_HEAD, tuple("---" for _ in _HEAD), *(_row(run) for run in runs)]
    if len(runs) > 1:
        rows.append(_total(rows[2:]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def render_complaints(run: Run) -> str:
    """What was found, the first of it in full."""
    complaints = run.verdict.complaints
    counts = Counter(each.rule for each in complaints)
    head = ", ".join(f"{rule} {count}" for rule, count in counts.most_common())
    lines = [f"  {each.rule}: {each.request} {each.told}" for each in complaints[:_SHOWN]]
    return "\n".join([f"seed {run.scenario.seed}: {head}", *lines])


def _row(run: Run) -> tuple[str, ...]:
    scenario, verdict = run.scenario, run.verdict
    ends, statuses = verdict.ends, verdict.statuses
    known = [statuses.get(status, 0) for status in (502, 503, 504)]
    failed = ends.get("error", 0) + ends.get("error_event", 0)
    kinds = Counter(fault.kind for fault in run.faults)
    way = "remote" if scenario.always_remote else "auto"
    return (
        str(scenario.seed),
        scenario.connector,
        f"{way}, stands in" if scenario.stands_in else way,
        str(scenario.requests),
        str(ends.get("answered", 0)),
        str(ends.get("left", 0)),
        str(ends.get("error_event", 0)),
        *map(str, known),
        str(sum(statuses.values()) - sum(known)),
        f"{failed / scenario.requests:.2%}",
        str(_count(verdict, "avoidable_error")),
        str(verdict.again),
        f"{len(run.faults)} ({', '.join(f'{kinds[kind]} {kind}' for kind in sorted(kinds))})",
        str(verdict.fleet.stranded),
        str(verdict.fleet.counts.corrupt_reads),
        str(_count(verdict, "wrong_answer")),
        str(ends.get("hung", 0) + ends.get("broken", 0)),
        str(run.starved),
        f"{run.took_s:.0f}",
    )


def _count(verdict: Verdict, rule: str) -> int:
    return sum(each.rule == rule for each in verdict.complaints)


def _total(rows: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Sums of what are plain numbers; the rate is that of all."""
    sums = [
        str(sum(int(each) for each in column)) if all(map(str.isdigit, column)) else ""
        for column in zip(*rows, strict=True)
    ]
    total = dict(zip(_HEAD, sums, strict=True))
    failed = sum(int(total[name] or 0) for name in ("error events", "502", "503", "504", "other"))
    total |= {"seed": "all", "errors": f"{failed / int(total['requests']):.2%}"}
    return tuple(total[name] for name in _HEAD)
