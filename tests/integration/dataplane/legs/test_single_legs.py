"""One engine answers: what is tried elsewhere, and how its errors reach the client."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from balancer.core.settings.dataplane import DataPlaneSettings

Ask = Callable[..., Awaitable[httpx.Response]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["closed", "503", "empty-200"])
async def test_failure_before_the_first_byte_is_retried_elsewhere(
    engine: Any,
    balancer: Any,
    instance: Any,
    fault: str,
    stream: bool,
    ask: Ask,
    says: Any,
) -> None:
    """The client notices nothing; the record does."""
    async with (
        engine(says.fault(fault)) as bad,
        engine(says.answer_ok) as good,
        balancer(instance(bad, "e0"), instance(good, "e1")) as proxy,
    ):
        for number in range(2):
            answer = await ask(proxy, number, stream=stream)
            assert (answer.status_code, answer.headers["x-kvlb-instance"]) == (200, "e1")
        records = await proxy.wait_for_records(2)

    failed = [leg.alias for record in records for leg in record.legs if leg.error]
    assert set(failed) == {"e0"}
    assert proxy.in_flight() == 0


async def test_stream_that_dies_between_headers_and_first_byte_is_retried(
    engine: Any, balancer: Any, instance: Any, ask: Ask, says: Any
) -> None:
    """The 200 that engines send before they compute binds nobody (F43)."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        wire.close()

    async with (
        engine(script) as bad,
        engine(says.answer_ok) as good,
        balancer(instance(bad, "e0"), instance(good, "e1")) as proxy,
    ):
        for number in range(2):
            answer = await ask(proxy, number, stream=True)
            assert (answer.status_code, answer.content[-len(says.done) :]) == (200, says.done)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("closed", 502, "engine_closed"),
        ("empty-200", 502, "engine_closed"),
        ("silent", 504, "engine_timeout"),
        *((str(status), status, None) for status in (400, 401, 404, 422, 429, 500, 501, 503)),
    ],
)
async def test_error_reaches_the_client_as_it_is(
    engine: Any,
    balancer: Any,
    instance: Any,
    fault: str,
    status: int,
    code: str | None,
    stream: bool,
    ask: Ask,
    says: Any,
) -> None:
    """An engine's own answer, or ours in its form; never an empty 200 (F43, F44)."""
    settings = DataPlaneSettings(first_byte_timeout_s=0.3)
    async with (
        engine(says.fault(fault)) as fake,
        balancer(instance(fake), settings=settings) as proxy,
    ):
        answer = await ask(proxy, stream=stream)
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
    balancer: Any, instance: Any, ask: Ask
) -> None:
    """The fleet's keeper hears of it, the client hears no address."""
    async with balancer(instance("http://127.0.0.1:9")) as proxy:
        answer = await ask(proxy)

        assert answer.status_code == 502
        assert "127.0.0.1" not in answer.text
        assert proxy.health == [("http://127.0.0.1:9", False, "engine_unreachable")]


async def test_failed_answer_withdraws_its_prediction(
    engine: Any, balancer: Any, instance: Any, ask: Ask, says: Any
) -> None:
    """Blocks of a refused prompt are not expected anywhere (F19)."""
    async with engine(says.refuse(400)) as fake, balancer(instance(fake), reads=True) as proxy:
        await ask(proxy)
        fake.script = says.answer_ok
        answer = await ask(proxy)
        assert answer.headers["x-kvlb-overlap-tokens"] == "0"
        answer = await ask(proxy)

        assert int(answer.headers["x-kvlb-overlap-tokens"]) > 900


async def test_whole_answer_that_is_cut_is_an_honest_502(
    engine: Any, balancer: Any, instance: Any, ask: Ask
) -> None:
    """Half a JSON never passes for an answer, and generation is not repeated."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"half')
        wire.close()

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        answer = await ask(proxy)

        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "stream_cut")
        assert len(fake.received) == 1


async def test_huge_answer_passes_without_being_held(
    engine: Any, balancer: Any, instance: Any, ask: Ask, says: Any
) -> None:
    """Beyond the limit it streams through; its usage stays unknown."""
    body = json.dumps({"choices": [{"text": "x" * 3_000_000}], "usage": says.usage(1, 1)}).encode()

    async with engine(says.answer_with(body)) as fake, balancer(instance(fake)) as proxy:
        answer = await ask(proxy)
        (record,) = await proxy.wait_for_records(1)

    assert answer.content == body
    assert record.cached_tokens is None


async def test_huge_answer_that_is_cut_breaks_the_connection(
    engine: Any, balancer: Any, instance: Any, ask: Ask
) -> None:
    """Too late for a status: the client must not take it for complete."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="application/json")
        await wire.chunk(b"x" * 3_000_000)
        wire.close()

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(proxy)

        assert (await proxy.wait_for_records(1))[0].error == "stream_cut"
