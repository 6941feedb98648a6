"""The audit over captures of real engines, as they are, and bent so that it must fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvlb.audit.compare import audit
from kvlb.audit.report import AuditReport, Tally, Verdict

Rows = list[dict[str, Any]]
AuditRows = Callable[[Rows, Rows], AuditReport]
Files = Callable[[str], tuple[Path, Path]]
Load = Callable[[str], tuple[Rows, Rows]]

# Whole captures, many times over: seconds of work under coverage, more on a busy machine.
pytestmark = pytest.mark.timeout(180)

# captures/README.md: comparable and exact serial requests, exact requests of the load phases.
SERIAL = {
    "a-bs32-sha256": (154, 149),
    "b-bs128-sha256cbor": (119, 115),
    "f-v016-bs16-sha256": (177, 170),
    "g-dp2": (58, 56),
    "h-lora": (11, 11),
    "i-hybrid-swa": (187, 183),
    "m2": (40, 40),
    "n-connect": (14, 13),
    "pd-example": (16, 10),
}
BUSY = {
    ("a-bs32-sha256", "load"): (96, 91),
    ("b-bs128-sha256cbor", "load"): (32, 26),
    ("f-v016-bs16-sha256", "load"): (32, 28),
    ("i-hybrid-swa", "load"): (32, 29),
    ("m2", "parallel"): (40, 40),
}


@pytest.mark.parametrize("name", SERIAL)
def test_every_serial_request_is_exact_or_explained(name: str, files: Files) -> None:
    """As many exact ones as the capture's notes count, no more explained than missed, no rest."""
    comparable, exact = SERIAL[name]

    serial = audit(*files(name)).phases["serial"]

    assert serial.requests == comparable
    assert serial.exact >= exact
    assert serial.unexplained == 0
    assert sum(serial.explained.values()) <= comparable - exact


@pytest.mark.parametrize(("name", "phase"), BUSY)
def test_a_busy_phase_is_as_exact_as_events_allow(name: str, phase: str, files: Files) -> None:
    """What was in flight is the only thing unknown."""
    comparable, exact = BUSY[name, phase]

    busy = audit(*files(name)).phases[phase]

    assert (busy.requests, busy.unexplained) == (comparable, 0)
    assert busy.exact >= exact
    assert set(busy.explained) <= {"concurrent", "late_event"}


@pytest.mark.parametrize("name", SERIAL)
def test_counts_add_up(name: str, files: Files) -> None:
    """Requests are the exact, the explained and the unexplained; totals are the sum of phases."""
    report = audit(*files(name))
    tallies: list[Tally | AuditReport] = [*report.phases.values(), report]

    for tally in tallies:
        assert tally.requests == tally.exact + sum(tally.explained.values()) + tally.unexplained
    assert report.requests == sum(tally.requests for tally in report.phases.values())
    assert len(report.rows) == report.requests + sum(report.not_comparable.values())


def test_every_cause_the_notes_name_is_found(files: Files) -> None:
    """Each rule of the captures' notes has a request that needs it."""
    named = {rule for name in SERIAL for rule in audit(*files(name)).phases["serial"].explained}

    assert named >= {
        "no_cache_read",
        "later_child",
        "reset_seen_late",
        "restart_seen_late",
        "report_mode_full",
        "salt_unpublished",
        "remote_load",
    }


def test_what_cannot_be_compared_says_why(files: Files) -> None:
    """Refused, cut, batched and untokenised requests are no misses; nor are unpinned ones."""
    assert audit(*files("f-v016-bs16-sha256")).not_comparable == {
        "no_usage": 1,
        "several_prompts": 2,
        "status": 1,
        "no_cached_figure": 1,
        "unknown_tokens": 1,
    }
    assert audit(*files("g-dp2")).not_comparable == {"unknown_rank": 10, "status": 1}


def test_a_row_tells_the_whole_story(files: Files) -> None:
    """Where it went, what we predict, what was reported, why they differ."""
    rows = {row.i: row for row in audit(*files("g-dp2")).rows}

    assert msgspec.to_builtins(rows[67]) == {
        "i": 67,
        "phase": "serial",
        "label": "after reset rank 0",
        "src": "w0",
        "rank": 0,
        "prompt_tokens": 171,
        "predicted": 160,
        "reported": 0,
        "verdict": "explained",
        "rule": "reset_seen_late",
        "reason": None,
    }


@pytest.mark.parametrize("name", [name for name in SERIAL if name != "m2"])
def test_a_figure_that_is_off_by_a_block_is_not_excused(
    name: str, audit_rows: AuditRows, files: Files, load: Load
) -> None:
    """Had the engine reported a block more or less, no rule would have explained it."""
    events, requests = load(name)
    exact = {
        row.i
        for row in audit(*files(name)).rows
        if row.verdict is Verdict.EXACT and row.phase == "serial"
    }
    size = next(row["block_size"] for row in requests if row["kind"] == "config")

    bent = [off_by(row, size) if row.get("i") in exact else row for row in requests]

    assert audit_rows(events, bent).phases["serial"].unexplained == len(exact)


def off_by(row: dict[str, Any], tokens: int) -> dict[str, Any]:
    details = row["usage"].get("prompt_tokens_details") or {}
    figure = (details.get("cached_tokens") or 0) + tokens
    return row | {"usage": row["usage"] | {"prompt_tokens_details": {"cached_tokens": figure}}}


def test_a_lost_batch_is_noticed(audit_rows: AuditRows, load: Load) -> None:
    """Without the first batch what it stored is missed, and nothing excuses that."""
    events, requests = load("h-lora")

    report = audit_rows(events[1:], requests)

    assert report.phases["serial"].unexplained > 0
    assert not report.is_explained


@pytest.mark.parametrize("figure", ["48", 48.5, True], ids=repr)
def test_a_cached_figure_that_is_no_count_is_not_compared(
    figure: object, audit_rows: AuditRows, load: Load
) -> None:
    """Nor taken for a missing one, which would mean 0."""
    events, requests = load("h-lora")
    bent = [
        row | {"usage": row["usage"] | {"prompt_tokens_details": {"cached_tokens": figure}}}
        if row["kind"] == "request" and row.get("usage")
        else row
        for row in requests
    ]

    report = audit_rows(events, bent)

    assert report.requests == 0
    assert report.not_comparable["no_cached_figure"] >= 11


def test_rows_with_one_number_are_told_apart(
    audit_rows: AuditRows, files: Files, load: Load
) -> None:
    """Two recordings in one file begin to count anew."""
    events, requests = load("h-lora")

    report = audit_rows(
        events, [row | {"i": 0} if row["kind"] == "request" else row for row in requests]
    )

    assert report.exact == audit(*files("h-lora")).exact
