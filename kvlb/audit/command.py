"""`kvlb audit` at the terminal: prints a report, answers with an exit code."""

from pathlib import Path

from rich.console import Console

from kvlb.audit.compare import audit
from kvlb.audit.report import AuditReport, render_table
from kvlb.record.writer import EVENTS, REQUESTS


def audit_files(recording: Path, requests: Path | None, as_json: bool) -> int:
    """Print the audit of one capture; 1 if it has missed without a cause, or compared nothing."""
    return print_audit(audit(*find_files(recording, requests)), as_json)


def find_files(recording: Path, requests: Path | None) -> tuple[Path, Path]:
    """Both files of a capture, given both, or its name, or the first of them."""
    if requests is not None:
        return recording, requests
    name = recording.name.removesuffix(EVENTS)
    return recording.with_name(name + EVENTS), recording.with_name(name + REQUESTS)


def print_audit(report: AuditReport, as_json: bool) -> int:
    """Print a report; its exit code."""
    console = Console(soft_wrap=as_json)
    if as_json:
        console.print(report.to_json(), markup=False, highlight=False)
    else:
        console.print(render_table(report))
    if not report.requests:
        Console(stderr=True, soft_wrap=True).print(
            f"kvlb audit: nothing was compared: {_absence(report)}", markup=False, highlight=False
        )
        return 1
    return 0 if report.is_explained else 1


def _absence(report: AuditReport) -> str:
    if not report.rows:
        return "the requests file holds no request"
    if not report.events["batches"]:
        return "the events file holds no event batch"
    counts = (f"{count} {reason}" for reason, count in report.not_comparable.items())
    return f"not one request is comparable ({', '.join(counts)})"
