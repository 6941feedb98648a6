"""LMCache's senders say when a prompt's blocks are there: decode legs wait for that, and not for ever."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.errors import ConfigError
from balancer.core.settings.notices import NoticeSettings
from balancer.core.settings.transfer import LmcacheSettings
from balancer.fleet.transfer_notices import TransferNotices

COMPLETIONS = "/v1/completions"
TWO_RANKS = LmcacheSettings(
    receiver_host="10.0.0.3", receiver_init_ports=(8300, 8301), receiver_alloc_ports=(8400, 8401)
)
Push = Callable[[object], Awaitable[None]]


@asynccontextmanager
async def listening(wait_s: float) -> AsyncIterator[tuple[TransferNotices, Push]]:
    """The service on a free port, and how a sender reaches it."""
    notices = TransferNotices(NoticeSettings(port=0, wait_s=wait_s))
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"tcp://127.0.0.1:{notices.port}")

    async def push(message: object) -> None:
        payload = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        await socket.send(payload)

    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(notices.run())
            try:
                yield notices, push
            finally:
                running.cancel()
    finally:
        context.destroy(linger=0)
        notices.close()


def fleet(instance: Any, prefill: Any, decode: Any, transfer: LmcacheSettings) -> list[Any]:
    return [
        instance(prefill, "p0", role=Role.PREFILL, connector="lmcache"),
        instance(decode, "d0", role=Role.DECODE, connector="lmcache", transfer=transfer),
    ]


async def prefill_ok(received: Any, wire: Any) -> None:
    await wire.json({"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens": 1000}})


async def answer_ok(received: Any, wire: Any) -> None:
    await wire.json({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1000}})


def body() -> dict[str, Any]:
    return {"model": "m", "prompt": list(range(1000))}


async def test_the_decode_leg_waits_for_every_rank(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, eventually: Any
) -> None:
    """One before the prefill leg has answered, the other after it."""
    async with listening(wait_s=20) as (notices, push):

        async def prefill(received: Any, wire: Any) -> None:
            name = received.json["kv_transfer_params"]["disagg_spec"]["req_id"]
            await push({"type": "ProxyNotif", "req_id": name})
            await eventually(lambda: notices.heard == 1)
            await prefill_ok(received, wire)

        async with (
            engine(prefill) as p,
            engine(answer_ok) as d,
            balancer(*fleet(instance, p, d, TWO_RANKS), notices=notices) as served,
            asyncio.TaskGroup() as group,
        ):
            answer = group.create_task(client.post(served.url + COMPLETIONS, json=body()))
            await eventually(lambda: served.in_flight() == 1 and len(p.received) == 1)
            before = len(d.received)
            name = p.received[0].json["kv_transfer_params"]["disagg_spec"]["req_id"]
            await push({"type": "ProxyNotif", "req_id": name})
            assert (await answer).status_code == 200

    assert before == 0
    assert len(d.received) == 1
    assert notices.missed == 0


async def test_nobody_waits_for_ever(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """The decode engine computes what isn't there; that it was missed is counted."""
    async with (
        listening(wait_s=0.05) as (notices, _),
        engine(prefill_ok) as p,
        engine(answer_ok) as d,
        balancer(*fleet(instance, p, d, TWO_RANKS), notices=notices) as served,
    ):
        answer = await client.post(served.url + COMPLETIONS, json=body())

    assert answer.status_code == 200
    assert (len(p.received), len(d.received), notices.missed) == (1, 1, 1)


async def test_a_shared_cache_has_nothing_to_wait_for(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Without a receiver nobody is told a name."""
    async with (
        listening(wait_s=30) as (notices, _),
        engine(prefill_ok) as p,
        engine(answer_ok) as d,
        balancer(*fleet(instance, p, d, LmcacheSettings()), notices=notices) as served,
    ):
        answer = await client.post(served.url + COMPLETIONS, json=body())

    assert answer.status_code == 200
    assert notices.missed == 0


async def test_messages_of_no_use_are_counted(eventually: Any) -> None:
    """By reason; the port goes on."""
    async with listening(wait_s=1) as (notices, push):
        for message in (b"\xc1", {"type": "AllocRequest"}, {"type": "ProxyNotif", "req_id": "x"}):
            await push(message)
        await eventually(lambda: notices.heard == 3)

    assert notices.refused == {"malformed": 1, "other_type": 1, "unexpected": 1}


async def test_a_port_in_use_is_named() -> None:
    """With the key to change."""
    async with listening(wait_s=1) as (notices, _):
        with pytest.raises(ConfigError, match=f"lmcache_notices.port.*{notices.port}"):
            TransferNotices(NoticeSettings(port=notices.port))
