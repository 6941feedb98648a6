"""The audit in the encodings of other releases."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvlb.audit.report import AuditReport

Rows = list[dict[str, Any]]
AuditRows = Callable[[Rows, Rows], AuditReport]
Load = Callable[[str], tuple[Rows, Rows]]
BendPayload = Callable[..., dict[str, Any]]

# Whole captures, many times over: seconds of work under coverage, more on a busy machine.
pytestmark = pytest.mark.timeout(180)


FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


def as_arrays(batch: list[Any], *, stored: int, removed: int, with_rank: bool = True) -> list[Any]:
    """A map-shaped batch as the releases up to 0.23 wrote it, with that many fields."""

    def array(event: Mapping[str, Any]) -> list[Any]:
        names = FIELDS[:stored] if event["type"] == "BlockStored" else REMOVED_FIELDS[:removed]
        if event["type"] == "AllBlocksCleared":
            names = ()
        return [event["type"], *(event.get(name) for name in names)]

    ts, events, *rank = batch
    return [ts, [array(event) for event in events], *(rank if with_rank else ())]


def signed(batch: list[Any]) -> list[Any]:
    """Hashes as signed 64-bit ints, as the builtin hash of 0.9 gave them."""

    def wrap(value: Any) -> Any:
        if isinstance(value, list):
            return [wrap(item) for item in value]
        return value - 2**64 if isinstance(value, int) and value >= 2**63 else value

    return [batch[0], wrap(batch[1]), *batch[2:]]


def as_bytes(batch: list[Any]) -> list[Any]:
    """Hashes as the 32 raw bytes of their digest."""

    def digest(value: int | None) -> bytes | None:
        return None if value is None else b"\7" * 24 + value.to_bytes(8, "big")

    events = [dict(event) for event in batch[1]]
    for event in events:
        if "block_hashes" in event:
            event["block_hashes"] = [digest(value) for value in event["block_hashes"]]
        if "parent_block_hash" in event:
            event["parent_block_hash"] = digest(event["parent_block_hash"])
    return [batch[0], events, *batch[2:]]


RELEASES = {
    "0.9.0": lambda batch: signed(as_arrays(batch, stored=5, removed=1, with_rank=False)),
    "0.10.1": lambda batch: signed(as_arrays(batch, stored=5, removed=1)),
    "0.13": lambda batch: as_arrays(batch, stored=6, removed=2),
    "0.16": lambda batch: as_arrays(batch, stored=7, removed=2),
    "0.19": lambda batch: as_arrays(batch, stored=8, removed=2),
    "0.21": lambda batch: as_arrays(batch, stored=9, removed=3),
    "0.23": lambda batch: as_arrays(batch, stored=11, removed=3),
    "0.32-bytes": as_bytes,
}


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_s_encoding_gives_the_same_audit(
    release: str, audit_rows: AuditRows, load: Load, bend_payload: BendPayload
) -> None:
    """Two engines' events, written as another release would have."""
    events, requests = load("m2")

    report = audit_rows([bend_payload(row, RELEASES[release]) for row in events], requests)

    assert (report.exact, report.requests) == (80, 80)


@pytest.mark.parametrize("release", ["0.23", "0.32-bytes"])
def test_hybrid_groups_survive_every_encoding_that_has_them(
    release: str, audit_rows: AuditRows, load: Load, bend_payload: BendPayload
) -> None:
    """Window groups are counted by engine hash, whatever it is written as."""
    events, requests = load("i-hybrid-swa")

    report = audit_rows([bend_payload(row, RELEASES[release]) for row in events], requests)

    assert (report.phases["serial"].exact, report.phases["serial"].unexplained) == (183, 0)


@pytest.mark.parametrize("release", ["0.13", "0.16", "0.19", "0.21"])
def test_hybrid_groups_without_kinds_are_explained(
    release: str, audit_rows: AuditRows, load: Load, bend_payload: BendPayload
) -> None:
    """Before 0.22 the hit's end can't be checked against windows; nothing else may be off."""
    events, requests = load("i-hybrid-swa")
    version = json.dumps(requests).replace("vllm-0.32.", f"vllm-{release}.")

    report = audit_rows(
        [bend_payload(row, RELEASES[release]) for row in events], json.loads(version)
    )

    serial = report.phases["serial"]
    assert serial.unexplained == 0
    assert serial.exact >= 167
    assert all(
        row.predicted is not None and row.reported is not None and row.predicted > row.reported
        for row in report.rows
        if row.rule == "windows_unnamed"
    )


def test_adapters_known_by_their_number_alone_are_found(
    audit_rows: AuditRows, load: Load, bend_payload: BendPayload
) -> None:
    """Up to 0.13 an event has no adapter's name; the order of the model list numbers them."""
    events, requests = load("h-lora")
    salted = {row["i"] for row in requests if "cache_salt" in row.get("body", {})}
    bent = [bend_payload(row, RELEASES["0.13"]) for row in events]

    report = audit_rows(bent, [row for row in requests if row.get("i") not in salted])

    assert (report.exact, report.requests) == (9, 9)
