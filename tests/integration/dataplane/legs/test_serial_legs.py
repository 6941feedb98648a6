"""Plans carried out: one leg, or prefill and then decode."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Role

Ask = Callable[..., Awaitable[httpx.Response]]
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_serial_pair(
    engine: Any,
    balancer: Any,
    pair: Any,
    client: httpx.AsyncClient,
    long_prompt: Any,
    says: Any,
    stream: bool,
) -> None:
    """Prefill with one token, then decode with what prefill returned and the client's prompt."""
    body = long_prompt(stream=stream, max_tokens=50, min_tokens=5)
    async with (
        engine(says.prefill_ok) as p,
        engine(says.answer_ok) as d,
        balancer(*pair(p, d)) as proxy,
    ):
        answer = await client.post(
            proxy.url + COMPLETIONS, json=body, headers={"x-request-id": "abc"}
        )
        (record,) = await proxy.wait_for_records(1)

    (first,), (second,) = p.received, d.received
    assert answer.status_code == 200
    assert (first.target, second.target) == (COMPLETIONS, COMPLETIONS)
    assert (first.json["stream"], first.json["max_tokens"], first.json["min_tokens"]) == (
        False,
        1,
        1,
    )
    assert first.json["kv_transfer_params"]["do_remote_decode"] is True
    assert "stream_options" not in first.json
    assert second.json["kv_transfer_params"] == says.params
    kept = {key: second.json[key] for key in body}
    assert kept == body
    assert [each.header("x-request-id") for each in (first, second)] == ["abc", "abc"]
    assert answer.headers["x-kvlb-instance"] == "d0"
    assert answer.headers["x-kvlb-prefill"] == "p0"
    assert answer.headers["x-kvlb-reason"] == "remote_prefill"
    assert [leg.kind for leg in record.legs] == ["prefill", "decode"]
    assert record.cached_tokens == 64  # the prefill leg's, not the transferred blocks (F35)
    assert proxy.in_flight() == 0


async def test_short_prompt_skips_the_prefill_leg(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient, says: Any
) -> None:
    """The client's bytes go to the decode engine as they are, without transfer parameters."""
    raw = b'{"prompt": [1,2,3] }'
    async with (
        engine(says.prefill_ok) as p,
        engine(says.answer_ok) as d,
        balancer(*pair(p, d)) as proxy,
    ):
        answer = await client.post(proxy.url + COMPLETIONS, content=raw)

        assert p.received == []
        assert d.received[0].body == raw
        assert answer.headers["x-kvlb-prefill"] == "skipped"


async def test_mixed_instance_has_no_prefill_leg(
    engine: Any, balancer: Any, instance: Any, ask: Ask, says: Any
) -> None:
    """An aggregated fleet says so."""
    async with engine(says.answer_ok) as e, balancer(instance(e)) as proxy:
        answer = await ask(proxy)

        assert answer.headers["x-kvlb-prefill"] == "none"
        assert answer.headers["x-kvlb-reason"] == "aggregated"


async def test_rank_is_pinned_on_each_leg(
    engine: Any, balancer: Any, instance: Any, ask: Ask, says: Any
) -> None:
    """With several ranks behind an address each leg names its own, locally numbered."""
    async with engine(says.prefill_ok) as p, engine(says.answer_ok) as d:
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl", ranks=(4, 5), rank_base=4),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        ]
        async with balancer(*fleet) as proxy:
            for number in range(2):
                await ask(proxy, number)

    ranks = {each.header("x-data-parallel-rank") for each in p.received}
    assert ranks == {"0", "1"}
    assert {each.header("x-data-parallel-rank") for each in d.received} == {None}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    ("prefill", "decode", "status"),
    [
        pytest.param(("ad",), (), 503, id="on-prefill-alone"),
        pytest.param((), ("ad",), 200, id="on-decode-alone"),
    ],
)
async def test_adapter_that_one_side_has_is_served_by_decode_or_by_nobody(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    path: str,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    status: int,
    says: Any,
) -> None:
    """The error says what to load where; nothing is sent to who can't answer."""
    async with engine(says.answer_ok) as p, engine(says.answer_ok) as d:
        fleet = (
            instance(p, "p0", role=Role.PREFILL, connector="nixl", adapters=prefill),
            instance(d, "d0", role=Role.DECODE, connector="nixl", adapters=decode),
        )
        async with balancer(*fleet) as proxy:
            answer = await client.post(
                proxy.url + path, json={"model": "ad", "prompt": list(range(1000))}
            )

    assert answer.status_code == status
    assert (len(p.received), len(d.received)) == (0, 1 if status == 200 else 0)
    if status == 503:
        assert "`ad`, only prefill instances: load it" in answer.json()["error"]["message"]
