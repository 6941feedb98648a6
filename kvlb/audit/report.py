"""What an audit found: counted per phase and in total, row by row, as JSON or as a table."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvlb.audit.lines import Cut


class Verdict(StrEnum):
    """How a prediction compares with what the engine reported."""

    EXACT = "exact"
    EXPLAINED = "explained"
    WRONG = "wrong"
    """The cause is known, and it is that the index was wrong."""
    UNEXPLAINED = "unexplained"
    NOT_COMPARABLE = "not_comparable"


SERIAL, LIVE = "serial", "live"
"""Phases that are held to be right: requests sent alone, and legs of a running balancer."""
CONVENTIONS = frozenset({"no_cache_read", "later_child", "remote_load"})
"""Causes that lie in what an engine reports; the index was not wrong."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    i: int
    phase: str
    label: str | None
    src: str
    rank: int | None
    prompt_tokens: int | None
    predicted: int | None
    """Cached tokens we predict at send time."""
    reported: int | None
    """Cached tokens the engine reported."""
    verdict: Verdict
    rule: str | None = None
    """Why it differs, if that is known."""
    reason: str | None = None
    """Why it is not comparable."""

    @property
    def is_compared(self) -> bool:
        return self.verdict is not Verdict.NOT_COMPARABLE

    @property
    def error_tokens(self) -> int:
        """Predicted less reported: above 0 is credit for what wasn't there."""
        if not self.is_compared or self.rule in CONVENTIONS:
            return 0
        return (self.predicted or 0) - (self.reported or 0)

    @property
    def is_over(self) -> bool:
        return self.error_tokens > 0


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of some rows: `requests` = `exact` + explained + wrong + `unexplained`."""

    requests: int
    exact: int
    explained: dict[str, int]
    """By cause, and so is what follows."""
    wrong: dict[str, int]
    unexplained: int
    not_comparable: dict[str, int]


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """One capture, audited."""

    requests: int
    exact: int
    explained: dict[str, int]
    wrong: dict[str, int]
    unexplained: int
    not_comparable: dict[str, int]
    phases: dict[str, Tally]
    over: int
    """Requests credited with tokens that weren't cached."""
    over_tokens: int
    under: int
    """Requests that found more than was predicted."""
    under_tokens: int
    events: dict[str, int]
    """Batches applied, and what of the stream was not, by reason."""
    cuts: list[Cut]
    """Files that end too early, and where."""
    rows: list[Row]

    def to_json(self) -> str:
        """The report as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @property
    def is_explained(self) -> bool:
        """Whether nothing that is held to be right was wrong, or missed without a known cause."""
        held = [self.phases[phase] for phase in (SERIAL, LIVE) if phase in self.phases]
        return not any(tally.wrong or tally.unexplained for tally in held)


def build_report(
    rows: list[Row], events: Mapping[str, int], cuts: Sequence[Cut] = ()
) -> AuditReport:
    """Count `rows`, which stay in their order."""
    phases: dict[str, list[Row]] = {}
    for row in rows:
        phases.setdefault(row.phase, []).append(row)
    total = _tally(rows)
    errors = [row.error_tokens for row in rows]
    over, under = [e for e in errors if e > 0], [-e for e in errors if e < 0]
    return AuditReport(
        requests=total.requests,
        exact=total.exact,
        explained=total.explained,
        wrong=total.wrong,
        unexplained=total.unexplained,
        not_comparable=total.not_comparable,
        phases={phase: _tally(of_phase) for phase, of_phase in phases.items()},
        over=len(over),
        over_tokens=sum(over),
        under=len(under),
        under_tokens=sum(under),
        events=dict(events),
        cuts=list(cuts),
        rows=rows,
    )


def _tally(rows: Iterable[Row]) -> Tally:
    verdicts: Counter[Verdict] = Counter()
    causes: dict[Verdict, Counter[str]] = {Verdict.EXPLAINED: Counter(), Verdict.WRONG: Counter()}
    not_comparable: Counter[str] = Counter()
    for row in rows:
        verdicts[row.verdict] += 1
        if row.rule is not None:
            causes[row.verdict][row.rule] += 1
        if row.reason is not None:
            not_comparable[row.reason] += 1
    return Tally(
        requests=verdicts.total() - verdicts[Verdict.NOT_COMPARABLE],
        exact=verdicts[Verdict.EXACT],
        explained=dict(causes[Verdict.EXPLAINED]),
        wrong=dict(causes[Verdict.WRONG]),
        unexplained=verdicts[Verdict.UNEXPLAINED],
        not_comparable=dict(not_comparable),
    )


def render_table(report: AuditReport) -> Group:
    """Counts per phase, then every request that no cause excuses, with the cause if it is known."""
    counts = Table(
        title="Predicted and reported cached tokens", title_justify="left", box=SIMPLE_HEAD
    )
    counts.add_column("phase")
    counts.add_column("requests", justify="right")
    counts.add_column("exact", justify="right")
    counts.add_column("explained")
    counts.add_column("wrong")
    counts.add_column("unexplained", justify="right")
    counts.add_column("not comparable")
    for phase, tally in report.phases.items():
        counts.add_row(*_cells(phase, tally))
    if len(report.phases) > 1:
        counts.add_section()
        counts.add_row(*_cells("all", report))
    missed = [row for row in report.rows if row.verdict in {Verdict.WRONG, Verdict.UNEXPLAINED}]
    differences = [_differences(missed)] if missed else []
    cuts = map(_ending, report.cuts)
    return Group(counts, *differences, _errors(report), _events(report), *cuts)


def _cells(name: str, tally: Tally | AuditReport) -> tuple[str, ...]:
    return (
        name,
        str(tally.requests),
        str(tally.exact),
        _counts(tally.explained),
        _alarming(_counts(tally.wrong), is_alarm=bool(tally.wrong)),
        _alarming(str(tally.unexplained), is_alarm=bool(tally.unexplained)),
        _counts(tally.not_comparable),
    )


def _alarming(text: str, *, is_alarm: bool) -> str:
    return f"[{'red' if is_alarm else 'green'}]{text}[/]"


def _counts(counts: Mapping[str, int]) -> str:
    lines = (f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    return "\n".join(lines) or "-"


def _differences(rows: Iterable[Row]) -> Table:
    table = Table(title="Wrong, or without a known cause", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("i", "phase", "instance", "prompt", "predicted", "reported", "cause"):
        is_text = heading in {"phase", "instance", "cause"}
        table.add_column(heading, justify="left" if is_text else "right")
    for row in rows:
        instance = row.src if row.rank is None else f"{row.src}/{row.rank}"
        figures = (row.prompt_tokens, row.predicted, row.reported)
        cause = (row.rule or "-").replace("_", " ")
        table.add_row(str(row.i), row.phase, instance, *map(str, figures), cause)
    return table


def _errors(report: AuditReport) -> str:
    share = f" ({report.over / report.requests:.1%})" if report.requests else ""
    return (
        f"Predicted too much: {report.over} requests{share}, {report.over_tokens} tokens; "
        f"too little: {report.under} requests, {report.under_tokens} tokens"
    )


def _events(report: AuditReport) -> str:
    counts = (f"{count} {name.replace('_', ' ')}" for name, count in report.events.items())
    return "Events: " + (", ".join(counts) or "-")


def _ending(cut: Cut) -> Text:
    # No markup: a file may be called [red].
    dropped = "; the next one had begun and is left out" if cut.dropped_lines else ""
    return Text(f"Cut: {cut.file} ends after line {cut.after_line}{dropped}", style="yellow")
