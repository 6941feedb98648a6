"""The `openai` and `anthropic` packages see the same engine through kvlb as without it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, running_fleet

CLIENT_GROUPS = (
    "openai",
    "responses",
    "anthropic",
    "plain",
    "several",
    "invocations",
    "forced-usage",
    "scale-out",
    "scale-out-off",
    "pooling",
    "speech",
    "unknown-model",
    "unknown-response",
)
FLAGS: dict[str, dict[str, bool]] = {
    "scale-out": {"scale_out": True, "tokenizer_info": True},
    "forced-usage": {"force_include_usage": True},
}
SERVES = {"pooling": "pooling", "speech": "transcription"}


@asynccontextmanager
async def both(balancer_factory: Any, kind: str) -> AsyncIterator[tuple[str, str]]:
    """An engine's address, and kvlb's in front of it."""
    settings: Any = {"serves": SERVES.get(kind, "generate")}
    settings |= FLAGS.get(kind, {})
    engine = EngineSettings(responses_store=True, inter_token_ms=0, **settings)
    async with running_fleet(FleetSpec.parse("1"), engine=engine) as fleet:
        url = fleet.engines[0].url
        async with balancer_factory({"instances": [{"url": url}]}) as balancer:
            await balancer.available()
            yield url, balancer.url


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
async def test_result_is_the_same_through_kvlb(
    balancer_factory: Any, client_calls: Any, client_call: tuple[str, str]
) -> None:
    """Field by field, whether it is an answer, a stream or an error."""
    group, name = client_call
    call = client_calls.CALLS[group][name]

    def compare(engine: str, kvlb: str) -> tuple[Any, Any]:
        with client_calls.opened(engine) as direct, client_calls.opened(kvlb) as through:
            client_calls.outcome(call, direct)  # from now on its blocks are cached for both
            return client_calls.outcome(call, direct), client_calls.outcome(call, through)

    async with both(balancer_factory, group) as (engine, kvlb):
        expected, got = await asyncio.to_thread(compare, engine, kvlb)

    status = expected.get("status") if isinstance(expected, dict) else None
    refused = isinstance(status, int) and status >= 400
    assert refused == (group.startswith("unknown") or name in client_calls.REFUSED), expected
    if group.startswith("unknown"):
        expected, got = map(client_calls.without_own_words, (expected, got))
    assert got == expected


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages":1}', b"\xff"], ids=repr)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_body_that_nobody_can_read_is_refused_alike(
    balancer_factory: Any, client_calls: Any, path: str, body: bytes
) -> None:
    """Here kvlb answers for itself: same status and shape, words of its own."""
    headers = {"content-type": "application/json"}

    def ask(url: str) -> Any:
        with client_calls.opened(url) as clients:
            answer = clients.http.post(path, content=body, headers=headers)
            return answer.status_code, sorted(answer.json()["error"])

    async with both(balancer_factory, "openai") as (engine, kvlb):
        assert await asyncio.to_thread(ask, kvlb) == await asyncio.to_thread(ask, engine)
