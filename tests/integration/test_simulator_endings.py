"""However a simulated fleet is stopped, and wherever that is interrupted, it leaves nothing open.

The fleet runs in a process of its own: a context that waits for a socket can't be interrupted.
"""

import asyncio
import sys

import pytest

ENDS = """
import asyncio, sys
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, running_fleet

SETTINGS = EngineSettings(kv_connector="mooncake", replay=True, num_blocks=64)

async def run(fleet_is_up, may_end):
    async with running_fleet(FleetSpec.parse("1p1d"), engine=SETTINGS) as fleet:
        for each in fleet.engines:
            each.engine.ranks[0].publisher.publish([])
        fleet_is_up.set()
        await may_end.wait()

async def end_after(turns, interruptions):
    fleet_is_up, may_end = asyncio.Event(), asyncio.Event()
    task = asyncio.ensure_future(run(fleet_is_up, may_end))
    await fleet_is_up.wait()
    may_end.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(interruptions):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    return task.cancelled()

async def main():
    turns = 0
    while await end_after(turns, interruptions=int(sys.argv[1])):
        turns += 1
    print(turns)

asyncio.run(main())
"""


@pytest.mark.parametrize("interruptions", [1, 3])
async def test_a_stop_interrupted_anywhere_leaves_nothing_open(interruptions: int) -> None:
    """At every turn of the loop from its beginning to its end; the process ends each time."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDS, str(interruptions), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(50):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise

    assert process.returncode == 0
    assert int(said) > 5
