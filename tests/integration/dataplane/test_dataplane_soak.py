"""Thousands of requests, a tenth of them broken by their clients, and nothing is left of them.

500 of them in the usual run; `make soak` plays 5,000.
"""

import asyncio
import gc
import json
import os
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.dataplane import DataPlaneSettings

REQUESTS = int(os.environ.get("KVLB_SOAK_REQUESTS", "500"))
AT_ONCE = 50
BROKEN_SHARE = 0.1
COMPLETIONS = "/v1/completions"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def prefill(received: Any, wire: Any) -> None:
    await asyncio.sleep(0.002)
    await wire.json({"kv_transfer_params": {"do_remote_prefill": True}})


async def generate(received: Any, wire: Any) -> None:
    """Slow enough that clients can leave in its middle."""
    if received.json.get("stream"):
        await wire.head(content_type="text/event-stream")
        for _ in range(8):
            await wire.chunk(TOKEN)
            await asyncio.sleep(0.002)
        await wire.chunk(DONE)
        await wire.end()
    else:
        await asyncio.sleep(0.01)
        await wire.json({"choices": [{"text": "a" * 100}]})


async def play(client: Any, number: int, random: Random, *, is_broken: bool) -> bool:
    """One request; False if its client left."""
    stream = random.random() < 0.5
    ids = [random.randrange(30_000) for _ in range(random.choice((20, 600)))]
    body = json.dumps({"model": "m", "prompt": ids, "stream": stream}).encode()
    if is_broken and number % 4 == 0:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        await client.send(head.encode() + body[:20])
        client.leave()
        return False
    await client.post(COMPLETIONS, body)
    if is_broken:
        if number % 4 == 1 and stream:
            await client.read_until(TOKEN)
        else:
            await asyncio.sleep(random.uniform(0, 0.02))
        client.leave()
        return False
    head = await client.read_until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    await client.read_until(DONE if stream else b'"}]}')
    return True


def open_files() -> Counter[str]:
    """What this process holds open, by kind."""
    kinds = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            kinds.append(os.readlink(each).partition(":")[0])
        except OSError:
            continue  # of the listing itself
    return Counter(kinds)


@pytest.mark.timeout(300)
async def test_nothing_is_left_of_broken_requests(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, eventually: Any
) -> None:
    """No task, no socket, no file, no load, no prediction that waits for its end (F41, F42, F51)."""
    random = Random(6)  # noqa: S311 - no secret
    settings = DataPlaneSettings(keep_alive_s=0.5)
    async with engine(prefill) as p, engine(generate) as d, engine(generate) as m:
        fleet = (
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
            instance(m, "m0"),
        )
        async with balancer(*fleet, settings=settings) as proxy:
            tasks_before, files_before = len(asyncio.all_tasks()), open_files()
            numbers = iter(range(REQUESTS))
            broken = set(random.sample(range(REQUESTS), int(REQUESTS * BROKEN_SHARE)))
            answered = 0

            async def one_after_the_other() -> None:
                nonlocal answered
                for number in numbers:
                    async with raw_client(proxy) as client:
                        done = await play(client, number, random, is_broken=number in broken)
                        answered += done

            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(one_after_the_other())
            # A client that is gone before its request was begun leaves no record.
            await eventually(lambda: proxy.dataplane.running == 0)
            for each in (p, d, m):
                await each.wait_for_connections(0)
            await eventually(lambda: len(asyncio.all_tasks()) == tasks_before)
            gc.collect()
            await eventually(lambda: open_files() == files_before)

            errors = Counter(record.error for record in proxy.records)
            connections = p.connections + d.connections + m.connections
            legs = sum(len(record.legs) for record in proxy.records)
            waiting = [each.waiting for each in proxy.reliability.standings._standings.values()]

    assert answered == REQUESTS - len(broken)
    assert errors[None] >= answered
    assert set(errors) <= {None, "ClientClosedRequest"}
    assert errors["ClientClosedRequest"] <= len(broken)
    assert proxy.in_flight() == 0
    assert not any(waiting)
    assert proxy.reliability.standings.breakers() == {}
    assert connections < legs / 2, "connections are reused"
    assert proxy.upstream._pools == {}
