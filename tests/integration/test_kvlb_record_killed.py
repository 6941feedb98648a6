"""A recorder that is killed leaves files that can be audited."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from kvlb.audit.capture import Capture, read_capture
from kvlb.audit.command import find_files
from kvlb.audit.compare import audit_capture
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

ENGINE = EngineSettings(inter_token_ms=1.0, prefill_tokens_per_s=200_000)
ENOUGH = 12


async def read_until(name: Path, holds: Callable[[Capture], bool]) -> Capture:
    """Read what a recorder has on disk while it goes on, again and again."""
    async with asyncio.timeout(15):
        while True:
            if all(path.exists() for path in find_files(name, None)):
                capture = read_capture(*find_files(name, None))
                if holds(capture):
                    return capture
            await asyncio.sleep(0.05)


async def test_recording_that_was_killed_is_audited(tmp_path: Path) -> None:
    """Both files are cut, a second is lost at most, and what is there is predicted."""
    name = tmp_path / "run"
    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:
        command = (sys.executable, "-m", "kvlb", "record", "--minutes", "5", "--out", str(name))
        recorder = await asyncio.create_subprocess_exec(
            *command, "--instance", instance_option(fleet.engines[0])
        )
        try:
            seen = await read_until(name, lambda capture: len(capture.requests) >= ENOUGH)
        finally:
            recorder.send_signal(signal.SIGKILL)
            await recorder.wait()

    capture = read_capture(*find_files(name, None))
    report = await asyncio.to_thread(audit_capture, capture)
    assert len(capture.requests) >= len(seen.requests)
    assert len(capture.messages) >= ENOUGH // 2
    assert [cut.file for cut in report.cuts] == list(map(str, find_files(name, None)))
    serial = report.phases["serial"]
    assert serial.requests >= ENOUGH - 1
    assert serial.unexplained == 0
    # Of a whole recording all are exact; here the last events may be lost, or late.
    assert serial.exact > ENOUGH // 2
