"""`kvlb doctor` at the terminal: prints findings, answers with an exit code."""

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from kvlb.doctor.core.examination import examine
from kvlb.doctor.gather import gather_facts
from kvlb.doctor.report import build_report, render_table
from kvlb.event_loop import run_command
from kvlb.logs import configure_logs
from kvlb.settings import Overrides, load_fleet


def doctor(
    *, instances: Sequence[str], config: Path | None, sends_requests: bool, as_json: bool
) -> int:
    """Look at the engines of a configuration; 1 if something is wrong with them."""
    configure_logs(logging.ERROR)
    settings = load_fleet(config, Overrides(instances=tuple(instances)), os.environ)
    nonce = secrets.token_hex(8)
    facts = run_command(gather_facts(settings, nonce=nonce, sends_requests=sends_requests))
    report = build_report(facts, examine(facts))
    console = Console(soft_wrap=as_json)
    if as_json:
        console.print(msgspec.json.encode(report).decode(), markup=False, highlight=False)
    else:
        console.print(render_table(report))
    return 1 if report.errors else 0
