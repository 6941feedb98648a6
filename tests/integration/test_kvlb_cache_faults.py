"""What a client notices of caches that vanish without a word: nothing but the time it takes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from balancer.core.settings.control import ProbeSettings, TokensSettings
from balancer.core.settings.routing import RoutingSettings
from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings
from simulator.service import RunningEngine

PROMPT = list(range(4000))


class Stage:
    """Two simulated engines and a balancer in front of them."""

    def __init__(self, http: httpx.AsyncClient, engines: tuple[RunningEngine, ...]) -> None:
        self.http = http
        self.engines = engines

    async def ask(self, prompt: list[int]) -> tuple[str, int, int]:
        """Alias of the instance that answered, predicted and reported tokens."""
        body = {"model": "sim", "prompt": prompt, "max_tokens": 1}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        predicted = int(answer.headers["x-kvlb-overlap-tokens"])
        return answer.headers["x-kvlb-instance"], predicted, details["cached_tokens"]

    async def until(self, condition: Callable[[Any], object]) -> None:
        """Wait, with a deadline, for a status that fulfils `condition`."""
        async with asyncio.timeout(20):
            while True:
                if condition((await self.http.get("/status")).json()):
                    return
                await asyncio.sleep(0.01)

    async def overpredicted_tokens(self) -> float:
        text = (await self.http.get("/metrics")).text
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("kvlb_leg_overpredicted_tokens_total{")
        )


Staging = Callable[[], AbstractAsyncContextManager[Stage]]


@pytest.fixture(params=["memory", "redis"])
def staging(request: pytest.FixtureRequest) -> Staging:
    """Make a stage on either backend that works inside `async with`."""
    redis = request.getfixturevalue("redis_server").settings() if request.param == "redis" else None

    @asynccontextmanager
    async def run() -> AsyncIterator[Stage]:
        engine = EngineSettings(inter_token_ms=1.0)
        async with simulated_fleet(parse_fleet("2"), engine) as fleet:
            options = tuple(instance_option(each) for each in fleet.engines)
            settings = msgspec.structs.replace(
                load_settings(None, Overrides(instances=options, port=0), {}),
                tokens=TokensSettings(deadline_s=10.0),
                probes=ProbeSettings(interval_s=0.05),
                routing=RoutingSettings(lookup_timeout_s=5.0),
                redis=redis,
            )
            async with (
                running_kvlb(settings) as kvlb,
                httpx.AsyncClient(base_url=kvlb.url, trust_env=False, timeout=10) as http,
            ):
                stage = Stage(http, fleet.engines)
                await stage.until(lambda status: status["ready"] and not status["reasons"])
                yield stage

    return run


def holds(status: Any, alias: str) -> int:
    """Blocks that the index has of an instance."""
    (rank,) = next(each for each in status["instances"] if each["alias"] == alias)["ranks"]
    blocks: int = rank["index"]["held_blocks"]
    return blocks


async def test_reset_without_an_event_costs_one_wrong_guess(staging: Staging) -> None:
    """F03: 200 and the right text; counted as over-predicted; then right again."""
    async with staging() as stage:
        alias, _, _ = await stage.ask(PROMPT)
        await stage.until(lambda status: holds(status, alias) == 250)
        engine = next(each for each in stage.engines if each.name == alias)
        await stage.http.post(f"{engine.url}/reset_prefix_cache")
        before = await stage.overpredicted_tokens()

        assert await stage.ask(PROMPT) == (alias, 3984, 0)
        assert await stage.overpredicted_tokens() == before + 3984

        await stage.until(lambda status: holds(status, alias) == 250)
        assert await stage.ask(PROMPT) == (alias, 3984, 3984)


async def test_sleeping_instance_gets_no_credit_and_no_traffic(staging: Staging) -> None:
    """F03: the other one answers, whatever the sleeper was believed to hold."""
    async with staging() as stage:
        alias, _, _ = await stage.ask(PROMPT)
        await stage.until(lambda status: holds(status, alias) == 250)
        engine = next(each for each in stage.engines if each.name == alias)
        (other,) = {each.name for each in stage.engines} - {alias}

        await stage.http.post(f"{engine.url}/sleep")
        await stage.until(lambda status: "sleeping" in str(status["instances"]))
        assert (await stage.ask(PROMPT))[:2] == (other, 0)

        await stage.http.post(f"{engine.url}/wake_up")
        await stage.until(lambda status: "sleeping" not in str(status["instances"]))
