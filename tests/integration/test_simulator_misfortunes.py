"""What can befall a simulated engine from outside: it is killed, hangs, or loses the network."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from simulator.core.history import Condition
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet

FAST = EngineSettings(prefill_tokens_per_s=1e6, inter_token_ms=1.0, num_blocks=256)
ASKED: dict[str, Any] = {"prompt": "a prompt of some length " * 4, "max_tokens": 8}
LONG: dict[str, Any] = {**ASKED, "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture
async def fleet() -> AsyncIterator[RunningFleet]:
    async with running_fleet(FleetSpec.parse("1p1d"), engine=FAST) as fleet:
        yield fleet


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        yield client


async def complete(client: httpx.AsyncClient, engine: RunningEngine, **body: Any) -> httpx.Response:
    return await client.post(f"{engine.url}/v1/completions", json=ASKED | body)


async def test_a_frozen_engine_accepts_and_says_nothing_until_it_goes_on(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """Also /health; what was asked meanwhile is answered then."""
    engine = fleet.engines[1]
    engine.freeze()
    with pytest.raises(httpx.ReadTimeout):
        await client.get(f"{engine.url}/health", timeout=httpx.Timeout(20, read=0.2))
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(complete(client, engine))
        await asyncio.sleep(0.05)
        was_done = asked.done()
        engine.thaw()

    assert not was_done
    assert asked.result().status_code == 200


async def test_a_stream_stands_still_with_its_engine(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """Not a token comes, nor is one computed; then it goes on without a loss."""
    engine = fleet.engines[1]
    body = {**LONG, "max_tokens": 60}
    async with client.stream("POST", f"{engine.url}/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        engine.freeze()
        await asyncio.sleep(0.1)  # steps and bytes that were under way
        before = engine.engine.ranks[0].core.statistics.steps
        await asyncio.sleep(0.1)
        after = engine.engine.ranks[0].core.statistics.steps
        engine.thaw()
        rest = [line async for line in lines if line.startswith("data: {")]

    assert before == after
    assert len(rest) == 59


async def test_a_frozen_engine_can_be_killed(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """Its connections break at once, and its next life answers."""
    engine = fleet.engines[1]
    engine.freeze()
    host, port = engine.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    await fleet.restart(engine)
    answered = await until_broken(reader)
    writer.close()

    assert not answered
    assert (await complete(client, engine)).status_code == 200


async def until_broken(reader: asyncio.StreamReader) -> bytes:
    """What comes before the connection breaks."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def fails(client: httpx.AsyncClient, engine: RunningEngine) -> bool:
    """Ask; True if the connection broke."""
    try:
        await complete(client, engine)
    except httpx.TransportError:
        return True
    return False


async def test_an_engine_that_is_cut_off_lives_on(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """Refused, its streams broken; its caches and its id are there when it is back."""
    engine = fleet.engines[1]
    await complete(client, engine)
    before = engine.engine
    async with client.stream("POST", f"{engine.url}/v1/completions", json=LONG) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        await engine.cut_off()
        with pytest.raises(httpx.TransportError):
            async for _ in lines:
                pass
    refused = await fails(client, engine)
    await engine.connect()
    again = await complete(client, engine)

    assert refused
    assert engine.engine is before
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 80


async def test_an_engine_that_is_cut_off_can_be_killed(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """Its next life is reached."""
    engine = fleet.engines[1]
    await engine.cut_off()
    await fleet.restart(engine)

    assert (await complete(client, engine)).status_code == 200


async def test_cut_connections_are_made_anew(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """What is open breaks; the next request is served."""
    engine = fleet.engines[1]
    async with client.stream("POST", f"{engine.url}/v1/completions", json=LONG) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        engine.cut()
        with pytest.raises(httpx.TransportError):
            async for _ in lines:
                pass

    assert (await complete(client, engine)).status_code == 200


async def test_the_fleet_keeps_account_of_what_befell_whom(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """And of each request: which engine had it, and how it ended."""
    prefill, decode = fleet.engines
    await client.post(f"{decode.url}/v1/completions", json=ASKED, headers={"x-request-id": "one"})
    await complete(client, decode, model="nobody")
    decode.freeze()
    frozen = fleet.history.condition("d0", time.monotonic())
    decode.thaw()
    await decode.cut_off()
    await decode.connect()
    await fleet.stop(decode)

    assert frozen is Condition.FROZEN
    assert [change.what for change in fleet.history.changes if change.engine == "d0"] == [
        *("started", "frozen", "thawed", "cut_off", "connected", "killed")
    ]
    assert [(each.engine, each.request_id, each.outcome) for each in fleet.history.attempts] == [
        ("d0", "one", "complete"),
        ("d0", "", "refused"),
    ]
    assert prefill.name == "p0"


async def test_counts_outlive_the_engine_that_made_them(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """A decode engine that couldn't load says so, and still does after its end."""
    decode = fleet.engines[1]
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "nobody",
        "remote_block_ids": [1],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
    }
    failed = await complete(client, decode, kv_transfer_params=params)
    alive = decode.counts
    await fleet.restart(decode)

    assert failed.status_code == 500
    assert alive.failed_loads == 1
    assert decode.counts == alive
    assert [each.outcome for each in fleet.history.attempts] == ["failed"]


async def befall(client: httpx.AsyncClient, asked: RunningEngine, **order: Any) -> httpx.Response:
    return await client.post(f"{asked.url}/simulator/misfortunes", json=order)


async def test_one_engine_is_killed_and_brought_back_over_http(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """By another one: when it answers it is so."""
    prefill, decode = fleet.engines
    before = decode.engine
    killed = await befall(client, prefill, engine="d0", what="kill")
    refused = await fails(client, decode)
    started = await befall(client, prefill, engine="d0", what="start")

    assert (killed.status_code, killed.json()) == (200, {"engine": "d0", "what": "kill"})
    assert refused
    assert started.status_code == 200
    assert decode.engine is not before
    assert (await complete(client, decode)).status_code == 200


async def test_one_engine_hangs_and_goes_on_over_http(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """A cut breaks what is open and nothing else."""
    prefill = fleet.engines[0]
    for what in ("cut", "freeze", "thaw"):
        assert (await befall(client, prefill, engine="d0", what=what)).status_code == 200

    changes = [change.what for change in fleet.history.changes if change.engine == "d0"]
    assert changes == ["started", "cut", "frozen", "thawed"]


async def test_an_engine_that_is_to_kill_itself_says_so_first(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """It can't later."""
    decode = fleet.engines[1]
    answer = await befall(client, decode, engine="d0", what="kill")
    async with asyncio.timeout(20):
        while decode.is_running:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)

    assert answer.status_code == 202


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"engine": "d9", "what": "kill"}, "there are p0, d0"),
        ({"engine": "d0", "what": "start"}, "d0 is running"),
        ({"engine": "d0", "what": "explode"}, "explode"),
        ({"engine": "d0"}, "what"),
    ],
)
async def test_what_cannot_befall_an_engine_is_refused(
    fleet: RunningFleet, client: httpx.AsyncClient, order: dict[str, str], said: str
) -> None:
    """The answer says why."""
    answer = await befall(client, fleet.engines[0], **order)

    assert answer.status_code == 400
    assert said in answer.text


async def test_a_start_that_fails_changes_nothing(
    fleet: RunningFleet, client: httpx.AsyncClient
) -> None:
    """Somebody else has its port; the others go on."""
    prefill, decode = fleet.engines
    await fleet.stop(decode)
    host, port = decode.url.removeprefix("http://").split(":")
    with socket.create_server((host, int(port))):
        failed = await befall(client, prefill, engine="d0", what="start")
    was_running = decode.is_running
    await befall(client, prefill, engine="d0", what="start")

    assert failed.status_code == 400
    assert not was_running
    assert (await complete(client, decode)).status_code == 200
