"""Notices when the machine lets the engines' or the balancer's process wait for the processor.

Who gets no processor for seconds can't serve, whatever a balancer does; time limits pass meanwhile.
So the engines' history says of such times that none was well. Linux tells how long a process waited
(`/proc/PID/schedstat`); elsewhere nothing is noticed.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from simulator.core.history import Condition
from simulator.service import RunningFleet

STARVED = "starved"
_LOOK_S = 0.5
_WAITED_SHARE = 0.4
"""Of the time, in which a process wanted to run and couldn't."""


async def watch_machine(fleet: RunningFleet, pids: Sequence[int]) -> None:
    """Look until cancelled."""
    before_s, waited_s = time.monotonic(), _waited_s(pids)
    while True:
        await asyncio.sleep(_LOOK_S)
        now_s, now_waited_s = time.monotonic(), _waited_s(pids)
        longest_s = max(now - then for now, then in zip(now_waited_s, waited_s, strict=True))
        if longest_s > _WAITED_SHARE * (now_s - before_s):
            _note(fleet, before_s, now_s)
        before_s, waited_s = now_s, now_waited_s


def _note(fleet: RunningFleet, from_s: float, to_s: float) -> None:
    for engine in fleet.engines:
        if fleet.history.was_well(engine.name, from_s, to_s):
            fleet.history.note(engine.name, STARVED, Condition.FROZEN, from_s)
            fleet.history.note(engine.name, "fed", Condition.WELL, to_s)


def _waited_s(pids: Sequence[int]) -> list[float]:
    """Seconds that each process has waited for a processor so far."""
    return [_read_s(Path(f"/proc/{pid}/schedstat")) for pid in pids]


def _read_s(file: Path) -> float:
    try:
        return int(file.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
