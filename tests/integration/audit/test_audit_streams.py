"""The audit of events that come late, twice, as garbage, or not at all."""

from collections.abc import Callable
from typing import Any

import pytest

from kvlb.audit.report import AuditReport, Verdict

Rows = list[dict[str, Any]]
AuditRows = Callable[[Rows, Rows], AuditReport]
Load = Callable[[str], tuple[Rows, Rows]]
BendPayload = Callable[..., dict[str, Any]]
DelayFirst = Callable[..., Rows]

# Whole captures, many times over: seconds of work under coverage, more on a busy machine.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def delay_first(bend_payload: BendPayload) -> DelayFirst:
    """The same events, the first of which comes late, or says that it is."""

    def delay(events: Rows, *, arrival_s: float, stamp_s: float = 0.0) -> Rows:
        def stamp(batch: list[Any]) -> list[Any]:
            return [batch[0] + stamp_s, *batch[1:]]

        late = bend_payload(events[0], stamp)
        return [late | {"t": late["t"] + arrival_s}, *events[1:]]

    return delay


@pytest.fixture
def repetition(load: Load) -> tuple[Rows, Rows]:
    """Events of two prompts; the first prompt's request, and its repetition one second later."""
    events, requests = load("h-lora")
    notes = [row for row in requests if row["kind"] != "request"]
    first, again = (row for row in requests if row.get("label") == "completion tiny")
    t0 = first["t1"] + 1.0
    return events[:2], [*notes, first, again | {"t0": t0, "t1": t0 + 0.1}]


def test_an_event_known_by_its_stamp_counts_although_it_arrived_late(
    repetition: tuple[Rows, Rows], audit_rows: AuditRows, delay_first: DelayFirst
) -> None:
    """A recorder that was busy for a second is no reason to call the prediction wrong."""
    events, requests = repetition

    report = audit_rows(delay_first(events, arrival_s=1.5), requests)

    assert report.rows[1].verdict is Verdict.EXACT


def test_an_event_stamped_late_is_late(
    repetition: tuple[Rows, Rows], audit_rows: AuditRows, delay_first: DelayFirst
) -> None:
    """Published only after the next request was sent: with it applied, the figure is right."""
    events, requests = repetition

    report = audit_rows(delay_first(events, arrival_s=1.5, stamp_s=1.5), requests)

    assert report.rows[1].rule == "late_event"


def test_an_event_later_than_two_seconds_after_the_answer_explains_nothing(
    repetition: tuple[Rows, Rows], audit_rows: AuditRows, delay_first: DelayFirst
) -> None:
    """So late it is a lost event."""
    events, requests = repetition

    report = audit_rows(delay_first(events, arrival_s=3.5), requests)

    assert report.rows[1].verdict is Verdict.UNEXPLAINED


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_an_engine_s_clock_may_be_wrong(
    ahead_s: float, audit_rows: AuditRows, load: Load, bend_payload: BendPayload
) -> None:
    """Stamps are read against arrivals, so another machine's clock changes nothing."""
    events, requests = load("i-hybrid-swa")

    def shift(batch: list[Any]) -> list[Any]:
        return [batch[0] + ahead_s, *batch[1:]]

    report = audit_rows([bend_payload(row, shift) for row in events], requests)

    assert (report.phases["serial"].exact, report.phases["serial"].unexplained) == (183, 0)


@pytest.mark.parametrize("frames_from", [0, 1], ids=["with-topic", "without-topic"])
def test_recorded_replays_fill_gaps(frames_from: int, audit_rows: AuditRows, load: Load) -> None:
    """Every tenth live message lost, all of them in a recorded replay: nothing changes."""
    events, requests = load("i-hybrid-swa")
    lost = events[5::10]
    end = ["", "", "f" * 16, ""]
    answers = [["", *row["frames"][frames_from:]] for row in lost]
    replay = {"kind": "replay", "src": "w0", "frames": [*answers, end]}

    report = audit_rows([row for row in events if row not in lost], [*requests, replay])

    assert report.events == {"batches": len(events), "replayed": len(lost)}
    assert (report.phases["serial"].exact, report.phases["serial"].unexplained) == (183, 0)


def test_gaps_that_no_replay_fills_are_counted(audit_rows: AuditRows, load: Load) -> None:
    """What is lost is said, not hidden, and what follows from it isn't without a cause."""
    events, requests = load("m2")
    lossy = [row for number, row in enumerate(events) if number % 10 != 5]

    report = audit_rows(lossy, requests)
    assert report.events["lost"] == len(events) - len(lossy)
    assert report.explained["events_lost"] > 0
    assert report.unexplained == 0


def test_loss_explains_nothing_after_a_clear(
    audit_rows: AuditRows, load: Load, bend_payload: BendPayload
) -> None:
    """The cache is empty then, and what was lost is of no account; nor does it explain what was before."""
    events, requests = load("m2")
    lost, after = [row for row in events if row["src"] == "w0"][27:29]

    def clear(batch: list[Any]) -> list[Any]:
        return [batch[0], [["AllBlocksCleared"], *batch[1]], *batch[2:]]

    lossy = [row for row in events if row is not lost]
    bent = [bend_payload(row, clear) if row is after else row for row in lossy]
    reports = [audit_rows(rows, requests) for rows in (lossy, bent)]

    named = [{row.i for row in each.rows if row.rule == "events_lost"} for each in reports]
    sent = [row["t0"] for row in requests if row.get("i") in named[0]]
    assert [each.events["lost"] for each in reports] == [1, 1]
    assert sent
    assert min(sent) > lost["t"]
    assert named[1] == set()


def test_duplicates_count_once(audit_rows: AuditRows, load: Load) -> None:
    """The same message twice is one batch."""
    events, requests = load("m2")

    report = audit_rows([row for row in events for _ in range(2)], requests)

    assert report.events == {"batches": len(events), "dropped_duplicate": len(events)}
    assert report.exact == 80


def test_an_undecodable_batch_costs_itself(audit_rows: AuditRows, load: Load) -> None:
    """It is counted, and the rest is audited."""
    events, requests = load("h-lora")
    topic, seq, _ = events[-1]["frames"]
    broken = events[-1] | {"frames": [topic, seq, "c1"]}

    report = audit_rows([*events[:-1], broken], requests)

    assert report.events == {"batches": 5, "undecodable_batches": 1}
