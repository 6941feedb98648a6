"""Fleets of simulated engines: specs, prefill and decode legs over HTTP, the workload."""

import asyncio
from collections.abc import AsyncIterator
from random import SystemRandom
from typing import Any

import httpx
import pytest

from simulator.core.errors import SettingsError
from simulator.core.settings import EngineSettings
from simulator.ports import find_free_ports
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet
from simulator.workload import WorkloadShape, conversations

PROMPT = "a long prompt " * 20
FAST = EngineSettings(
    prefill_tokens_per_s=1e6, inter_token_ms=0.5, num_blocks=256, transfer_tokens_per_s=1e6
)


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("2p2d", ("prefill", "prefill", "decode", "decode")),
        ("3", ("mixed", "mixed", "mixed")),
        ("1P1d2m", ("prefill", "decode", "mixed", "mixed")),
    ],
)
def test_fleet_spec_names_roles(text: str, roles: tuple[str, ...]) -> None:
    """Numbers and letters say how many of which role."""
    assert FleetSpec.parse(text).roles == roles


@pytest.mark.parametrize("text", ["", "0", "p2", "2x", "-1", "999m"])
def test_nonsense_is_no_fleet(text: str) -> None:
    """The error says how a fleet is written."""
    with pytest.raises(SettingsError):
        FleetSpec.parse(text)


@pytest.fixture
async def fleet() -> AsyncIterator[RunningFleet]:
    async with running_fleet(FleetSpec.parse("1p1d1m"), engine=FAST) as fleet:
        yield fleet


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as client:
        yield client


async def complete(client: httpx.AsyncClient, engine: RunningEngine, **body: Any) -> httpx.Response:
    asked = {"prompt": PROMPT, "max_tokens": 8} | body
    return await client.post(f"{engine.url}/v1/completions", json=asked)


async def run_prefill(
    client: httpx.AsyncClient, engine: RunningEngine, **body: Any
) -> dict[str, Any]:
    """Run a prefill leg and return its transfer parameters."""
    asked = {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answer = (await complete(client, engine, **(asked | body))).json()
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


async def state(client: httpx.AsyncClient, engine: RunningEngine) -> dict[str, Any]:
    answer = (await client.get(f"{engine.url}/simulator/state")).json()
    found: dict[str, Any] = answer["ranks"][0]
    return found


async def wait_for_one(client: httpx.AsyncClient, engine: RunningEngine, name: str) -> None:
    """Wait until a figure of the engine's state is 1."""
    async with asyncio.timeout(20):
        while True:
            if (await state(client, engine))[name] == 1:
                return
            await asyncio.sleep(0.005)


async def test_two_legs_give_the_text_of_one(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """Prefill here and decode there says what one engine says, and leaves nothing pinned."""
    prefill, decode, mixed = fleet.engines
    params = await run_prefill(client, prefill)
    held = await state(client, prefill)
    both = (await complete(client, decode, kv_transfer_params=params)).json()
    alone = (await complete(client, mixed)).json()

    assert both["choices"][0]["text"] == alone["choices"][0]["text"]
    assert held["reservations_open"] == 1
    after = await state(client, prefill)
    assert (after["reservations_unreleased"], after["reservations_released"]) == (0, 1)
    assert (await state(client, decode))["computed_prompt_tokens"] == 1


async def test_decode_alone_needs_no_parameters(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """What a decode engine got for one request it has for the next."""
    prefill, decode, _mixed = fleet.engines
    await complete(client, decode, kv_transfer_params=await run_prefill(client, prefill))
    answer = (await complete(client, decode)).json()

    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 272
    assert answer["kv_transfer_params"] is None


async def test_fleets_of_two_processes_say_why_they_cannot_hand_over(
    client: httpx.AsyncClient,
) -> None:
    """Each process has a directory of its own; the error is one that OpenAI clients read."""
    async with (
        running_fleet(FleetSpec.parse("1p"), engine=FAST) as there,
        running_fleet(FleetSpec.parse("1d"), engine=FAST) as here,
    ):
        params = await run_prefill(client, there.engines[0])
        answer = await complete(client, here.engines[0], kv_transfer_params=params)

    assert answer.status_code == 500
    assert "only inside one `kvlb simulate`" in answer.json()["error"]["message"]


async def test_refused_decode_leg_lets_prefill_go(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """A 400 at the decode engine frees the blocks of the prefill engine."""
    prefill, decode, _mixed = fleet.engines
    params = await run_prefill(client, prefill)
    refused = await complete(client, decode, kv_transfer_params=params, max_tokens=0)

    assert refused.status_code == 400
    assert (await state(client, prefill))["reservations_open"] == 0


async def test_dead_prefill_engine_fails_the_decode_leg(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """Blocks of an engine that is gone: 500 whole, an error event in a stream."""
    prefill, decode, _mixed = fleet.engines
    params = await run_prefill(client, prefill)
    await fleet.restart(prefill)
    whole = await complete(client, decode, kv_transfer_params=params)
    streamed = await complete(client, decode, kv_transfer_params=params, stream=True)

    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "InternalServerError"
    assert streamed.status_code == 200
    assert '"code":500' in streamed.text
    for text in (whole.text, streamed.text):
        assert "only inside one `kvlb simulate`" in text
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_decode_engine_after_the_lease_gives_wrong_text(client: httpx.AsyncClient) -> None:
    """Too late is not an error but another text, counted by the prefill engine."""
    engine = EngineSettings(prefill_tokens_per_s=1e6, inter_token_ms=0.5, kv_lease_s=0.05)
    async with running_fleet(FleetSpec.parse("1p1d"), engine=engine) as fleet:
        prefill, decode = fleet.engines
        params = await run_prefill(client, prefill)
        await wait_for_one(client, prefill, "reservations_expired")
        answer = (await complete(client, decode, kv_transfer_params=params)).json()
        counted = await state(client, prefill)

    assert answer["choices"][0]["text"] == "########"
    assert counted["reads_after_expiry"] == 1
    assert counted["reservations_unreleased"] == 1


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"do_remote_prefill": True}, id="incomplete"),
        pytest.param({"do_remote_prefill": False, "remote_engine_id": "x"}, id="not-asked"),
        pytest.param({}, id="empty"),
    ],
)
async def test_parameters_that_say_too_little_are_ignored(
    fleet: RunningFleet, client: httpx.AsyncClient, params: dict[str, Any]
) -> None:
    """Without a full address the engine computes the prompt itself."""
    answer = await complete(client, fleet.engines[1], kv_transfer_params=params)

    assert answer.status_code == 200
    assert (await state(client, fleet.engines[1]))["computed_prompt_tokens"] == 281


async def test_flat_and_unreadable_block_ids_are_read_as_far_as_they_go(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """Releases send a flat list or one per group; the request id finds the blocks."""
    prefill, decode, _mixed = fleet.engines
    for block_ids in ([1, 2], "opaque"):
        params = await run_prefill(client, prefill) | {"remote_block_ids": block_ids}
        assert (await complete(client, decode, kv_transfer_params=params)).status_code == 200

    assert (await state(client, decode))["corrupt_reads"] == 0


async def test_engines_without_connector_ignore_transfer_parameters(
    client: httpx.AsyncClient,
) -> None:
    """A fleet without prefill and decode roles keeps nothing for others."""
    async with running_fleet(FleetSpec.parse("1"), engine=FAST) as fleet:
        asked = {"kv_transfer_params": {"do_remote_decode": True}}
        answer = (await complete(client, fleet.engines[0], **asked)).json()
        held = await state(client, fleet.engines[0])

    assert answer["kv_transfer_params"] is None
    assert held["reservations_open"] == 0


async def test_prefill_queue_goes_on_when_decode_frees_blocks(client: httpx.AsyncClient) -> None:
    """A prefill engine full of kept blocks waits for decode, not for the end of the lease."""
    engine = EngineSettings(
        prefill_tokens_per_s=1e6, inter_token_ms=0.5, num_blocks=21, transfer_tokens_per_s=1e6
    )
    async with running_fleet(FleetSpec.parse("1p1d"), engine=engine) as fleet:
        prefill, decode = fleet.engines
        params = await run_prefill(client, prefill)
        async with asyncio.TaskGroup() as group:
            other = group.create_task(complete(client, prefill, prompt="other " * 50, max_tokens=1))
            await wait_for_one(client, prefill, "waiting")
            await complete(client, decode, kv_transfer_params=params)
            async with asyncio.timeout(20):
                answer = await other

    assert answer.status_code == 200


async def test_streamed_decode_leg_carries_no_parameters_of_its_own(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """Only a leg that keeps blocks returns parameters, on its last chunk since 0.33."""
    prefill, decode, _mixed = fleet.engines
    kept = await complete(
        client, prefill, stream=True, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
    )
    plain = await complete(client, decode, stream=True)

    assert '"kv_transfer_params":{"do_remote_prefill":true' in kept.text
    assert "kv_transfer_params" not in plain.text


async def test_base_port_lays_out_a_fleet(unused_tcp_port: int) -> None:
    """HTTP ports count up from the base, then events, then replays."""
    base_port = 12_000 + unused_tcp_port % 2_000
    async with running_fleet(FleetSpec.parse("2"), engine=FAST, base_port=base_port) as fleet:
        first, second = fleet.engines

    assert [engine.name for engine in fleet.engines] == ["m0", "m1"]
    assert (first.url, second.url) == (
        f"http://127.0.0.1:{base_port}",
        f"http://127.0.0.1:{base_port + 1}",
    )
    assert second.events_endpoint == f"tcp://127.0.0.1:{base_port + 3}"
    assert second.replay_endpoint == f"tcp://127.0.0.1:{base_port + 5}"


async def test_port_in_use_is_an_error_and_leaves_nothing_open() -> None:
    """A fleet that can't have its HTTP port doesn't start, and the port's owner goes on."""
    async with running_fleet(FleetSpec.parse("1"), engine=FAST) as fleet:
        port = int(fleet.engines[0].url.rpartition(":")[2])
        with pytest.raises(ExceptionGroup) as raised:
            async with running_fleet(FleetSpec.parse("1"), engine=FAST, base_port=port):
                pass

        assert raised.group_contains(OSError)


async def test_event_port_in_use_is_an_error_too() -> None:
    """The event ports are waited for, since a restart frees them late, but not for ever."""
    first = find_free_ports("127.0.0.1", 6, SystemRandom())
    async with running_fleet(FleetSpec.parse("1"), engine=FAST, base_port=first + 1):
        with pytest.raises(ExceptionGroup) as raised:
            async with running_fleet(FleetSpec.parse("1"), engine=FAST, base_port=first):
                pass

        assert raised.group_contains(TimeoutError, match="in use")


def test_workload_is_a_function_of_its_seed() -> None:
    """The same seed gives the same conversations, another seed others."""
    assert conversations(1) == conversations(1)
    assert conversations(1) != conversations(2)


def test_workload_has_the_shape_asked_for() -> None:
    """Counts, lengths and the order of arrivals follow the shape."""
    shape = WorkloadShape(
        conversations=5, turns=3, shared_system_chars=0, first_message_chars=100, think_s=0.0
    )
    written = conversations(3, shape)

    assert len(written) == 5
    assert {len(conversation.turns) for conversation in written} == {3}
    assert all(conversation.system is None for conversation in written)
    starts = [conversation.start_s for conversation in written]
    assert starts == sorted(starts)
    first_turns = [conversation.turns[0] for conversation in written]
    assert all(40 <= len(turn.text) <= 200 and turn.think_s == 0 for turn in first_turns)
