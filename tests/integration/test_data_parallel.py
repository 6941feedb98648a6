"""Engines with two data-parallel ranks behind one address: each rank is a candidate of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from balancer.core.settings.control import TokensSettings
from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

CONVERSATIONS = 6


@asynccontextmanager
async def up(fleet: str) -> AsyncIterator[httpx.AsyncClient]:
    """Simulated engines of two ranks each, and a balancer that was told their addresses only."""
    engine = EngineSettings(inter_token_ms=1.0, dp_size=2)
    async with simulated_fleet(parse_fleet(fleet), engine) as engines:
        options = tuple(instance_option(each) for each in engines.engines)
        settings = msgspec.structs.replace(
            load_settings(None, Overrides(instances=options, port=0), {}),
            tokens=TokensSettings(deadline_s=10.0),
        )
        async with (
            running_kvlb(settings) as kvlb,
            httpx.AsyncClient(base_url=kvlb.url, trust_env=False, timeout=10) as http,
        ):
            await until(http, lambda index: index["trust"] == "exact", 2 * len(engines.engines))
            yield http


async def until(http: httpx.AsyncClient, condition: Any, count: int) -> None:
    """Wait until `count` ranks fulfil `condition`."""
    async with asyncio.timeout(20):
        while True:
            status = (await http.get("/status")).json()
            ranks = [rank["index"] for each in status["instances"] for rank in each["ranks"]]
            if sum(1 for index in ranks if index and condition(index)) >= count:
                return
            await asyncio.sleep(0.01)


async def complete(http: httpx.AsyncClient, number: int, tokens: int) -> httpx.Response:
    first = 10_000 * (number + 1)
    body = {"model": "sim", "prompt": list(range(first, first + tokens)), "max_tokens": 2}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def test_both_ranks_serve_and_second_turns_find_their_cache() -> None:
    """Requests name their rank, and what was predicted is what the engine reports."""
    async with up("1") as http:
        for number in range(CONVERSATIONS):
            await complete(http, number, 160)
        await until(http, lambda index: index["held_blocks"] > 0, 2)
        second = [await complete(http, number, 320) for number in range(CONVERSATIONS)]

    reported = [
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in second
    ]
    predicted = [int(answer.headers["x-kvlb-overlap-tokens"]) for answer in second]
    assert reported == predicted == [160] * CONVERSATIONS
