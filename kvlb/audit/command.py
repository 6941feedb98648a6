"""`kvlb audit` at the terminal: prints a report, answers with an exit code."""

import asyncio
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvlb.audit.compare import audit
from kvlb.audit.live import watch_balancer
from kvlb.audit.report import AuditReport, render_table
from kvlb.event_loop import run_command, stop_event
from kvlb.logs import configure_logs
from kvlb.record.command import new_nonce, record_settings
from kvlb.record.session import RecordOptions
from kvlb.record.writer import EVENTS, REQUESTS
from kvlb.settings import KvlbSettings, Overrides, load_fleet


def audit_files(recording: Path, requests: Path | None, as_json: bool) -> int:
    """Print the audit of one capture; 1 if it has missed without a cause, or compared nothing."""
    return print_audit(audit(*find_files(recording, requests)), as_json)


def find_files(recording: Path, requests: Path | None) -> tuple[Path, Path]:
    """Both files of a capture, given both, or its name, or the first of them."""
    if requests is not None:
        return recording, requests
    name = recording.name.removesuffix(EVENTS)
    return recording.with_name(name + EVENTS), recording.with_name(name + REQUESTS)


def audit_balancer(url: str, indexer: str | None, minutes: float, as_json: bool) -> int:
    """Watch what a running balancer predicts, and print it; 1 as of a recording."""
    configure_logs(logging.ERROR)

    async def watch() -> AuditReport:
        with stop_event() as stopped:
            return await watch_balancer(
                url.rstrip("/"),
                minutes=minutes,
                stopped=stopped,
                indexer=None if indexer is None else indexer.rstrip("/"),
            )

    return print_audit(run_command(watch()), as_json)


def audit_engines(
    instances: Sequence[str], config: Path | None, minutes: float, as_json: bool
) -> int:
    """Send requests to engines for so long, and audit what was seen of it."""
    configure_logs(logging.ERROR)
    settings = load_fleet(config, Overrides(instances=tuple(instances)), os.environ)
    return print_audit(run_command(_audit_engines(settings, minutes)), as_json)


async def _audit_engines(settings: KvlbSettings, minutes: float) -> AuditReport:
    with tempfile.TemporaryDirectory(prefix="kvlb-audit-") as folder:
        options = RecordOptions(
            out=Path(folder, "live"), minutes=minutes, requests=None, nonce=new_nonce()
        )
        await record_settings(settings, options)
        return await asyncio.to_thread(audit, *find_files(options.out, None))


def print_audit(report: AuditReport, as_json: bool) -> int:
    """Print a report; its exit code."""
    console = Console(soft_wrap=as_json)
    if as_json:
        console.print(report.to_json(), markup=False, highlight=False)
    else:
        console.print(render_table(report))
    if not report.requests:
        _say(f"nothing was compared: {_absence(report)}")
        return 1
    if report.events.get("index_elsewhere"):
        _say("the index is another process's, which knows why predictions differ: name --indexer")
    return 0 if report.is_explained else 1


def _say(what: str) -> None:
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"kvlb audit: {what}", markup=False, highlight=False)


def _absence(report: AuditReport) -> str:
    if not report.rows:
        is_recorded = "batches" in report.events
        return "the requests file holds no request" if is_recorded else "no request ended meanwhile"
    if report.events.get("batches") == 0:
        return "the events file holds no event batch"
    counts = (f"{count} {reason}" for reason, count in report.not_comparable.items())
    return f"not one request is comparable ({', '.join(counts)})"
