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
        async with running_kvlb(settings) as kvlb, asyncio.timeout(10):
            is_known = False
            while not is_known:
                is_known = await knows_all(kvlb, len(engines.engines))
                await asyncio.sleep(0.01)
            yield kvlb


async def knows_all(kvlb: RunningKvlb, engines: int) -> bool:
    async with httpx.AsyncClient(trust_env=False) as http:
        status = (await http.get(f"{kvlb.url}/status")).json()
    ranks = [rank["index"] for each in status["instances"] for rank in each["ranks"]]
    return [rank["trust"] for rank in ranks if rank].count("exact") == engines


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

    async with up(fleet) as kvlb, httpx.AsyncClient(trust_env=False) as http:
        for turn in range(TURNS):
            for who, seen in by_conversation.items():
                answer = await http.post(kvlb.url + path, json=body(turn, who))
                assert answer.status_code == 200, answer.text
                headers = answer.headers
                overlap = int(headers["x-kvlb-overlap-tokens"])
                seen.append((headers["x-kvlb-instance"], overlap))
        recent = (await http.get(f"{kvlb.url}/explain/recent")).json()["decisions"]

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
