"""The findings of a diagnosis, for people and for programs."""

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvlb.doctor.core.facts import FleetFacts
from kvlb.doctor.core.findings import Finding, Level

STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.INFO: "cyan"}


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--format json` prints."""

    instances: list[str]
    """What was looked at."""
    errors: int
    findings: list[Finding]


def build_report(facts: FleetFacts, findings: Sequence[Finding]) -> DoctorReport:
    """Put facts and findings together."""
    return DoctorReport(
        instances=[each.name for each in facts.instances],
        errors=sum(each.level is Level.ERROR for each in findings),
        findings=list(findings),
    )


def render_table(report: DoctorReport) -> RenderableType:
    """One row per finding, or a sentence that there is none."""
    count = len(report.instances)
    looked_at = f"{count} instance{'s' if count != 1 else ''}: {', '.join(report.instances)}"
    if not report.findings:
        return Text(f"{looked_at}. Nothing to change.")
    table = Table(show_lines=True)
    for column in ("finding", "instance", "seen", "change"):
        table.add_column(column, overflow="fold")
    for each in report.findings:
        name = Text(f"{each.name}\n{each.level.value}", style=STYLES[each.level])
        table.add_row(name, Text(each.instance), Text(each.seen), Text(each.change))
    return Group(Text(looked_at), table)
