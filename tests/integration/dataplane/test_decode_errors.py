"""What the decode instance refuses after a prefill leg that went well reaches the client."""

import asyncio
import socket
from dataclasses import replace
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.transfer import NixlPushSettings

COMPLETIONS = "/v1/completions"


async def prefill_ok(received: Any, wire: Any) -> None:
    await wire.json({"kv_transfer_params": {"do_remote_prefill": True}})


def refuse(status: int) -> Any:
    async def script(received: Any, wire: Any) -> None:
        await wire.json({"error": {"message": f"no {status}"}}, status)

    return script


async def close(received: Any, wire: Any) -> None:
    wire.close()


async def close_after_the_headers(received: Any, wire: Any) -> None:
    await wire.head(content_type="text/event-stream")
    wire.close()


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        pytest.param(refuse(400), 400, None, id="400"),
        pytest.param(refuse(500), 502, "hand_over_failed", id="500"),
        pytest.param(close, 502, "engine_closed", id="closed"),
        pytest.param(close_after_the_headers, 502, "engine_closed", id="closed-after-headers"),
        pytest.param(None, 502, "engine_unreachable", id="refused-connection"),
    ],
)
async def test_decode_error_is_the_clients_answer(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    fault: Any,
    status: int,
    code: str | None,
    stream: bool,
) -> None:
    """Headers go out after the decode engine's own: no empty 200 in front of its error (F43)."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with engine(prefill_ok) as p, engine(fault or close) as d:
            decode = d if fault else f"http://127.0.0.1:{nobody.getsockname()[1]}"
            fleet = (
                instance(p, "p0", role=Role.PREFILL, connector="nixl"),
                instance(decode, "d0", role=Role.DECODE, connector="nixl"),
            )
            async with balancer(*fleet) as proxy:
                body = {"model": "m", "prompt": list(range(1000)), "stream": stream}
                answer = await client.post(proxy.url + COMPLETIONS, json=body)

                assert answer.status_code == status
                assert proxy.in_flight() == 0
                assert len(p.received) == 1

    error = answer.json()["error"]
    assert error.get("code") == code
    assert code is not None or error["message"] == f"no {status}"


LONG = {"model": "m", "prompt": list(range(1000))}


async def test_hand_over_of_an_engine_that_is_known_as_gone_is_a_503(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """By the time that nobody else is found: no prefill instance is left, and that is what is told."""

    async def lose_the_other(received: Any, wire: Any) -> None:
        p0, d0 = proxy.fleet.instances
        proxy.fleet = replace(proxy.fleet, instances=(replace(p0, healthy=False), d0))
        await wire.json({"error": {"message": "load failed"}}, 500)

    async with engine(prefill_ok) as p, engine(lose_the_other) as d:
        fleet = (
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        )
        async with balancer(*fleet) as proxy:
            answer = await client.post(proxy.url + COMPLETIONS, json=LONG)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")


async def test_a_prefill_engine_that_dies_tells_more_than_the_load_that_failed_of_it(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Both legs fail within a moment, whichever comes first: its prefill failed."""
    failed = asyncio.Event()

    async def die_after_the_other(received: Any, wire: Any) -> None:
        await failed.wait()
        wire.close()

    async def fail_to_load(received: Any, wire: Any) -> None:
        await wire.json({"error": {"message": "load failed"}}, 500)
        failed.set()

    async with engine(die_after_the_other) as p, engine(fail_to_load) as d:
        push = NixlPushSettings(engine_id="e")
        fleet = (
            instance(p, "p0", role=Role.PREFILL, connector="nixl_push", transfer=push),
            instance(d, "d0", role=Role.DECODE, connector="nixl_push", transfer=push),
        )
        async with balancer(*fleet) as proxy:
            answer = await client.post(proxy.url + COMPLETIONS, json=LONG)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "prefill_failed")


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("connector", ["nixl", "nixl_push"], ids=["serial", "concurrent"])
async def test_another_engine_loads_what_one_could_not(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    connector: str,
    stream: bool,
) -> None:
    """The only prefill engine computes it anew: what it handed over before may be spent."""

    async def answer_ok(received: Any, wire: Any) -> None:
        if stream:
            await wire.events(b'data: {"choices":[{"text":"ok"}]}\n\n', b"data: [DONE]\n\n")
        else:
            await wire.json({"id": "cmpl-1", "choices": [{"text": "ok"}]})

    push = NixlPushSettings(engine_id="e") if connector == "nixl_push" else None
    async with engine(prefill_ok) as p, engine(refuse(500)) as d0, engine(answer_ok) as d1:
        fleet = tuple(
            instance(each, alias, role=role, connector=connector, transfer=push)
            for each, alias, role in (
                (p, "p0", Role.PREFILL),
                (d0, "d0", Role.DECODE),
                (d1, "d1", Role.DECODE),
            )
        )
        async with balancer(*fleet) as proxy:
            answers = [
                await client.post(
                    proxy.url + COMPLETIONS,
                    json={"model": "m", "prompt": [first] * 1000, "stream": stream},
                )
                for first in range(4)
            ]

            assert proxy.in_flight() == 0

    assert [each.status_code for each in answers] == [200] * 4
    assert all('"ok"' in each.text for each in answers)
    assert len(d0.received) >= 1
    assert len(p.received) == len(d0.received) + len(d1.received)


async def test_a_hand_over_that_nobody_can_load_ends(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Each decode engine has been asked once; the client is told what went wrong."""
    async with engine(prefill_ok) as p, engine(refuse(500)) as d0, engine(refuse(500)) as d1:
        fleet = (
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d0, "d0", role=Role.DECODE, connector="nixl"),
            instance(d1, "d1", role=Role.DECODE, connector="nixl"),
        )
        async with balancer(*fleet) as proxy:
            answer = await client.post(proxy.url + COMPLETIONS, json=LONG)

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "hand_over_failed")
    assert [len(each.received) for each in (p, d0, d1)] == [2, 1, 1]
