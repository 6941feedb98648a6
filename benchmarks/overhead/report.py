"""From samples to tables and verdicts.

Rules:

1. Every figure is the median over the rounds. Ratios are taken within each round, then the
   median: what disturbs the machine disturbs both sides.
2. A chunk's cost is what a stream costs beyond a request without a stream at the same
   concurrency, divided by its chunks.
3. "Added" is a proxy's percentile less the direct one's in the same round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import median

from benchmarks.overhead import proxies
from benchmarks.overhead.measure import (
    BURST_CLIENTS,
    CHUNKS,
    MANY_CLIENTS,
    REQUESTS,
    STREAMS,
    Cell,
    Crowd,
    Sample,
)

BASES = {proxies.KVLB_FULL: proxies.VLLM_KV_AWARE, proxies.VLLM_KV_AWARE: proxies.VLLM_KV_AWARE}
"""What a row is compared with; the others with vllm-router's round_robin."""
REQUEST_CELL = REQUESTS[1]
CHUNK_CELL = STREAMS[2]
ACCOUNTED = 1.25
"""A target missed by less is accepted with an account of the remaining cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A ratio that kvlb should stay under."""

    what: str
    mine: str
    theirs: str
    cell: Cell
    figure: Callable[["Results", str, Cell, int], float]
    limit: float


class Results:
    """Samples of one run, looked up by proxy, load and round."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = {(each.name, each.cell, each.round_): each for each in samples}
        self.names = list(dict.fromkeys(each.name for each in samples))
        self.rounds = sorted({each.round_ for each in samples})

    def get(self, name: str, cell: Cell, round_: int) -> Sample | None:
        return self._samples.get((name, cell, round_))

    def over_rounds(
        self, figure: Callable[["Results", str, Cell, int], float], name: str, cell: Cell
    ) -> float:
        return median(figure(self, name, cell, each) for each in self.rounds)

    def ratio(
        self,
        figure: Callable[["Results", str, Cell, int], float],
        name: str,
        base: str,
        cell: Cell,
    ) -> float:
        if base not in self.names:
            return nan
        # Where noise makes the other one's cost nothing, a ratio says nothing.
        ratios = [
            figure(self, name, cell, each) / theirs
            for each in self.rounds
            if (theirs := figure(self, base, cell, each)) > 0
        ]
        return median(ratios) if ratios else nan

    def failed(self, name: str, cells: Sequence[Cell]) -> int:
        return sum(
            sum(found.times.failed.values())
            for cell in cells
            for each in self.rounds
            if (found := self.get(name, cell, each)) is not None
        )


def ms_per_request(results: Results, name: str, cell: Cell, round_: int) -> float:
    """CPU."""
    found = results.get(name, cell, round_)
    return nan if found is None else found.cpu_s_per_call * 1e3


def us_per_chunk(results: Results, name: str, cell: Cell, round_: int) -> float:
    """CPU."""
    found = results.get(name, cell, round_)
    plain = results.get(name, REQUESTS[STREAMS.index(cell)], round_)
    if found is None or plain is None:
        return nan
    return (found.cpu_s_per_call - plain.cpu_s_per_call) / CHUNKS * 1e6


def added(field: str, share: float) -> Callable[[Results, str, Cell, int], float]:
    """A percentile in ms, less the direct one."""

    def figure(results: Results, name: str, cell: Cell, round_: int) -> float:
        mine, direct = (results.get(each, cell, round_) for each in (name, proxies.DIRECT))
        if mine is None or direct is None:
            return nan
        return percentile_ms(getattr(mine.times, field), share) - percentile_ms(
            getattr(direct.times, field), share
        )

    return figure


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    """NaN if there are none."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3 if ordered else nan


def per_second(results: Results, name: str, cell: Cell, round_: int) -> float:
    """Requests."""
    found = results.get(name, cell, round_)
    return nan if found is None else found.calls / found.elapsed_s


GOALS = (
    Goal(
        what="round_robin, CPU per request (32 at once)",
        mine=proxies.KVLB_ROUND_ROBIN,
        theirs=proxies.VLLM_ROUND_ROBIN,
        cell=REQUEST_CELL,
        figure=ms_per_request,
        limit=1.5,
    ),
    Goal(
        what="round_robin, CPU per chunk (256 streams)",
        mine=proxies.KVLB_ROUND_ROBIN,
        theirs=proxies.VLLM_ROUND_ROBIN,
        cell=CHUNK_CELL,
        figure=us_per_chunk,
        limit=1.1,
    ),
    Goal(
        what="full policy against kv_aware, CPU per request (32 at once, 4,000 token ids)",
        mine=proxies.KVLB_FULL,
        theirs=proxies.VLLM_KV_AWARE,
        cell=REQUEST_CELL,
        figure=ms_per_request,
        limit=0.6,
    ),
    Goal(
        what="256 streams, added p99 of time to first token",
        mine=proxies.KVLB_ROUND_ROBIN,
        theirs=proxies.VLLM_ROUND_ROBIN,
        cell=CHUNK_CELL,
        figure=added("first_s", 0.99),
        limit=1.0,
    ),
)


def render(
    results: Results, crowds: Mapping[str, Crowd], missing: Mapping[str, str], notes: Sequence[str]
) -> str:
    """Everything as markdown."""
    parts = [
        "### Verdicts",
        _verdicts(results, crowds),
        "### Requests that aren't streamed",
        _requests(results),
        f"### Streams of {CHUNKS} chunks",
        _streams(results),
        "### Many at once",
        _crowds(results, crowds),
    ]
    if missing:
        parts.append("\n".join(f"- {name}: left out, {why}" for name, why in missing.items()))
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _number(value: float, form: str) -> str:
    return "-" if value != value else format(value, form)  # noqa: PLR0124 - NaN is not itself


def _base(name: str) -> str:
    return BASES.get(name, proxies.VLLM_ROUND_ROBIN)


def _requests(results: Results) -> str:
    rows = []
    for name in results.names:
        for cell in REQUESTS:
            is_direct = name == proxies.DIRECT
            rows.append(
                [
                    name,
                    str(cell.clients),
                    "-"
                    if is_direct
                    else _number(results.over_rounds(ms_per_request, name, cell), ".3f"),
                    "-"
                    if is_direct
                    else _number(results.ratio(ms_per_request, name, _base(name), cell), ".2f"),
                    _number(results.over_rounds(per_second, name, cell), ",.0f"),
                    _number(results.over_rounds(added("whole_s", 0.5), name, cell), ".2f"),
                    _number(results.over_rounds(added("whole_s", 0.99), name, cell), ".2f"),
                ]
            )
    head = ["proxy", "at once", "CPU ms/request", "x vllm-router", "requests/s"]
    return _table([*head, "added p50 ms", "added p99 ms"], rows)


def _streams(results: Results) -> str:
    rows = []
    for name in results.names:
        for cell in STREAMS:
            is_direct = name == proxies.DIRECT
            rows.append(
                [
                    name,
                    str(cell.clients),
                    "-"
                    if is_direct
                    else _number(results.over_rounds(us_per_chunk, name, cell), ".1f"),
                    "-"
                    if is_direct
                    else _number(results.ratio(us_per_chunk, name, _base(name), cell), ".2f"),
                    _number(results.over_rounds(added("first_s", 0.5), name, cell), ".2f"),
                    _number(results.over_rounds(added("first_s", 0.99), name, cell), ".2f"),
                    str(results.failed(name, (cell,))),
                ]
            )
    head = ["proxy", "streams", "CPU µs/chunk", "x vllm-router"]
    return _table([*head, "added p50 TTFT ms", "added p99 TTFT ms", "failed"], rows)


def _crowds(results: Results, crowds: Mapping[str, Crowd]) -> str:
    rows = []
    for name, seen in crowds.items():
        at_256 = max(
            found.memory_bytes
            for each in results.rounds
            if (found := results.get(name, CHUNK_CELL, each)) is not None
        )
        sizes = (seen.idle_bytes, at_256, seen.many_bytes)
        rows.append(
            [
                name,
                _failures(seen.burst.failed),
                _number(percentile_ms(seen.burst.first_s, 0.99), ".0f"),
                _failures(seen.many.failed),
                *(f"{size / 2**20:,.0f}" for size in sizes),
            ]
        )
    head = ["proxy", f"{BURST_CLIENTS} opened at once: failed", "their p99 TTFT ms"]
    more = [f"{MANY_CLIENTS:,} streams: failed", "MiB idle", "at 256", f"at {MANY_CLIENTS:,}"]
    return _table([*head, *more], rows)


def _failures(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in failed.items()) or "0"


def _verdicts(results: Results, crowds: Mapping[str, Crowd]) -> str:
    rows = [_verdict(results, goal) for goal in GOALS]
    for what, kind in (
        (f"{BURST_CLIENTS} streaming connections opened at once: none reset, none lost", "burst"),
        (f"{MANY_CLIENTS:,} streams: no failed request", "many"),
    ):
        for name in (proxies.KVLB_ROUND_ROBIN, proxies.KVLB_FULL):
            if name in crowds:
                failed = sum(getattr(crowds[name], kind).failed.values())
                rows.append(
                    [f"{what} ({name})", f"{failed}", "0", "met" if not failed else "missed"]
                )
    return _table(["target", "measured", "limit", "verdict"], rows)


def _verdict(results: Results, goal: Goal) -> list[str]:
    if goal.theirs not in results.names or goal.mine not in results.names:
        return [goal.what, "-", f"{goal.limit} x", "not measured"]
    ratio = results.ratio(goal.figure, goal.mine, goal.theirs, goal.cell)
    verdict = "missed"
    if ratio != ratio:  # noqa: PLR0124 - NaN is not itself
        return [goal.what, "-", f"{goal.limit} x", "lost in noise"]
    if ratio <= goal.limit:
        verdict = "met"
    elif ratio <= goal.limit * ACCOUNTED:
        verdict = f"missed, within {ACCOUNTED} x"
    return [goal.what, f"{ratio:.2f} x", f"{goal.limit} x", verdict]
