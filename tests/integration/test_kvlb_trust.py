"""How far cache knowledge is believed, as answers, status and metrics show it; and what legs teach."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from balancer.core.settings.control import TokensSettings
from balancer.core.settings.routing import PdSettings, RoutingSettings
from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings
from simulator.service import RunningEngine

BLOCK = 16


@dataclass
class Running:
    """A balancer in front of simulated engines."""

    url: str
    engines: Sequence[RunningEngine]
    http: httpx.AsyncClient

    async def ask(self, token_ids: Sequence[int], **more: Any) -> httpx.Response:
        body = {"model": "sim", "prompt": list(token_ids), "max_tokens": 1, **more}
        answer = await self.http.post(f"{self.url}/v1/completions", json=body)
        assert answer.status_code == 200
        return answer

    async def status(self) -> Any:
        return (await self.http.get(f"{self.url}/status")).json()

    async def metric(self, name: str, **labels: str) -> float:
        """Sum over the series that have these labels."""
        text = (await self.http.get(f"{self.url}/metrics")).text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = re.findall(rf"^{name}({{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for found, value in lines if all(w in found for w in wanted))


@asynccontextmanager
async def up(fleet: str = "1", *, is_ready_at: str, **engine: Any) -> AsyncIterator[Running]:
    settings = EngineSettings(inter_token_ms=1.0, **engine)
    async with simulated_fleet(parse_fleet(fleet), settings) as engines:
        options = tuple(instance_option(each) for each in engines.engines)
        loaded = msgspec.structs.replace(
            load_settings(None, Overrides(instances=options, port=0), {}),
            tokens=TokensSettings(deadline_s=10.0),
            routing=RoutingSettings(lookup_timeout_s=5.0),
            pd=PdSettings(local_prefill_max_tokens=0),
        )
        async with (
            running_kvlb(loaded) as kvlb,
            httpx.AsyncClient(trust_env=False, timeout=20) as http,
        ):
            running = Running(kvlb.url, engines.engines, http)

            async def is_ready() -> bool:
                status = await running.status()
                ranks = [rank["index"] for each in status["instances"] for rank in each["ranks"]]
                trusts = {rank["trust"] if rank else "load_only" for rank in ranks}
                return status["ready"] and not status["reasons"] and trusts == {is_ready_at}

            await until(is_ready)
            yield running


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.02)


async def test_rank_without_events_is_approximate_as_soon_as_something_was_routed() -> None:
    """In the answer, in status and in metrics; the guess is what the engine then reports."""
    prompt = range(100, 100 + 10 * BLOCK + 1)
    async with up(is_ready_at="load_only", events=False) as kvlb:
        first, second = await kvlb.ask(prompt), await kvlb.ask(prompt)

        assert first.headers["x-kvlb-trust"] == "load_only"
        assert second.headers["x-kvlb-trust"] == "approximate"
        assert second.headers["x-kvlb-overlap-tokens"] == str(10 * BLOCK)
        usage = second.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 10 * BLOCK
        status = await kvlb.status()
        assert status["instances"][0]["ranks"][0]["trust"] == "approximate"
        shown = {"instance": "m0", "rank": "0", "trust": "approximate"}
        assert await kvlb.metric("kvlb_routing_trust", **shown) == 1
        assert await kvlb.metric("kvlb_predictions_total", outcome="no_index") == 2


async def test_engine_that_evicts_corrects_what_was_guessed() -> None:
    """After a reset behind our back one guess is wrong, and takes all older ones along."""
    prompts = [range(1000 * each, 1000 * each + 5 * BLOCK + 1) for each in (1, 2, 3)]
    async with up(is_ready_at="load_only", events=False) as kvlb:
        for each in prompts:
            await kvlb.ask(each)
        await kvlb.http.post(f"{kvlb.engines[0].url}/reset_prefix_cache")

        wrong = await kvlb.ask(prompts[2])
        right = await kvlb.ask(prompts[0])

        assert wrong.headers["x-kvlb-overlap-tokens"] == str(5 * BLOCK)
        assert right.headers["x-kvlb-overlap-tokens"] == "0"


async def test_exact_rank_says_so() -> None:
    """Events tell what is there."""
    async with up(is_ready_at="exact") as kvlb:
        answer = await kvlb.ask(range(100, 200))

        assert answer.headers["x-kvlb-trust"] == "exact"
        status = await kvlb.status()
        assert status["instances"][0]["ranks"][0]["trust"] == "exact"
        assert status["instances"][0]["ranks"][0]["index"]["counts"]["pruned_blocks"] == 0


async def test_both_legs_are_held_against_what_they_can_say() -> None:
    """A prefill leg against the index; a decode leg counts what it was sent as cached (F35)."""
    prompt = range(100, 100 + 20 * BLOCK + 1)
    async with up("1p1d", is_ready_at="exact") as kvlb:
        await kvlb.ask(prompt)

        async def is_known() -> bool:
            return await kvlb.metric("kvlb_rank_blocks", instance="p0") == 20

        await until(is_known)
        await kvlb.ask([*prompt, *range(5000, 5000 + 10 * BLOCK)])

        # Nothing had been stored when the first came, so not even the block size was known.
        for leg, outcome, legs in (
            ("prefill", "no_index", 1),
            ("prefill", "exact", 1),
            ("decode", "after_transfer", 2),
        ):
            counted = await kvlb.metric("kvlb_predictions_total", leg=leg, outcome=outcome)
            assert counted == legs
        assert await kvlb.metric("kvlb_mispredictions_total") == 0


async def test_requests_that_skip_the_cache_contradict_nothing() -> None:
    """They are counted by their reason, and never reported."""
    prompt = range(100, 100 + 10 * BLOCK + 1)
    async with up(is_ready_at="exact") as kvlb:
        await kvlb.ask(prompt)
        await kvlb.ask(prompt, prompt_logprobs=0)
        await kvlb.ask(prompt, n=2)
        await kvlb.ask(prompt)

        for outcome in ("no_cache_read", "several_answers", "exact"):
            assert await kvlb.metric("kvlb_predictions_total", outcome=outcome) >= 1
        assert await kvlb.metric("kvlb_reports_lost_total") == 0
        assert await kvlb.metric("kvlb_mispredictions_total") == 0
