"""Signals ask a command to stop, and it may open as many files as it is allowed to ask for."""

import asyncio
import os
import resource
import signal
import subprocess
import sys

import pytest

from kvlb.event_loop import stop_event


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_ask_for_a_stop(number: signal.Signals) -> None:
    """Both ways to end a process drain it."""
    with stop_event() as stop:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(20):
            await stop.wait()


def test_command_raises_its_limit_of_open_files() -> None:
    """A service manager lets 1,024 be open at first, which is about 500 streams."""
    script = """
import resource
from kvlb.event_loop import run_command

async def tell():
    print(resource.getrlimit(resource.RLIMIT_NOFILE))

run_command(tell())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 3000)),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    assert ran.stdout.strip() == "(3000, 3000)"
