"""`python -m benchmarks.peers` on a few calls, through kvlb alone: nothing is installed."""

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.peers.cells import Cell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PEERS = (sys.executable, "-m", "benchmarks.peers")


async def test_calls_reach_fresh_engines_through_the_router(
    start_command: Callable[..., AbstractAsyncContextManager[Any]], tmp_path: Path
) -> None:
    """Every call is answered; what engines counted is in the table."""
    out = tmp_path / "cells.jsonl"
    arguments = ("--workloads", "chat", "--only", "kvlb", "--repeats", "1", "--calls", "16")
    async with start_command(*arguments, "--out", str(out), program=PEERS) as command:
        code = await command.process.wait()

    assert code == 0, command.output
    cell = msgspec.json.decode(out.read_bytes(), type=Cell)
    assert (cell.router, cell.failed, cell.figures.calls) == ("kvlb", {}, 16)
    assert 0.3 < cell.figures.cached < 1
    assert "| kvlb |" in command.output
