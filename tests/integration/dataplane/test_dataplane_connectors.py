"""What connectors need of the data plane beside two bodies: ids, facts, leases, peers, conversations."""

import asyncio
import itertools
import json
import time
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.core.settings.routing import PdSettings
from balancer.core.settings.transfer import (
    NixlPushSettings,
    NixlSettings,
    OffloadingSettings,
)
from indexer.core.index import PrefixMatch, Prompt
from indexer.core.types import InstanceId, RankId, Tier, Trust

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1, 2]}
PROMPT = list(range(1000))
REMOTE = PdSettings(force="remote")


async def prefill_ok(received: Any, wire: Any) -> None:
    await wire.json({"choices": [{"finish_reason": "length"}], "kv_transfer_params": PARAMS})


async def answer_ok(received: Any, wire: Any) -> None:
    await wire.json({"choices": [{"text": "a"}]})


def long_prompt(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": PROMPT, "max_tokens": 7} | fields


class HeldIndex:
    """An index in which ranks hold what a test says, of any prompt."""

    def __init__(self, **held_tokens: int) -> None:
        self.held_tokens = held_tokens
        self.trust = Trust.EXACT
        self.urls: dict[str, str] = {}

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:
        return {
            RankId(InstanceId(self.urls[alias]), 0): PrefixMatch(
                tokens_by_tier={Tier.GPU: min(tokens, prompt.tokens - 1)},
                block_size=16,
                trust=self.trust,
                epoch=1,
            )
            for alias, tokens in self.held_tokens.items()
        }


@pytest.fixture
def push(instance: Any) -> Any:
    """Describe a prefill and a decode engine with the push connector."""

    def describe(prefill: Any, alias: str = "p0", **settings: Any) -> Any:
        return instance(
            prefill,
            alias,
            role=Role.PREFILL,
            connector="nixl_push",
            transfer=NixlPushSettings(**settings),
        )

    return describe


async def test_push_legs_share_an_id_of_their_own(
    engine: Any, balancer: Any, instance: Any, push: Any, client: httpx.AsyncClient
) -> None:
    """It begins with the client's; the client is answered under its own."""
    async with engine(prefill_ok) as p, engine(answer_ok) as d:
        target = instance(d, "d0", role=Role.DECODE, connector="nixl_push")
        async with balancer(push(p, engine_id="e"), target, pd=REMOTE) as proxy:
            answers = [
                await client.post(
                    proxy.url + COMPLETIONS, json=long_prompt(), headers={"x-request-id": "abc"}
                )
                for _ in range(2)
            ]

    ids = [[each.header("x-request-id") for each in side.received] for side in (p, d)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2
    assert all(each.startswith("abc-") for each in ids[0])
    assert d.received[0].json["kv_transfer_params"]["remote_request_id"] == ids[1][0]
    assert [each.headers["x-request-id"] for each in answers] == ["abc", "abc"]


async def test_a_prefill_engine_whose_id_is_unknown_is_passed_over(
    engine: Any, balancer: Any, instance: Any, push: Any, client: httpx.AsyncClient
) -> None:
    """Nothing is sent with a field missing; another prefill engine gets the leg."""
    async with engine(prefill_ok) as bad, engine(prefill_ok) as good, engine(answer_ok) as d:
        target = instance(d, "d0", role=Role.DECODE, connector="nixl_push")
        sources = [push(bad, "p0"), push(good, "p1", engine_id="e")]
        async with balancer(*sources, target) as proxy:
            for number in range(2):
                answer = await client.post(
                    proxy.url + COMPLETIONS, json=long_prompt(prompt=[number] * 1000)
                )
                assert answer.status_code == 200

    assert bad.received == []
    assert all(each.json["kv_transfer_params"]["remote_engine_id"] == "e" for each in d.received)


async def test_a_decode_leg_after_the_lease_runs_both_again(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Its blocks may be somebody else's by then; nobody is blamed, the client gets its answer."""
    clock = SteppingClock()

    async def slow_prefill(received: Any, wire: Any) -> None:
        clock.looked_at.clear()
        await wire.head(content_type="application/json")
        await wire.chunk(b'{"choices":[],')
        async with asyncio.timeout(20):
            await clock.looked_at.wait()
        if len(p.received) == 1:
            clock.ahead_s += 26  # while the answer is read
        rest = json.dumps({"kv_transfer_params": {**PARAMS, "number": len(p.received)}})
        await wire.chunk(rest[1:].encode())
        await wire.end()

    async with engine(slow_prefill) as p, engine(answer_ok) as d:
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        ]
        async with balancer(*fleet, clock=clock) as proxy:
            answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())
            (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == 200
    (decoded,) = d.received
    assert decoded.json["kv_transfer_params"]["number"] == 2
    assert [(leg.kind, leg.error) for leg in record.legs] == [
        ("prefill", None),
        ("decode", "lease_ended"),
        ("prefill", None),
        ("decode", None),
    ]
    assert all(told[1] for told in proxy.health)


async def test_a_lease_that_always_ends_is_an_honest_503(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """As often as other retries, no more."""
    settings = NixlSettings(lease_s=1e-9)
    async with engine(prefill_ok) as p, engine(answer_ok) as d:
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl", transfer=settings),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        ]
        async with balancer(*fleet, settings=DataPlaneSettings(retries=1)) as proxy:
            answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "lease_ended")
    assert len(p.received) == 2
    assert d.received == []
    assert proxy.in_flight() == 0


class SteppingClock:
    """The usual clock, and how far a test has put it forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.looked_at = asyncio.Event()

    def __call__(self) -> float:
        self.looked_at.set()
        return time.monotonic() + self.ahead_s


# Peers


@pytest.mark.parametrize("held_tokens", [992, 400])
async def test_an_idle_engine_fetches_from_the_peer_that_the_index_names(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, held_tokens: int
) -> None:
    """Where it gains enough; else the client's bytes go out as they are."""
    index = HeldIndex(m0=held_tokens)
    raw = json.dumps(long_prompt()).encode()
    async with engine(answer_ok) as full, engine(answer_ok) as idle:
        index.urls["m0"] = full.url
        fleet = [
            instance(
                each,
                alias,
                connector="offloading",
                transfer=OffloadingSettings(p2p_host=f"host-{alias}", pull_min_tokens=512),
            )
            for alias, each in (("m0", full), ("m1", idle))
        ]
        async with balancer(*fleet, index=index) as proxy:
            for _ in range(2):
                await client.post(proxy.url + COMPLETIONS, content=raw)

    assert full.received[0].body == raw
    sent = idle.received[0]
    if held_tokens < 512:
        assert sent.body == raw
        return
    source = sent.json["kv_transfer_params"]["remote_kv_source"]
    assert (source["remote_host"], source["remote_port"]) == ("host-m0", 5710)


# Conversations

LEFT = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [list(range(100))],
    "remote_engine_id": "d",
    "remote_request_id": "cmpl-x",
    "remote_host": "10.0.0.2",
    "remote_port": 5600,
    "remote_num_tokens": 1005,
}


def answering(stream: bool) -> Any:
    """A decode engine that keeps its blocks for the next turn."""

    async def script(received: Any, wire: Any) -> None:
        whole = {"choices": [{"text": "a"}], "kv_transfer_params": LEFT}
        if stream:
            await wire.events(b"data: " + json.dumps(whole).encode() + b"\n\n", DONE)
        else:
            await wire.json(whole)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turns_prefill_reads_what_decode_kept(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, stream: bool
) -> None:
    """Once, cut to what is surely this prompt's; engines never see the conversation's name."""
    settings = NixlSettings(bidirectional=True)
    index = HeldIndex(d0=0)
    async with engine(prefill_ok) as p, engine(answering(stream)) as d:
        index.urls["d0"] = d.url
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl", transfer=settings),
            instance(d, "d0", role=Role.DECODE, connector="nixl", transfer=settings),
        ]
        async with balancer(*fleet, index=index, pd=REMOTE) as proxy:
            for more in ([], [5] * 900, [6] * 300):
                body = long_prompt(prompt=PROMPT + more, conversation_id="c", stream=stream)
                await client.post(proxy.url + COMPLETIONS, json=body)
            await client.post(proxy.url + COMPLETIONS, json=long_prompt())

    sent = [each.json for each in (*p.received, *d.received)]
    assert all("conversation_id" not in each for each in sent)
    first, second, third, unnamed = (each.json["kv_transfer_params"] for each in p.received)
    assert first["remote_block_ids"] is None
    assert second == {
        **LEFT,
        "remote_num_tokens": 992,
        "remote_block_ids": [list(range(62))],
    }
    assert third["remote_num_tokens"] == 992  # of a longer turn, what both have in common
    assert unnamed["remote_block_ids"] is None


@pytest.mark.parametrize(
    "sides", list(itertools.product([False, True], repeat=2))[:3], ids=["none", "decode", "prefill"]
)
async def test_without_both_ways_on_both_sides_nothing_is_kept(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    sides: tuple[bool, bool],
) -> None:
    """The name is removed all the same."""
    index = HeldIndex(d0=0)
    async with engine(prefill_ok) as p, engine(answering(False)) as d:
        index.urls["d0"] = d.url
        fleet = [
            instance(
                each,
                alias,
                role=role,
                connector="nixl",
                transfer=NixlSettings(bidirectional=both),
            )
            for each, alias, role, both in (
                (p, "p0", Role.PREFILL, sides[0]),
                (d, "d0", Role.DECODE, sides[1]),
            )
        ]
        async with balancer(*fleet, index=index, pd=REMOTE) as proxy:
            for _ in range(2):
                body = long_prompt(conversation_id="c")
                await client.post(proxy.url + COMPLETIONS, json=body)

    assert [each.json["kv_transfer_params"]["remote_block_ids"] for each in p.received] == [
        None,
        None,
    ]
    assert "conversation_id" not in d.received[0].json
