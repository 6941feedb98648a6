"""Traces of requests."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROWS = [
    {
        "timestamp": 10 * number,
        "input_length": 64 * turn,
        "output_length": 3,
        "hash_ids": [100 * session + block for block in range(turn)],
        "session": f"s{session}",
    }
    for number, (turn, session) in enumerate(
        (turn, session) for turn in (1, 2, 3) for session in (1, 2)
    )
]


@pytest.fixture
def turns() -> Sequence[dict[str, Any]]:
    """Two sessions of three turns in a twentieth of a second."""
    return ROWS


def _write_rows(path: Path, *rows: Any) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture
def write_rows() -> Callable[..., Path]:
    """A trace of these rows; packed if its name says so."""
    return _write_rows


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two sessions of three turns, packed."""
    return _write_rows(tmp_path / "trace.jsonl.gz", *ROWS)
