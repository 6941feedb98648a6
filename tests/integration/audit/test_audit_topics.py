"""The audit finds out whose events a topic's are."""

from collections.abc import Callable
from typing import Any

import pytest

from kvlb.audit.report import AuditReport

Rows = list[dict[str, Any]]
AuditRows = Callable[[Rows, Rows], AuditReport]
Load = Callable[[str], tuple[Rows, Rows]]

# Whole captures, many times over: seconds of work under coverage, more on a busy machine.
pytestmark = pytest.mark.timeout(180)


def test_topics_are_matched_by_the_engines_own_sources(audit_rows: AuditRows, load: Load) -> None:
    """What `/kv_event_sources` answered beats the order of names: topics swapped, sources too."""
    events, requests = load("n-connect")
    started = next(row for row in requests if row["kind"] == "started")
    config = next(row for row in requests if row["kind"] == "config")
    config["topics"].reverse()
    started["sources"].reverse()
    for row in requests:
        if row.get("src") in {"w0", "w1"}:
            row["src"] = {"w0": "w1", "w1": "w0"}[row["src"]]

    assert audit_rows(events, requests).phases["serial"].exact == 13


@pytest.mark.parametrize("left", ["sources", "topics"])
def test_one_of_the_two_lists_of_topics_is_enough(
    left: str, audit_rows: AuditRows, load: Load
) -> None:
    """Without the engines' sources the configuration tells, and the other way round."""
    events, requests = load("n-connect")
    for row in requests:
        if row["kind"] in {"started", "config"}:
            row.pop({"sources": "topics", "topics": "sources"}[left], None)

    assert audit_rows(events, requests).phases["serial"].exact == 13


def test_as_many_topics_as_instances_are_paired_in_order(audit_rows: AuditRows, load: Load) -> None:
    """Nothing tells but the port in the topic: ports rise with the instances."""
    events, requests = load("n-connect")
    requests = [row for row in requests if row["kind"] == "request"]

    assert audit_rows(events, requests).phases["serial"].exact == 13


def test_a_topic_that_is_nobody_s_is_counted_and_not_guessed(
    audit_rows: AuditRows, load: Load
) -> None:
    """One topic, two instances, no note: whose it is stays unknown."""
    events, requests = load("n-connect")
    events = [row for row in events if "8101" in bytes.fromhex(row["frames"][0]).decode()]
    requests = [row for row in requests if row["kind"] == "request"]

    report = audit_rows(events, requests)

    assert report.events == {"batches": 0, "unknown_publisher": len(events)}
    assert report.not_comparable == {"unknown_publisher": 14}


def test_ranks_may_share_one_label(audit_rows: AuditRows, load: Load) -> None:
    """Without a rank in the label the batch names its rank."""
    events, requests = load("g-dp2")

    report = audit_rows([row | {"src": "w0"} for row in events], requests)

    assert report.phases["serial"].exact == 56


def test_an_instance_that_serves_higher_ranks_counts_them_from_zero(
    audit_rows: AuditRows, load: Load
) -> None:
    """The header is the server's own number, the events' is the fleet's."""
    events, requests = load("g-dp2")
    for row in requests:
        row.pop("sources", None)
    renamed = {"w0.0": "w0.4", "w0.1": "w0.5"}

    report = audit_rows([row | {"src": renamed[row["src"]]} for row in events], requests)

    assert report.phases["serial"].exact == 56
