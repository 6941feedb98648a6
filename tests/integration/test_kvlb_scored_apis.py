"""Messages, responses and token ids go where their prompts are cached, before simulated engines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from balancer.core.settings.control import TokensSettings
from kvlb.running import RunningKvlb, running_kvlb
from kvlb.settings import Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

TURNS = 3
REASONS = {"m": "aggregated", "d": "not_splittable"}
"""By the role of who answers: a decode instance would have been sent these prompts by another."""
LONG = "These are some of the words that a conversation begins with. " * 30


@asynccontextmanager
async def up(fleet: str) -> AsyncIterator[RunningKvlb]:
    """Simulated engines, and a balancer before them that knows all of their events."""
    async with simulated_fleet(parse_fleet(fleet), EngineSettings(inter_token_ms=1.0)) as engines:
        options = tuple(instance_option(engine) for engine in engines.engines)
        settings = msgspec.structs.replace(
            load_settings(None, Overrides(instances=options, port=0), {}),
            tokens=TokensSettings(deadline_s=10.0),
        )
        async with running_kvlb(settings) as kvlb:
            await until(kvlb, lambda ranks: trusted(ranks) == len(engines.engines))
            yield kvlb


async def until(kvlb: RunningKvlb, holds: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Wait until what the index says of the ranks is so."""
    async with asyncio.timeout(20), httpx.AsyncClient(trust_env=False) as http:
        is_so = False
        while not is_so:
            status = (await http.get(f"{kvlb.url}/status")).json()
            is_so = holds([rank["index"] for each in status["instances"] for rank in each["ranks"]])
            await asyncio.sleep(0.01)


def trusted(ranks: list[dict[str, Any]]) -> int:
    return sum(1 for rank in ranks if rank and rank["trust"] == "exact")


def held(ranks: list[dict[str, Any]]) -> int:
    return sum(rank["held_blocks"] for rank in ranks if rank)


def message(turn: int, who: int) -> dict[str, Any]:
    said = [f"{who}: {LONG} {number}" for number in range(turn + 1)]
    told = [
        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)
    ]
    return {"model": "sim", "max_tokens": 2, "messages": [*told, {"role": "user", "content": "?"}]}


def response(turn: int, who: int) -> dict[str, Any]:
    body = message(turn, who)
    return {"model": "sim", "max_output_tokens": 2, "input": body["messages"], "store": False}


@pytest.mark.parametrize("fleet", ["4", "1p3d"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/messages", message, id="messages"),
        pytest.param("/v1/responses", response, id="responses"),
    ],
)
async def test_conversation_stays_where_it_is_cached(
    path: str, body: Callable[[int, int], dict[str, Any]], fleet: str
) -> None:
    """Each turn finds what the ones before have left, whatever came in between; nobody prefills for it."""
    by_conversation: dict[int, list[tuple[str, int]]] = {who: [] for who in range(6)}
    recent: list[dict[str, Any]] = []

    async with up(fleet) as kvlb, httpx.AsyncClient(trust_env=False) as http:
        for turn in range(TURNS):
            for who, seen in by_conversation.items():
                answer = await http.post(kvlb.url + path, json=body(turn, who))
                assert answer.status_code == 200, answer.text
                headers = answer.headers
                overlap = int(headers["x-kvlb-overlap-tokens"])
                assert headers["x-kvlb-reason"] == REASONS[headers["x-kvlb-instance"][0]]
                seen.append((headers["x-kvlb-instance"], overlap))
            recent = (await http.get(f"{kvlb.url}/explain/recent")).json()["decisions"]
            computed = sum(each["prompt_tokens"] // 16 for each in recent[: len(by_conversation)])
            await until(kvlb, lambda ranks, least=computed: held(ranks) >= least)  # type: ignore[misc]

    for seen in by_conversation.values():
        assert len({instance for instance, _ in seen}) == 1
        overlaps = [overlap for _, overlap in seen]
        assert overlaps[0] < overlaps[1] < overlaps[2]
    assert len({seen[0][0] for seen in by_conversation.values()}) == 3 + (fleet == "4")
    assert {leg["leg"] for decision in recent for leg in decision["legs"]} == {"forward"}
    assert all(decision["prompt_tokens"] for decision in recent)


async def test_unreadable_prompt_goes_by_load() -> None:
    """What only the engine keeps, or nobody can read, is no reason to refuse."""
    odd: list[dict[str, Any]] = [
        {"model": "sim", "max_output_tokens": 2, "input": []},
        {"model": "sim", "max_output_tokens": 2, "input": [{"type": "hologram"}]},
    ]
    async with up("2") as kvlb, httpx.AsyncClient(trust_env=False) as http:
        for body in odd:
            answer = await http.post(f"{kvlb.url}/v1/responses", json=body)
            assert "x-kvlb-overlap-tokens" not in answer.headers
        raw = await http.post(
            f"{kvlb.url}/v1/messages", content=b"{", headers={"content-type": "application/json"}
        )

    assert raw.status_code == 400
