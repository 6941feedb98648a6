"""What /metrics says under traffic that made other balancers' figures useless."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[3] / "dashboards/rules/recording.yml"
PROMPT = list(range(1_000, 1_512))
CACHED = len(PROMPT) // 16 * 16 - 16
"""The engine computes the last token itself, and so the block that ends with it."""
HIT_RATE = ("kvlb_delivered_tokens_total", "kvlb_delivered_known_prompt_tokens_total")


async def probed_again(kvlb: Any, engine: Any, times: int) -> None:
    """Wait for health probes after this moment."""
    received = engine.engine.received
    received.clear()

    async def is_so() -> bool:
        return sum(1 for each in received if each.path == "/health") >= times

    await kvlb.until(is_so)


async def test_f57_hit_rate_is_made_of_counters_that_probes_leave_alone(
    kvlb_up: Any, engines_up: Any, describe: Callable[..., dict[str, Any]]
) -> None:
    """90 hits, 10 misses, probes and a restart: a window's rate is that window's, whenever scraped."""
    random = Random(57)  # noqa: S311 - no secret
    async with engines_up("1") as fleet:
        (engine,) = fleet.engines
        instances = [describe(engine)]
        async with kvlb_up(instances) as kvlb:
            await kvlb.all_known(["m0"])
            await kvlb.complete(PROMPT)
            scrapes = [await hit_rate_parts(kvlb)]
            for _ in range(90):
                await kvlb.complete(PROMPT)
            scrapes.append(await hit_rate_parts(kvlb))
            for _ in range(10):
                await kvlb.complete([random.randrange(3, 30_000) for _ in PROMPT])
            scrapes.append(await hit_rate_parts(kvlb))
            await probed_again(kvlb, engine, 3)
            scrapes.append(await hit_rate_parts(kvlb))
        async with kvlb_up(instances) as kvlb:
            await kvlb.all_known(["m0"])
            anew = await hit_rate_parts(kvlb)
            await kvlb.complete(PROMPT)
            after = await hit_rate_parts(kvlb)

    changes = [
        [now - before for now, before in zip(later, earlier, strict=True)]
        for earlier, later in pairwise(scrapes)
    ]
    hits, misses = [90 * CACHED, 90 * len(PROMPT)], [0, 10 * len(PROMPT)]
    assert changes == [hits, misses, [0, 0]]
    assert anew == [0, 0]
    assert after == [CACHED, len(PROMPT)]


async def hit_rate_parts(kvlb: Any) -> list[float]:
    return [await kvlb.total(name) for name in HIT_RATE]


def test_f57_recorded_hit_rates_divide_rates_over_a_window() -> None:
    """A counter is nowhere read as it stands, so that a reset does no harm."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    counters = re.compile(r"(\w+\()?(kvlb_\w+_total)\b")
    readings = [found for expr in rules for found in counters.findall(expr)]

    assert {name for _, name in readings} >= set(HIT_RATE)
    assert {function for function, _ in readings} <= {"rate(", "increase("}


async def test_f58_what_clients_invent_makes_no_series(
    kvlb_up: Any, engines_up: Any, describe: Callable[..., dict[str, Any]]
) -> None:
    """1,000 random models, paths and ids: not one series more than after the first of them."""
    random = Random(58)  # noqa: S311 - no secret
    async with engines_up("1") as fleet, kvlb_up([describe(fleet.engines[0])]) as kvlb:
        await kvlb.all_known(["m0"])
        statuses: Counter[int] = Counter()
        known: list[set[str]] = []
        for number in range(1_000):
            name = f"{random.getrandbits(64):x}"
            ids = {"x-request-id": name}
            body = {"model": name, "prompt": PROMPT}
            url = f"{kvlb.url}/v1/completions"
            statuses[(await kvlb.http.post(url, json=body, headers=ids)).status_code] += 1
            if number % 10 == 0:
                strange = f"{kvlb.url}/{random.choice(['', 'v1/', 'v1/completions/'])}{name}"
                statuses[(await kvlb.http.get(strange)).status_code] += 1
                await kvlb.http.post(strange, json=body)
            if number in {99, 999}:
                known.append(set(await kvlb.series()))

    assert statuses == {404: 1_100}
    assert known[0] == known[1]


@pytest.mark.timeout(180)  # forty engines
async def test_f58_instances_that_come_and_go_leave_no_series(
    kvlb_up: Any, engines_up: Any, describe: Callable[..., dict[str, Any]], unused_url: str
) -> None:
    """Five fleets of eight, each replaced by the next: /metrics knows the present one only."""
    nobody = {"url": unused_url, "alias": "nobody"}
    async with kvlb_up([nobody]) as kvlb:
        sizes = []
        for round_ in range(5):
            async with engines_up("8") as fleet:
                pods = [describe(each, alias=f"pod-{round_}-{each.name}") for each in fleet.engines]
                await kvlb.reload(pods)
                await kvlb.all_known([each["alias"] for each in pods])
                for number in range(40):
                    answer = await kvlb.complete([number + 3, round_ + 3] * 32)
                    assert answer.status_code == 200
                # The indexer stops streams after the balancer has read the file.
                await kvlb.until(lambda pods=pods: shows_only(kvlb, pods))
                sizes.append(len(await kvlb.series()))
        await kvlb.reload([nobody])
        await kvlb.until(lambda: shows_only(kvlb, [nobody]))

    # Which of eight got requests may differ from round to round.
    assert max(sizes) < 1.25 * sizes[1]


async def shows_only(kvlb: Any, instances: Sequence[Mapping[str, Any]]) -> bool:
    """No series is of anybody else."""
    told = re.findall(r'instance="([^"]*)"', "\n".join(await kvlb.series()))
    return set(told) - {"other"} == {each["alias"] for each in instances}
