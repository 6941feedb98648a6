"""The demo's result for people: where requests went, both policies side by side, the verdict."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvlb.demo.report import DemoReport, PolicyRun

CACHED_NOTE = (
    "cached ratio = 1 - prefilled / prompt tokens, from the engines' own counters.\n"
    "Tokens that a transfer brought are not cached: a prefill instance computed them."
)


def show_report(report: DemoReport, console: Console) -> None:
    """Print three tables."""
    console.print(_routed(report.ours))
    console.print(_side_by_side(report))
    console.print(CACHED_NOTE, style="dim")
    console.print(_verdict(report))


def _routed(run: PolicyRun) -> Table:
    table = Table(
        title=f"\nRouted by {run.policy}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("turn", "instance", "prefill"):
        table.add_column(name)
    for name in ("prompt", "overlap", "cached", "TTFT"):
        table.add_column(name, justify="right")
    table.add_column("reason", no_wrap=True)
    for each, after in zip(run.requests, (*run.requests[1:], None), strict=False):
        table.add_row(
            f"{each.conversation}.{each.turn}",
            each.instance,
            each.prefill,
            _tokens(each.prompt_tokens),
            _tokens(each.overlap_tokens),
            _tokens(each.cached_tokens),
            f"{each.ttft_s * 1000:.0f} ms",
            each.reason,
            end_section=after is None or after.conversation != each.conversation,
        )
    return table


def _side_by_side(report: DemoReport) -> Table:
    runs = (report.ours, report.theirs)
    table = Table(
        "",
        title="\nSame conversations, same arrivals, cold caches",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for run in runs:
        table.add_column(run.policy, justify="right")
    rows = {
        "requests": [str(len(run.requests)) for run in runs],
        "prompt tokens": [f"{run.counts.prompt_tokens:,}" for run in runs],
        "prefilled tokens": [f"{run.counts.prefilled_tokens:,}" for run in runs],
        "cached ratio": [f"{run.counts.cached_ratio:.3f}" for run in runs],
        "TTFT p50": [f"{run.ttft_p50_s * 1000:.0f} ms" for run in runs],
        "TTFT p99": [f"{run.ttft_p99_s * 1000:.0f} ms" for run in runs],
        "prefill legs run": [str(run.prefill_legs_run) for run in runs],
        "prefill legs skipped": [str(run.prefill_legs_skipped) for run in runs],
    }
    for name, figures in rows.items():
        table.add_row(name, *figures)
    return table


def _verdict(report: DemoReport) -> Table:
    table = Table(
        "criterion",
        "figure",
        "required",
        "",
        box=SIMPLE_HEAD,
        title="\nVerdict",
        title_justify="left",
    )
    for each in report.criteria:
        word = Text("pass", style="green") if each.passed else Text("FAIL", style="bold red")
        table.add_row(each.name, each.figure, each.required, word)
    return table


def _tokens(count: int | None) -> str:
    return "?" if count is None else str(count)
