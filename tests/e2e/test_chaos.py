"""A short chaos run in the suite; the long one is `make chaos`."""

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

StartCommand = Callable[..., AbstractAsyncContextManager[Any]]
CHAOS = (sys.executable, "-m", "benchmarks.chaos")


async def test_clients_of_a_fleet_in_trouble_get_right_answers_or_honest_errors(
    start_command: StartCommand,
) -> None:
    """Engines die, hang, restart and lose the network; the simulator's own account judges."""
    options = ("--seeds", "1", "--first-seed", "4", "--requests", "240")
    async with start_command(*options, program=CHAOS) as command:
        await command.printed("| 4 | nixl |", deadline_s=150)
        code = await command.process.wait()

    assert code == 0, command.output
