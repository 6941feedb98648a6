"""Signals ask a command to stop."""

import asyncio
import os
import signal

import pytest

from kvlb.event_loop import stop_event


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_ask_for_a_stop(number: signal.Signals) -> None:
    """Both ways to end a process drain it."""
    with stop_event() as stop:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(20):
            await stop.wait()
