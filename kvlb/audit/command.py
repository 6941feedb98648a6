"""`kvlb audit` at the terminal: prints a report, answers with an exit code."""

from pathlib import Path

from rich.console import Console

from kvlb.audit.compare import audit
from kvlb.audit.report import render_table


def audit_files(events: Path, requests: Path, as_json: bool) -> int:
    """Print the audit of one capture; 1 if a request sent alone was missed without a cause."""
    report = audit(events, requests)
    console = Console(soft_wrap=as_json)
    if as_json:
        console.print(report.to_json(), markup=False, highlight=False)
    else:
        console.print(render_table(report))
    return 0 if report.is_explained else 1
