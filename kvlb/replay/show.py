"""A replay's result for people: tables on standard output."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlb.replay.core.outcomes import Report
from kvlb.replay.core.report_rows import engine_rows, figure_rows, lateness_warning, time_rows

TIME_COLUMNS = ("ms", "mean", "p50", "p90", "p95", "p99", "most")
ENGINE_COLUMNS = ("engine", "requests", "share", "prompt tokens", "cached ratio")


def show_report(report: Report, reasons: Mapping[str, str], console: Console) -> None:
    """Print all figures; `reasons` says of a kind of error what the first one said."""
    console.print(_table("Replay", ("", ""), figure_rows(report)))
    if times := time_rows(report):
        console.print(_table("Times", TIME_COLUMNS, times))
    if engines := engine_rows(report):
        console.print(_table("Engines", ENGINE_COLUMNS, engines))
    if report.errors:
        rows = [
            (kind, f"{count:,}", escape(reasons.get(kind, "")))
            for kind, count in sorted(report.errors.items())
        ]
        table = _table("Errors", ("kind", "requests", "the first one said"), rows)
        table.columns[-1].justify = "left"
        console.print(table)
    if warning := lateness_warning(report):
        console.print(f"[bold yellow]note:[/] {warning}")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table
