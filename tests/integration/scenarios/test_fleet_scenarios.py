"""Members of a fleet that leave, vanish and are replaced, as operators reported it of others."""

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

PROMPT = list(range(1_000, 1_512))
BODY: dict[str, Any] = {"prompt": [3, 4, 5], "max_tokens": 1}


async def stream(kvlb: Any, begun: asyncio.Semaphore) -> tuple[str, str]:
    """One long answer: who gave it, and all of it."""
    length = {"max_tokens": 800, "ignore_eos": True}
    body = {"model": "sim", "prompt": PROMPT, "stream": True, **length}
    async with kvlb.http.stream("POST", f"{kvlb.url}/v1/completions", json=body) as answer:
        text = ""
        async for piece in answer.aiter_text():
            if not text:
                begun.release()
            text += piece
        return answer.headers["x-kvlb-instance"], text


async def ask_fifty(kvlb: Any) -> list[httpx.Response]:
    """Every second one of them is what the draining instance holds."""
    random = Random(55)  # noqa: S311 - no secret
    prompts = [
        PROMPT if number % 2 else [random.randrange(3, 30_000) for _ in range(64)]
        for number in range(50)
    ]
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(kvlb.complete(prompt)) for prompt in prompts]
    return [each.result() for each in asked]


@pytest.mark.parametrize("way", ["health-says-503", "disabled"])
async def test_f55_draining_instance_gets_nothing_and_finishes_what_runs(
    kvlb_up: Any, engines_up: Any, describe: Callable[..., dict[str, Any]], way: str
) -> None:
    """Five streams end whole, fifty requests go elsewhere, and nothing of it stays when it is gone."""
    begun = asyncio.Semaphore(0)
    async with engines_up("2", inter_token_ms=5.0) as fleet, asyncio.TaskGroup() as group:
        leaving, staying = fleet.engines
        # Only one takes requests at first, so that all five streams run there.
        async with kvlb_up([describe(leaving), describe(staying, enabled=False)]) as kvlb:
            await kvlb.all_known(["m0"])
            streams = [group.create_task(stream(kvlb, begun)) for _ in range(5)]
            for _ in streams:
                await begun.acquire()
            await kvlb.until(lambda: holds(kvlb, "m0"))
            if way == "disabled":
                await kvlb.reload([describe(leaving, enabled=False), describe(staying)])
            else:
                leaving.engine.is_draining = True
                await kvlb.reload([describe(leaving), describe(staying)])
                await kvlb.until(lambda: is_out(kvlb, "m0"))
            await kvlb.all_known(["m1"])
            running = [each for each in streams if not each.done()]
            answers = await ask_fifty(kvlb)
            ended = [await each for each in streams]
            await fleet.stop(leaving)
            await kvlb.reload([describe(staying)])
            series = await kvlb.series()

    assert len(running) == 5
    assert Counter(each.status_code for each in answers) == {200: 50}
    assert {each.headers["x-kvlb-instance"] for each in answers} == {"m1"}
    assert {name for name, _ in ended} == {"m0"}
    assert all(text.endswith("data: [DONE]\n\n") for _, text in ended)
    assert [each for each in series if '"m0"' in each] == []


async def holds(kvlb: Any, name: str) -> bool:
    return bool((await kvlb.overlaps(PROMPT)).get(name, 0))


async def is_out(kvlb: Any, name: str) -> bool:
    return not (await kvlb.status())[name]["available"]


async def test_f56_engine_that_vanished_is_out_and_its_successor_inherits_nothing(
    kvlb_up: Any, engines_up: Any, describe: Callable[..., dict[str, Any]]
) -> None:
    """Nobody told that it went: failed connects do; the next owner of its address begins empty."""
    async with engines_up("2") as fleet:
        stays, vanishes = fleet.engines
        async with kvlb_up([describe(vanishes)]) as kvlb:
            await kvlb.all_known(["m1"])
            await kvlb.complete(PROMPT)
            await kvlb.until(lambda: holds(kvlb, "m1"))
            # The source of members can't be read while the engine goes, and still lists it after.
            kvlb.file.write_text("{")
            await fleet.stop(vanishes)
            both = [describe(stays), describe(vanishes)]
            await kvlb.reload(both)
            await kvlb.until(lambda: is_out(kvlb, "m1"))
            await kvlb.all_known(["m0"])
            gone = (await kvlb.status())["m1"]
            answers = [await kvlb.complete(PROMPT) for _ in range(10)]

            vanishes.settings = msgspec.structs.replace(vanishes.settings, model="other")
            await fleet.start(vanishes)
            await kvlb.all_known(["m0", "m1"])
            successor = (await kvlb.status())["m1"]
            inherited = await kvlb.overlaps(PROMPT, "other")
            of_the_old_model = await kvlb.overlaps(PROMPT)

    assert gone["reason"]
    assert {(each.status_code, each.headers["x-kvlb-instance"]) for each in answers} == {
        (200, "m0")
    }
    assert successor["models"]["base"] == "other"
    assert inherited == {"m1": 0}
    assert of_the_old_model.keys() == {"m0"}


async def test_f59_only_an_outage_is_503(
    kvlb_up: Any, engines_up: Any, describe: Callable[..., dict[str, Any]]
) -> None:
    """A model that is none is 404, no name among two is 400, a model whose instance is down 503."""
    async with engines_up("2") as fleet:
        up, down = fleet.engines
        down.settings = msgspec.structs.replace(down.settings, model="other")
        await fleet.restart(down)
        async with kvlb_up([describe(up), describe(down)]) as kvlb:
            await kvlb.all_known(["m0", "m1"])
            await fleet.stop(down)
            await kvlb.until(lambda: is_out(kvlb, "m1"))
            url = f"{kvlb.url}/v1/completions"
            models: dict[str, dict[str, Any]] = {
                "unknown": {"model": "nope"},
                "empty": {"model": ""},
                "missing": {},
                "number": {"model": 42},
                "down": {"model": "other"},
                "up": {"model": "sim"},
            }
            asked = {
                name: await kvlb.http.post(url, json=BODY | model) for name, model in models.items()
            }

    assert {name: each.status_code for name, each in asked.items()} == {
        "unknown": 404,
        "empty": 400,
        "missing": 400,
        "number": 400,
        "down": 503,
        "up": 200,
    }
    assert asked["unknown"].json()["error"]["code"] == "model_not_found"
    assert asked["down"].json()["error"]["code"] == "no_instance"
