"""What a client is told of its cached tokens where two engines had a part in its answer (F35)."""

import json
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.dataplane import DataPlaneSettings

COMPLETIONS = "/v1/completions"
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1]}
DONE = b"data: [DONE]\n\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'


def usage(cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": 1000,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def prefilled(told: Any) -> Any:
    async def script(received: Any, wire: Any) -> None:
        await wire.json({"choices": [], "kv_transfer_params": PARAMS, "usage": told})

    return script


async def decode(received: Any, wire: Any) -> None:
    """Nearly all is cached: it came from the other engine."""
    if received.json.get("stream"):
        last = {"choices": [], "usage": usage(992)}
        await wire.events(TOKEN, b"data: " + json.dumps(last).encode() + b"\n\n", DONE)
    else:
        await wire.json({"choices": [{"text": "a"}], "usage": usage(992)})


def asked(stream: bool, **fields: Any) -> dict[str, Any]:
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return {"model": "m", "prompt": list(range(1000))} | streamed | fields


def told(answer: httpx.Response, stream: bool) -> Any:
    """The usage that the client reads."""
    if not stream:
        return answer.json()["usage"]
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return json.loads(lines[-1].removeprefix("data: "))["usage"]


@pytest.fixture
def fleet(instance: Any) -> Any:
    def describe(p: Any, d: Any) -> list[Any]:
        return [
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        ]

    return describe


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("prefill", "details"),
    [
        pytest.param(usage(64), {"cached_tokens": 64}, id="some"),
        pytest.param(usage(0), {"cached_tokens": 0}, id="none"),
        pytest.param({"prompt_tokens": 1000}, None, id="not-told"),
        pytest.param(None, {"cached_tokens": 992}, id="no-usage"),
    ],
)
async def test_the_client_reads_what_was_cached_where_its_prompt_was(
    engine: Any,
    balancer: Any,
    fleet: Any,
    client: httpx.AsyncClient,
    stream: bool,
    prefill: Any,
    details: Any,
) -> None:
    """A whole answer and a stream agree; every other figure is the decode engine's."""
    async with engine(prefilled(prefill)) as p, engine(decode) as d, balancer(*fleet(p, d)) as b:
        answer = await client.post(b.url + COMPLETIONS, json=asked(stream))
        (record,) = await b.wait_for_records(1)

    assert told(answer, stream) == usage(0) | {"prompt_tokens_details": details}
    assert [leg.cached_tokens for leg in record.legs][-1] == 992


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_decode_engines_figure_passes_where_that_is_wanted(
    engine: Any, balancer: Any, fleet: Any, client: httpx.AsyncClient, stream: bool
) -> None:
    """`usage_of_prefill: false` leaves every byte."""
    settings = DataPlaneSettings(usage_of_prefill=False)
    async with (
        engine(prefilled(usage(64))) as p,
        engine(decode) as d,
        balancer(*fleet(p, d), settings=settings) as b,
    ):
        answer = await client.post(b.url + COMPLETIONS, json=asked(stream))

    assert told(answer, stream) == usage(992)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_without_a_prefill_leg_the_engines_own_figure_passes(
    engine: Any, balancer: Any, fleet: Any, client: httpx.AsyncClient, stream: bool
) -> None:
    """A short prompt has one leg only."""
    async with (
        engine(prefilled(usage(64))) as p,
        engine(decode) as d,
        balancer(*fleet(p, d)) as b,
    ):
        answer = await client.post(b.url + COMPLETIONS, json=asked(stream, prompt=[1, 2, 3]))

    assert p.received == []
    assert told(answer, stream) == usage(992)


async def test_an_answer_without_a_length_gets_none(
    engine: Any, balancer: Any, fleet: Any, client: httpx.AsyncClient
) -> None:
    """In chunks as it came."""

    async def in_chunks(received: Any, wire: Any) -> None:
        body = json.dumps({"choices": [], "usage": usage(992)}).encode()
        await wire.head(content_type="application/json")
        await wire.chunk(body[:20])
        await wire.chunk(body[20:])
        await wire.end()

    async with (
        engine(prefilled(usage(64))) as p,
        engine(in_chunks) as d,
        balancer(*fleet(p, d)) as b,
    ):
        answer = await client.post(b.url + COMPLETIONS, json=asked(stream=False))

    assert answer.json()["usage"] == usage(64)
    assert "content-length" not in answer.headers
