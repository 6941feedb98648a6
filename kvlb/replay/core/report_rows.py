"""A report as a document for programs, and as rows for people.

Rules: times are seconds in the document and milliseconds in rows; what wasn't told is null there and
`unknown` here, never 0.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvlb.replay.core.outcomes import LATE_S, Outcome, Report, Spread

UNKNOWN = "unknown"


def render_report(report: Report, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything, requests included, in the order in which they were due."""
    return {
        **asdict(report),
        "kept_up": report.kept_up,
        "most_over_mean": report.most_over_mean,
        "requests": [
            {
                "line": each.line,
                "session": each.session,
                "at_s": each.at_s,
                "late_s": each.late_s,
                "error": each.error,
                "ttft_s": each.ttft_s if each.error is None else None,
                "itl_s": each.itl_s if each.error is None and each.gaps_s else None,
                "e2e_s": each.e2e_s if each.error is None else None,
                "prompt_tokens": each.prompt_tokens,
                "cached_tokens": each.cached_tokens,
                "output_tokens": each.output_tokens,
                "engine": each.engine,
            }
            for each in sorted(outcomes, key=lambda each: (each.at_s, each.line))
        ],
    }


def time_rows(report: Report) -> list[tuple[str, ...]]:
    """Name, mean, p50, p90, p95, p99 and largest, in milliseconds."""
    spreads = {
        "TTFT": report.ttft_s,
        "ITL": report.itl_s,
        "E2E": report.e2e_s,
        "sent late by": report.late_s,
    }
    return [(name, *_milliseconds(spread)) for name, spread in spreads.items() if spread]


def _milliseconds(spread: Spread) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.most)
    return [f"{value * 1e3:,.1f}" for value in values]


def figure_rows(report: Report) -> list[tuple[str, str]]:
    """Name and value of everything that is one figure."""
    rows = [
        ("requests", f"{report.answered:,} answered of {report.due:,} due"),
        ("duration", f"{report.duration_s:,.1f} s"),
        ("throughput", f"{report.requests_per_s:,.2f} requests/s"),
        ("prompt tokens", f"{report.prompt_tokens_per_s:,.0f} /s"),
        ("output tokens", f"{report.output_tokens_per_s:,.0f} /s"),
        ("cached ratio", ratio(report.cached_ratio)),
    ]
    if report.due < report.planned:
        rows.insert(1, ("stopped", f"{report.planned - report.due:,} were not due yet"))
    if report.good is not None and report.goodput is not None:
        goodput = f"{report.goodput:.1%}, {report.good_per_s:,.2f} requests/s"
        rows.append(("goodput", goodput))
    if report.most_over_mean is not None:
        rows.append(("busiest engine", f"{report.most_over_mean:.2f} x the mean"))
    return rows


def ratio(value: float | None) -> str:
    """As three decimals."""
    return UNKNOWN if value is None else f"{value:.3f}"


def engine_rows(report: Report) -> list[tuple[str, ...]]:
    """Engine, requests, share, prompt tokens, cached ratio."""
    return [
        (
            each.engine,
            f"{each.requests:,}",
            f"{each.share:.1%}",
            f"{each.prompt_tokens:,}",
            ratio(each.cached_ratio),
        )
        for each in report.engines
    ]


def lateness_warning(report: Report) -> str | None:
    """What is to be said of a client that didn't keep up."""
    if report.kept_up:
        return None
    return (
        f"the client sent 1 % of the requests more than {LATE_S * 1e3:.0f} ms late: its own machine is too "
        "busy, and the times are partly its own"
    )
