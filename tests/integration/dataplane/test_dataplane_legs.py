"""Plans carried out: one leg, two in a row, two at once, and what happens when one fails."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from balancer.connectors.contract import Connector, LegContext, LegRequest, Style
from balancer.core.fleet.snapshot import Role
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.core.settings.routing import PdSettings

COMPLETIONS = "/v1/completions"
LONG_TOKENS = 1000
DONE = b"data: [DONE]\n\n"
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "field_of_a_later_release": "x"}


def usage(prompt: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def prefill_ok(received: Any, wire: Any) -> None:
    await wire.json(
        {
            "choices": [{"finish_reason": "length"}],
            "kv_transfer_params": PARAMS,
            "usage": usage(1000, 64),
        }
    )


async def answer_ok(received: Any, wire: Any) -> None:
    if received.json.get("stream"):
        await wire.events(b'data: {"choices":[{"text":"a"}]}\n\n', DONE)
    else:
        await wire.json({"choices": [{"text": "a"}], "usage": usage(1000, 992)})


async def stay_silent(received: Any, wire: Any) -> None:
    await received.gone.wait()


def refuse(status: int, **headers: str) -> Any:
    async def script(received: Any, wire: Any) -> None:
        await wire.json({"error": {"message": f"no {status}"}}, status, **headers)

    return script


async def close(received: Any, wire: Any) -> None:
    wire.close()


def long_prompt(number: int = 0, **fields: Any) -> dict[str, Any]:
    """A prompt that shares no prefix with one of another `number`."""
    first = number * LONG_TOKENS
    return {"model": "m", "prompt": list(range(first, first + LONG_TOKENS))} | fields


@pytest.fixture
def pair(instance: Any) -> Any:
    """Describe prefill and decode engines to the fleet."""

    def describe(prefill: Any, decode: Any, connector: str = "nixl") -> list[Any]:
        sources = prefill if isinstance(prefill, list) else [prefill]
        return [
            *(
                instance(each, f"p{number}", role=Role.PREFILL, connector=connector)
                for number, each in enumerate(sources)
            ),
            instance(decode, "d0", role=Role.DECODE, connector=connector),
        ]

    return describe


# Serial pairs


@pytest.mark.parametrize("stream", [False, True])
async def test_serial_pair(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient, stream: bool
) -> None:
    """Prefill with one token, then decode with what prefill returned and the client's prompt."""
    body = long_prompt(stream=stream, max_tokens=50, min_tokens=5)
    async with engine(prefill_ok) as p, engine(answer_ok) as d, balancer(*pair(p, d)) as proxy:
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
    assert second.json["kv_transfer_params"] == PARAMS
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
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient
) -> None:
    """The client's bytes go to the decode engine as they are, without transfer parameters."""
    raw = b'{"prompt": [1,2,3] }'
    async with engine(prefill_ok) as p, engine(answer_ok) as d, balancer(*pair(p, d)) as proxy:
        answer = await client.post(proxy.url + COMPLETIONS, content=raw)

        assert p.received == []
        assert d.received[0].body == raw
        assert answer.headers["x-kvlb-prefill"] == "skipped"


async def test_mixed_instance_has_no_prefill_leg(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """An aggregated fleet says so."""
    async with engine(answer_ok) as e, balancer(instance(e)) as proxy:
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())

        assert answer.headers["x-kvlb-prefill"] == "none"
        assert answer.headers["x-kvlb-reason"] == "aggregated"


async def test_rank_is_pinned_on_each_leg(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """With several ranks behind an address each leg names its own, locally numbered."""
    async with engine(prefill_ok) as p, engine(answer_ok) as d:
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl", ranks=(4, 5), rank_base=4),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        ]
        async with balancer(*fleet) as proxy:
            for number in range(2):
                await client.post(proxy.url + COMPLETIONS, json=long_prompt(number))

    ranks = {each.header("x-data-parallel-rank") for each in p.received}
    assert ranks == {"0", "1"}
    assert {each.header("x-data-parallel-rank") for each in d.received} == {None}


async def decode_never(received: Any, wire: Any) -> None:
    raise AssertionError("decode must not start")


def answer_with(body: bytes) -> Any:
    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    return script


FAILED_PREFILLS = {
    "finish-error": answer_with(
        json.dumps({"choices": [{"finish_reason": "error"}], "kv_transfer_params": PARAMS}).encode()
    ),
    "finish-abort": answer_with(b'{"choices":[{"finish_reason":"abort"}]}'),
    "error": answer_with(b'{"error":{"message":"x"}}'),
    "no-params": answer_with(b'{"choices":[{"finish_reason":"length"}]}'),
    "empty": answer_with(b""),
    "no-object": answer_with(b"[]"),
    "nested": answer_with(b"[" * 100_000),
    "500": refuse(500),
    "503": refuse(503),
    "429": refuse(429),
    "closed": close,
}


@pytest.mark.parametrize("fault", FAILED_PREFILLS)
async def test_failed_prefill_leg_is_repeated_on_another_instance(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient, fault: str
) -> None:
    """Whatever a failed prefill looks like, decode starts with good parameters only (F36, F37)."""
    async with (
        engine(FAILED_PREFILLS[fault]) as bad,
        engine(prefill_ok) as good,
        engine(answer_ok) as d,
        balancer(*pair([bad, good], d)) as proxy,
    ):
        for number in range(2):
            answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt(number))
            assert answer.status_code == 200
            assert answer.headers["x-kvlb-prefill"] == "p1"
        records = await proxy.wait_for_records(2)

    assert len(bad.received) >= 1
    assert all(each.json["kv_transfer_params"] == PARAMS for each in d.received)
    failed = [leg for record in records for leg in record.legs if leg.error]
    assert {(leg.kind, leg.alias) for leg in failed} == {("prefill", "p0")}
    assert proxy.in_flight() == 0


async def test_answer_without_transfer_is_the_prefill_engines_failure(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient
) -> None:
    """The fleet's keeper hears of it as of any other failed leg, and never that all went well."""
    async with (
        engine(FAILED_PREFILLS["no-params"]) as bad,
        engine(decode_never) as d,
        balancer(*pair(bad, d)) as proxy,
    ):
        await client.post(proxy.url + COMPLETIONS, json=long_prompt())
        (record,) = await proxy.wait_for_records(1)

    assert {(leg.kind, leg.status, leg.error) for leg in record.legs} == {
        ("prefill", 200, "no_transfer")
    }
    assert {told[1:] for told in proxy.health} == {(False, "no_transfer")}


@pytest.mark.parametrize("fault", FAILED_PREFILLS)
async def test_no_prefill_instance_left_is_503(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient, fault: str
) -> None:
    """Decode is never asked to do long prefills unless the operator allows it (F36)."""
    async with (
        engine(FAILED_PREFILLS[fault]) as bad,
        engine(decode_never) as d,
        balancer(*pair(bad, d)) as proxy,
    ):
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())

        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "prefill_failed"
        assert d.received == []
        assert proxy.in_flight() == 0


async def test_decode_prefills_itself_where_that_is_allowed(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient
) -> None:
    """The client's body goes to decode untouched, and the reason tells."""
    pd = PdSettings(allow_local_on_failure=True)
    async with (
        engine(refuse(500)) as bad,
        engine(answer_ok) as d,
        balancer(*pair(bad, d), pd=pd) as proxy,
    ):
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())

        assert answer.status_code == 200
        assert answer.headers["x-kvlb-reason"] == "prefill_failed"
        assert "kv_transfer_params" not in d.received[0].json


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_clients_fault_at_the_prefill_engine_is_the_answer(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient, status: int
) -> None:
    """Neither another prefill engine nor decode is asked (F32)."""
    async with (
        engine(refuse(status)) as first,
        engine(refuse(status)) as second,
        engine(decode_never) as d,
        balancer(*pair([first, second], d)) as proxy,
    ):
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())

        assert answer.status_code == status
        assert answer.json() == {"error": {"message": f"no {status}"}}
        assert len(first.received) + len(second.received) == 1
        assert d.received == []


async def test_refused_key_of_the_operator_is_no_clients_fault(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient
) -> None:
    """An instance with a wrong configured key is passed over (F52)."""
    async with (
        engine(refuse(401)) as bad,
        engine(prefill_ok) as good,
        engine(answer_ok) as d,
        balancer(*pair([bad, good], d), engine_key=lambda _: "k") as proxy,
    ):
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())

        assert answer.status_code == 200


async def test_decode_that_fails_after_prefill_is_tried_elsewhere_with_a_new_prefill(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Parameters of the first transfer may be spent, so both legs run again."""
    async with engine(prefill_ok) as p, engine(close) as bad, engine(answer_ok) as good:
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(bad, "d0", role=Role.DECODE, connector="nixl"),
            instance(good, "d1", role=Role.DECODE, connector="nixl"),
        ]
        async with balancer(*fleet) as proxy:
            for number in range(2):
                answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt(number))
                assert answer.headers["x-kvlb-instance"] == "d1"

    assert len(bad.received) >= 1
    assert len(p.received) == 2 + len(bad.received)


# Single legs: retries and errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(close, id="closed"),
        pytest.param(refuse(503), id="503"),
        pytest.param(answer_with(b""), id="empty-200"),
    ],
)
async def test_failure_before_the_first_byte_is_retried_elsewhere(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, fault: Any, stream: bool
) -> None:
    """The client notices nothing; the record does."""
    async with (
        engine(fault) as bad,
        engine(answer_ok) as good,
        balancer(instance(bad, "e0"), instance(good, "e1")) as proxy,
    ):
        for number in range(2):
            answer = await client.post(
                proxy.url + COMPLETIONS, json=long_prompt(number, stream=stream)
            )
            assert (answer.status_code, answer.headers["x-kvlb-instance"]) == (200, "e1")
        records = await proxy.wait_for_records(2)

    failed = [leg.alias for record in records for leg in record.legs if leg.error]
    assert set(failed) == {"e0"}
    assert proxy.in_flight() == 0


async def test_stream_that_dies_between_headers_and_first_byte_is_retried(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """The 200 that engines send before they compute binds nobody (F43)."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        wire.close()

    async with (
        engine(script) as bad,
        engine(answer_ok) as good,
        balancer(instance(bad, "e0"), instance(good, "e1")) as proxy,
    ):
        for number in range(2):
            answer = await client.post(
                proxy.url + COMPLETIONS, json=long_prompt(number, stream=True)
            )
            assert (answer.status_code, answer.content[-len(DONE) :]) == (200, DONE)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        pytest.param(close, 502, "engine_closed", id="closed"),
        pytest.param(answer_with(b""), 502, "engine_closed", id="empty-200"),
        pytest.param(stay_silent, 504, "engine_timeout", id="silent"),
        pytest.param(refuse(400), 400, None, id="400"),
        pytest.param(refuse(401), 401, None, id="401"),
        pytest.param(refuse(404), 404, None, id="404"),
        pytest.param(refuse(422), 422, None, id="422"),
        pytest.param(refuse(429, retry_after="7"), 429, None, id="429"),
        pytest.param(refuse(500), 500, None, id="500"),
        pytest.param(refuse(501), 501, None, id="501"),
        pytest.param(refuse(503, retry_after="7"), 503, None, id="503"),
    ],
)
async def test_error_reaches_the_client_as_it_is(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    fault: Any,
    status: int,
    code: str | None,
    stream: bool,
) -> None:
    """An engine's own answer, or ours in its form; never an empty 200 (F43, F44)."""
    settings = DataPlaneSettings(first_byte_timeout_s=0.3)
    async with engine(fault) as fake, balancer(instance(fake), settings=settings) as proxy:
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt(stream=stream))
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == status
    if code is None:
        assert answer.json() == {"error": {"message": f"no {status}"}}
        assert answer.headers.get("retry-after") == ("7" if status in {429, 503} else None)
    else:
        assert answer.json()["error"]["code"] == code
    assert (record.status, record.error) == (status, code or "engine_refused")
    assert proxy.in_flight() == 0


async def test_unreachable_instance_is_reported_and_told_as_502(
    balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """The fleet's keeper hears of it, the client hears no address."""
    async with balancer(instance("http://127.0.0.1:9")) as proxy:
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())

        assert answer.status_code == 502
        assert "127.0.0.1" not in answer.text
        assert proxy.health == [("http://127.0.0.1:9", False, "engine_unreachable")]


async def test_failed_answer_withdraws_its_prediction(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Blocks of a refused prompt are not expected anywhere (F19)."""
    async with engine(refuse(400)) as fake, balancer(instance(fake), reads=True) as proxy:
        await client.post(proxy.url + COMPLETIONS, json=long_prompt())
        fake.script = answer_ok
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())
        assert answer.headers["x-kvlb-overlap-tokens"] == "0"
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())

        assert int(answer.headers["x-kvlb-overlap-tokens"]) > 900


async def test_whole_answer_that_is_cut_is_an_honest_502(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Half a JSON never passes for an answer, and generation is not repeated."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"half')
        wire.close()

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())

        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "stream_cut")
        assert len(fake.received) == 1


async def test_huge_answer_passes_without_being_held(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Beyond the limit it streams through; its usage stays unknown."""
    body = json.dumps({"choices": [{"text": "x" * 3_000_000}], "usage": usage(1, 1)}).encode()

    async with engine(answer_with(body)) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())
        (record,) = await proxy.wait_for_records(1)

    assert answer.content == body
    assert record.cached_tokens is None


async def test_huge_answer_that_is_cut_breaks_the_connection(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Too late for a status: the client must not take it for complete."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="application/json")
        await wire.chunk(b"x" * 3_000_000)
        wire.close()

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(proxy.url + COMPLETIONS, json=long_prompt())

        assert (await proxy.wait_for_records(1))[0].error == "stream_cut"


# Concurrent pairs


class PushConnector(Connector):
    """A fake concurrent connector: both legs at once, matched by request id."""

    name = "push"

    def style(self, context: LegContext) -> Style:  # noqa: ARG002 - the contract's signature
        return "concurrent"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        return LegRequest(
            body={**prefill_body(context.body), "kv_transfer_params": {"push": True}},
            headers=((b"x-leg", b"prefill"),),
        )

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        assert prefill_answer is None
        return LegRequest(
            body={**context.body, "kv_transfer_params": {"from": context.prefill.alias}}
        )


CONCURRENT = {"push": PushConnector()}


@pytest.mark.parametrize("stream", [False, True])
async def test_concurrent_legs_run_at_once(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient, stream: bool
) -> None:
    """Each engine answers only after the other has its request."""
    met = asyncio.Barrier(2)

    async def prefill(received: Any, wire: Any) -> None:
        await met.wait()
        await wire.json({"choices": [{"finish_reason": "length"}], "usage": usage(1000, 0)})

    async def decode(received: Any, wire: Any) -> None:
        await met.wait()
        await answer_ok(received, wire)

    async with (
        engine(prefill) as p,
        engine(decode) as d,
        balancer(*pair(p, d, "push"), connectors=CONCURRENT) as proxy,
    ):
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt(stream=stream))
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == 200
    assert p.received[0].header("x-leg") == "prefill"
    assert d.received[0].json["kv_transfer_params"] == {"from": "p0"}
    assert p.received[0].header("x-request-id") == d.received[0].header("x-request-id")
    assert record.cached_tokens == 0
    assert proxy.in_flight() == 0


async def test_concurrent_prefill_failure_cancels_decode_and_tries_another(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient
) -> None:
    """A decode engine left alone would wait for minutes."""
    decodes = 0

    async def decode(received: Any, wire: Any) -> None:
        nonlocal decodes
        decodes += 1
        if received.json["kv_transfer_params"] == {"from": "p0"}:
            await wire.head(content_type="text/event-stream")
            started.set()
            await received.gone.wait()
        else:
            await answer_ok(received, wire)

    async def bad_prefill(received: Any, wire: Any) -> None:
        await started.wait()
        await refuse(500)(received, wire)

    started = asyncio.Event()
    async with (
        engine(bad_prefill) as bad,
        engine(prefill_ok) as good,
        engine(decode) as d,
        balancer(*pair([bad, good], d, "push"), connectors=CONCURRENT) as proxy,
    ):
        for number in range(2):
            answer = await client.post(
                proxy.url + COMPLETIONS, json=long_prompt(number, stream=True)
            )
            assert answer.headers["x-kvlb-prefill"] == "p1"
        async with asyncio.timeout(20):
            await d.received[0].gone.wait()

    assert decodes == 2 + len(bad.received)
    assert proxy.in_flight() == 0


async def test_concurrent_decode_refusal_cancels_prefill(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient
) -> None:
    """The prefill engine sees its connection close; the client sees decode's answer."""

    async def decode(received: Any, wire: Any) -> None:
        await p.wait_for_requests(1)
        await refuse(400)(received, wire)

    async with (
        engine(stay_silent) as p,
        engine(decode) as d,
        balancer(*pair(p, d, "push"), connectors=CONCURRENT) as proxy,
    ):
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt())
        await p.wait_for_connections(0)
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == 400
    assert {leg.kind: leg.error for leg in record.legs} == {
        "prefill": "cancelled",
        "decode": "engine_refused",
    }
    assert proxy.in_flight() == 0


async def test_concurrent_answer_waits_for_its_prefill(
    engine: Any, balancer: Any, pair: Any, client: httpx.AsyncClient
) -> None:
    """Decode's early 200 is no answer yet: a prefill that fails later still gets its status."""

    async def bad_prefill(received: Any, wire: Any) -> None:
        await d.wait_for_requests(1)
        await refuse(400)(received, wire)

    async with (
        engine(bad_prefill) as p,
        engine(answer_ok) as d,
        balancer(*pair(p, d, "push"), connectors=CONCURRENT) as proxy,
    ):
        answer = await client.post(proxy.url + COMPLETIONS, json=long_prompt(stream=True))

    assert answer.status_code == 400


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
) -> None:
    """The error says what to load where; nothing is sent to who can't answer."""

    async def answer_ok(received: Any, wire: Any) -> None:
        await wire.json({"id": "x", "choices": [{"text": "ok"}]})

    async with engine(answer_ok) as p, engine(answer_ok) as d:
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
