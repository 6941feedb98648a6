"""As long as its client has no word of an answer, a failure is another instance's chance."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Fleet, Role
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.core.settings.routing import PdSettings
from balancer.core.settings.transfer import NixlPushSettings

COMPLETIONS = "/v1/completions"
DONE = b"data: [DONE]\n\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
OPENING = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
FAILED = b'data: {"error":{"message":"not loaded","type":"InternalServerError","code":500}}\n\n'
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1]}


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": list(range(1000))} | fields


async def answer_ok(received: Any, wire: Any) -> None:
    if received.json.get("stream"):
        await wire.events(TOKEN, DONE)
    else:
        await wire.json({"choices": [{"text": "a"}]})


async def prefill_ok(received: Any, wire: Any) -> None:
    await wire.json({"choices": [], "kv_transfer_params": PARAMS})


async def stay_silent(received: Any, wire: Any) -> None:
    await received.gone.wait()


async def open_and_die(received: Any, wire: Any) -> None:
    await wire.head(content_type="text/event-stream")
    await wire.chunk(OPENING)
    wire.reset()


async def open_and_stall(received: Any, wire: Any) -> None:
    await wire.head(content_type="text/event-stream")
    await wire.chunk(OPENING)
    await received.gone.wait()


async def open_and_fail(received: Any, wire: Any) -> None:
    await wire.events(OPENING, FAILED, DONE)


async def fail_at_once(received: Any, wire: Any) -> None:
    await wire.events(FAILED, DONE)


async def cut_short(received: Any, wire: Any) -> None:
    await wire.raw(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"half')
    wire.reset()


async def refuse(received: Any, wire: Any) -> None:
    await wire.json({"error": {"message": "no"}}, 500)


@pytest.mark.parametrize(
    ("fault", "stream"),
    [
        pytest.param(open_and_die, True, id="dies-behind-its-opening"),
        pytest.param(open_and_stall, True, id="stalls-behind-its-opening"),
        pytest.param(open_and_fail, True, id="fails-behind-its-opening"),
        pytest.param(fail_at_once, True, id="begins-with-an-error"),
        pytest.param(stay_silent, True, id="silent-stream"),
        pytest.param(stay_silent, False, id="silent"),
        pytest.param(cut_short, False, id="cut-while-held"),
        pytest.param(refuse, False, id="500"),
    ],
)
async def test_a_failure_that_nobody_saw_is_repeated_elsewhere(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, fault: Any, stream: bool
) -> None:
    """The client gets the other instance's answer, and nothing of the first one's."""
    settings = DataPlaneSettings(first_byte_timeout_s=0.3, idle_timeout_s=0.3)
    async with (
        engine(fault) as bad,
        engine(answer_ok) as good,
        balancer(instance(bad, "e0"), instance(good, "e1"), settings=settings) as proxy,
    ):
        answers = [
            await client.post(proxy.url + COMPLETIONS, json=request(stream=stream))
            for _ in range(2)
        ]

    assert bad.received
    assert [each.headers["x-kvlb-instance"] for each in answers] == ["e1", "e1"]
    if stream:
        assert {each.content for each in answers} == {TOKEN + DONE}


async def test_an_opening_comes_with_the_first_token(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """Not before it, and not a byte of it is lost."""
    computed = asyncio.Event()

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await wire.chunk(OPENING)
        await computed.wait()
        await wire.chunk(TOKEN)
        await wire.chunk(DONE)
        await wire.end()

    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(COMPLETIONS, request(stream=True))
        await fake.wait_for_requests(1)
        computed.set()
        passed = await client.read_until(DONE)

    assert passed.index(OPENING) < passed.index(TOKEN) < passed.index(DONE)


@pytest.mark.parametrize("code", [500, 400])
async def test_a_stream_that_begins_with_an_error_is_an_error(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, code: int
) -> None:
    """Where nobody else is left: the engine's own words, under the status they name (F43)."""
    error = {"error": {"message": "m", "type": "T", "param": None, "code": code}}

    async def script(received: Any, wire: Any) -> None:
        await wire.events(b"data: " + json.dumps(error).encode() + b"\n\n", DONE)

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + COMPLETIONS, json=request(stream=True))

    assert (answer.status_code, answer.json()) == (code, error)
    assert answer.headers["content-type"] == "application/json"
    assert len(fake.received) == 1


@pytest.mark.parametrize("fault", [refuse, fail_at_once], ids=["status", "event"])
async def test_a_hand_over_that_failed_is_a_502_and_nobodys_fault(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, fault: Any
) -> None:
    """The decode engine couldn't load: its health is not doubted, the other's identity is."""
    async with engine(prefill_ok) as p, engine(fault) as d:
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        ]
        async with balancer(*fleet) as proxy:
            answer = await client.post(proxy.url + COMPLETIONS, json=request(stream=True))
            told = {(url, reason) for url, _, reason in proxy.health}

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "hand_over_failed")
    assert told == {(p.url, None), (p.url, "hand_over_failed"), (d.url, None)}


async def test_who_waits_for_an_engine_that_is_given_up_is_served_elsewhere(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Long before the limit of the first byte."""
    async with (
        engine(stay_silent) as one,
        engine(stay_silent) as other,
        balancer(instance(one, "e0"), instance(other, "e1")) as proxy,
    ):
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(client.post(proxy.url + COMPLETIONS, json=request()))
            async with asyncio.timeout(20):
                while not (asked := one.received + other.received):  # noqa: ASYNC110 - either of two
                    await asyncio.sleep(0.001)
            silent, well = (one, other) if one.received else (other, one)
            well.script = answer_ok
            proxy.upstream.give_up(silent.url)
        (record,) = await proxy.wait_for_records(1)

    assert waiting.result().status_code == 200
    assert len(asked) == 1
    assert [leg.error for leg in record.legs] == ["engine_lost", None]


async def test_an_answer_that_has_begun_is_not_given_up(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """Its limit is that of silence; nobody was ever spoken to at another address."""
    goes_on = asyncio.Event()

    async def begin(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await wire.chunk(TOKEN)
        await goes_on.wait()
        await wire.chunk(DONE)
        await wire.end()

    async with (
        engine(begin) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(COMPLETIONS, request(stream=True))
        await client.read_until(TOKEN)
        proxy.upstream.give_up(fake.url)
        proxy.upstream.give_up("http://127.0.0.1:9")
        goes_on.set()

        assert (await client.read_until(DONE)).endswith(DONE)


async def test_what_was_handed_over_is_read_once(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """A kept connection that breaks may have carried the leg to its engine: both legs run again.

    Sent a second time it would read blocks that are somebody else's by then.
    """
    told: list[Any] = []

    async def prefill(received: Any, wire: Any) -> None:
        told.append({**PARAMS, "remote_request_id": str(len(told))})
        await wire.json({"choices": [], "kv_transfer_params": told[-1]})

    async def decode(received: Any, wire: Any) -> None:
        if len(d.received) == 2:
            wire.reset()
        else:
            await answer_ok(received, wire)

    async with engine(prefill) as p, engine(decode) as d:
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        ]
        async with balancer(*fleet) as proxy:
            answers = [
                await client.post(
                    proxy.url + COMPLETIONS, json=request(prompt=[number, *range(1000)])
                )
                for number in range(2)
            ]

    assert [each.status_code for each in answers] == [200, 200]
    assert [each.json["kv_transfer_params"] for each in d.received] == told
    assert len(told) == 3


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "new"])
async def test_a_closed_connection_is_told_as_one_whether_it_was_kept_or_new(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, kept: bool
) -> None:
    """No other attempt may be made; no lease has ended."""

    async def decode(received: Any, wire: Any) -> None:
        if len(d.received) == 1 and kept:
            await answer_ok(received, wire)
        else:
            wire.close()

    async with engine(prefill_ok) as p, engine(decode) as d:
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        ]
        async with balancer(*fleet, settings=DataPlaneSettings(retries=0)) as proxy:
            answers = [
                await client.post(
                    proxy.url + COMPLETIONS, json=request(prompt=[number, *range(1000)])
                )
                for number in range(1 + kept)
            ]

    assert all("kv_transfer_params" in each.json for each in d.received)
    assert (answers[-1].status_code, answers[-1].json()["error"]["code"]) == (502, "engine_closed")


async def test_after_a_hand_over_that_failed_its_source_is_not_asked_again(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """It may have restarted. The one decode engine there is may well serve the request itself."""

    async def decode(received: Any, wire: Any) -> None:
        if "kv_transfer_params" in received.json:
            await refuse(received, wire)
        else:
            await answer_ok(received, wire)

    async with engine(prefill_ok) as p, engine(decode) as d:
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        ]
        pd = PdSettings(allow_local_on_failure=True)
        async with balancer(*fleet, pd=pd) as proxy:
            answer = await client.post(proxy.url + COMPLETIONS, json=request())
            told = {(url, reason) for url, _, reason in proxy.health if reason is not None}

    assert answer.status_code == 200
    assert (len(p.received), len(d.received)) == (1, 2)
    assert told == {(p.url, "hand_over_failed")}


async def test_a_further_attempt_sees_the_fleet_as_it_is(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """An engine that came while the first attempt ran may serve the second."""
    added = asyncio.Event()

    async def fail_then(received: Any, wire: Any) -> None:
        await added.wait()
        wire.reset()

    async with (
        engine(fail_then) as bad,
        engine(answer_ok) as good,
        balancer(instance(bad, "e0")) as proxy,
        asyncio.TaskGroup() as group,
    ):
        asked = group.create_task(client.post(proxy.url + COMPLETIONS, json=request()))
        await bad.wait_for_requests(1)
        proxy.fleet = Fleet(instances=(*proxy.fleet.instances, instance(good, "e1")))
        added.set()

    assert asked.result().headers["x-kvlb-instance"] == "e1"


async def test_a_transfer_is_named_to_its_source_once(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Where a kept connection breaks the engine may have begun: the next attempt has another name."""

    async def prefill(received: Any, wire: Any) -> None:
        if len(p.received) == 2:
            wire.reset()
        else:
            await prefill_ok(received, wire)

    async with engine(prefill) as p, engine(answer_ok) as d:
        settings = NixlPushSettings(engine_id="e")
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl_push", transfer=settings),
            instance(d, "d0", role=Role.DECODE, connector="nixl_push", transfer=NixlPushSettings()),
        ]
        async with balancer(*fleet) as proxy:
            answers = [
                await client.post(
                    proxy.url + COMPLETIONS, json=request(prompt=[number, *range(1000)])
                )
                for number in range(2)
            ]

    named = [each.json["kv_transfer_params"]["transfer_id"] for each in p.received]
    assert [each.status_code for each in answers] == [200, 200]
    assert len(named) == len(set(named)) == 3


async def test_who_failed_first_is_asked_again_when_nobody_else_is_left(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """It was full, and may have room again; who refused just now isn't asked at once."""
    failures: list[str] = []

    def failing_once(name: str) -> Any:
        async def script(received: Any, wire: Any) -> None:
            if name in failures:
                await answer_ok(received, wire)
            else:
                failures.append(name)
                await wire.json({"error": {"message": "full"}}, 503)

        return script

    async with (
        engine(failing_once("e0")) as one,
        engine(failing_once("e1")) as other,
        balancer(
            instance(one, "e0"), instance(other, "e1"), settings=DataPlaneSettings(retries=2)
        ) as proxy,
    ):
        answer = await client.post(proxy.url + COMPLETIONS, json=request())
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == 200
    assert [leg.alias for leg in record.legs] in (["e0", "e1", "e0"], ["e1", "e0", "e1"])
