"""An engine that hangs, before kvlb with its usual limits: its probes tell, minutes before they do."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import yaml

from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, running_fleet

SLOW = EngineSettings(prefill_tokens_per_s=1500.0, inter_token_ms=1.0)
ASKED = {"model": "sim", "prompt": "some words " * 100, "max_tokens": 4}


async def test_requests_that_wait_for_an_engine_that_hangs_are_served_elsewhere(
    tmp_path: Path,
) -> None:
    """Within seconds; the limit of the first byte is ten minutes."""
    async with running_fleet(FleetSpec.parse("2"), engine=SLOW) as fleet:
        file = tmp_path / "kvlb.yaml"
        probes = {"interval_s": 0.05, "timeout_s": 0.5, "unhealthy_after": 1}
        file.write_text(
            yaml.safe_dump(
                {
                    "instances": [{"url": each.url, "alias": each.name} for each in fleet.engines],
                    "probes": probes,
                }
            )
        )
        async with (
            running_kvlb(load_settings(file, Overrides(port=0), {})) as kvlb,
            httpx.AsyncClient(base_url=kvlb.url, trust_env=False, timeout=30) as http,
            asyncio.TaskGroup() as group,
        ):
            await until_well(http, len(fleet.engines))
            asked = group.create_task(http.post("/v1/completions", json=ASKED))
            hung = await busy(fleet.engines)
            hung.freeze()
            answer = await asked
            hung.thaw()

    assert answer.status_code == 200
    assert answer.headers["x-kvlb-instance"] != hung.name
    assert answer.headers["x-kvlb-retries"] == "1"


async def until_well(http: httpx.AsyncClient, engines: int) -> None:
    async with asyncio.timeout(20):
        while True:
            instances = (await http.get("/status")).json()["instances"]
            if sum(each["healthy"] for each in instances) == engines:
                return
            await asyncio.sleep(0.01)


async def busy(engines: tuple[RunningEngine, ...]) -> RunningEngine:
    """Wait until one of them has a request."""
    found: list[RunningEngine] = []

    def is_found() -> bool:
        found.extend(each for each in engines if any(rank.in_flight for rank in each.engine.ranks))
        return bool(found)

    await until(is_found)
    return found[0]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.002)
