"""Captures as files and as rows, rows with other payloads, and the audit of rows."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvlb.audit.compare import audit
from kvlb.audit.report import AuditReport

CAPTURES = Path(__file__).parents[2] / "captures"

Rows = list[dict[str, Any]]


def _files(name: str) -> tuple[Path, Path]:
    return CAPTURES / f"{name}.events.jsonl.gz", CAPTURES / f"{name}.requests.jsonl.gz"


@pytest.fixture
def files() -> Callable[[str], tuple[Path, Path]]:
    """Events and requests of a capture."""
    return _files


@pytest.fixture
def load() -> Callable[[str], tuple[Rows, Rows]]:
    """The same, read."""

    def read(name: str) -> tuple[Rows, Rows]:
        events, requests = (
            [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
            for path in _files(name)
        )
        return events, requests

    return read


@pytest.fixture
def audit_rows(tmp_path: Path) -> Callable[[Rows, Rows], AuditReport]:
    """Audits rows by way of files."""

    def write(name: str, rows: Rows) -> Path:
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
        return path

    def run(events: Rows, requests: Rows) -> AuditReport:
        return audit(write("events.jsonl.gz", events), write("requests.jsonl.gz", requests))

    return run


@pytest.fixture
def bend_payload() -> Callable[..., dict[str, Any]]:
    """The same message with its decoded batch passed through `bend`."""

    def repack(row: dict[str, Any], bend: Callable[[list[Any]], object]) -> dict[str, Any]:
        topic, seq, payload = row["frames"]
        batch = msgspec.msgpack.decode(bytes.fromhex(payload))
        return row | {"frames": [topic, seq, msgspec.msgpack.encode(bend(batch)).hex()]}

    return repack
