"""`kvlb load` against a simulated engine, and against endpoints that fail in every way."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from kvlb.errors import PeerError, SettingsError
from kvlb.event_loop import run_command
from kvlb.load import LoadCounts, LoadOptions, load, send_load
from kvlb.simulated import parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

Endpoint = Callable[..., AbstractAsyncContextManager[str]]


def stream(*chunks: str) -> bytes:
    """A streamed answer that is all there at once."""
    events = "".join(f"data: {chunk}\n\n" for chunk in chunks)
    return f"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{events}".encode()


def options(url: str, *, model: str | None = "sim", requests: int | None = 1) -> LoadOptions:
    return LoadOptions(
        url=url, model=model, conversations_per_s=20, seed=1, requests=requests, report_s=0.05
    )


async def test_later_turns_find_the_ones_before_them() -> None:
    """The model is asked for; answers and their cached tokens are counted."""
    settings = EngineSettings(inter_token_ms=0.5, prefill_tokens_per_s=100_000)
    async with simulated_fleet(parse_fleet("1"), settings) as fleet:
        counts = await send_load(options(fleet.engines[0].url, model=None, requests=20))

    assert counts.answered >= 20
    assert counts.failed == 0
    assert 0 < counts.cached_tokens < counts.prompt_tokens


async def test_ends_at_a_signal() -> None:
    """Whatever is under way is dropped."""
    async with (
        simulated_fleet(parse_fleet("1"), EngineSettings()) as fleet,
        asyncio.TaskGroup() as group,
    ):
        sending = group.create_task(send_load(options(fleet.engines[0].url, requests=None)))
        async with asyncio.timeout(20):
            while True:
                if any(rank.in_flight for rank in fleet.engines[0].engine.ranks):
                    break
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        counts = await sending

    assert counts.failed == 0


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", id="refused"),
        pytest.param(b"", id="closed"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: ", id="cut"),
        pytest.param(stream('{"error": {"message": "engine died"}}'), id="error-in-stream"),
        pytest.param(stream("{"), id="no-json"),
    ],
)
async def test_failed_turn_is_counted_and_survived(endpoint: Endpoint, answer: bytes) -> None:
    """The next conversation begins as planned."""
    async with endpoint(answer) as url:
        counts = await send_load(options(url, requests=3))

    assert counts.failed >= 3
    assert counts.answered == 0


async def test_waits_for_a_model(endpoint: Endpoint) -> None:
    """An endpoint that isn't up yet is asked again, not given up."""
    listed = b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"data": [{"id": "late"}]}'
    refused = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"
    async with endpoint(stream("{}"), listed, refused) as url:
        counts = await send_load(options(url, model=None))

    assert counts.failed >= 1


async def test_counts_are_waited_for() -> None:
    """Failed requests count towards the last one as well."""
    counts = LoadCounts()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(counts.reached(2))
        counts.add_failure()
        await asyncio.sleep(0)
        counts.add_answer(3, None)

    assert (counts.answered, counts.failed, counts.prompt_tokens, counts.cached_tokens) == (
        *(1, 1),
        *(3, 0),
    )


def test_nothing_answered_is_an_error() -> None:
    """For whoever tries it out with a wrong address."""
    with pytest.raises(PeerError, match="no request was answered"):
        load(options("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    "url", ["notaurl", "127.0.0.1:8080", "http://", "http://h:port", "http://h:0"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """Before anything is sent."""
    with pytest.raises(SettingsError, match="--url"):
        load(options(url))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        pytest.param(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "status 503", id="status"),
        pytest.param(b"", "closed the connection", id="closed"),
        pytest.param(stream("{}"), "no model", id="no-list"),
    ],
)
def test_waiting_for_a_model_ends_with_the_reason(
    answer: bytes, says: str, endpoint: Endpoint
) -> None:
    """A wrong address would be asked for ever."""

    async def send() -> None:
        async with endpoint(answer) as url:
            await send_load(replace(options(url, model=None), wait_s=1.5))

    with pytest.raises(PeerError, match=f"no model within 1.5 s .*{says}"):
        run_command(send())
