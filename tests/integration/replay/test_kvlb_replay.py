"""`kvlb replay` before simulated engines, and against endpoints that fail in every way."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvlb.demo.run import wait_until_ready
from kvlb.openai_endpoint import CallFailedError, OpenAiEndpoint
from kvlb.replay.command import KEY_VARIABLE, Replayed, ReplayOptions, send_trace
from kvlb.replay.core.outcomes import Limits
from kvlb.replay.core.prompts import PromptShape
from kvlb.replay.core.schedule import Pace, plan_schedule
from kvlb.replay.sending import WRITTEN_AHEAD, SendOptions
from kvlb.replay.trace_file import read_trace
from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

WriteRows = Callable[..., Path]
Turns = Sequence[dict[str, Any]]

Endpoint = Callable[..., AbstractAsyncContextManager[str]]

FAST = EngineSettings(inter_token_ms=0.5, prefill_tokens_per_s=200_000)

CHAT = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x" * 20}],
    "request_points": [1],
}
DONE = b"data: [DONE]\n\n"


async def send(options: ReplayOptions) -> Replayed:
    requests = read_trace(options.trace)
    draw = Random(1).random  # noqa: S311 - no secret
    return await send_trace(options, requests, plan_schedule(requests, options.pace, draw))


def answer(*events: bytes) -> bytes:
    """A streamed answer that is all there at once."""
    return b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"".join(events)


def said(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


async def test_trace_is_replayed_through_a_balancer(trace: Path) -> None:
    """Every request is answered on time's order; reuse, goodput and engines are in the report."""
    async with simulated_fleet(parse_fleet("2"), FAST) as fleet:
        instances = tuple(map(instance_option, fleet.engines))
        settings = load_settings(None, Overrides(instances=instances, port=0), {})
        async with running_kvlb(settings) as kvlb:
            await wait_until_ready(kvlb, engines=2)
            replayed = await send(
                ReplayOptions(
                    trace=trace,
                    url=kvlb.url,
                    pace=Pace(speed=0.05),
                    limits=Limits(ttft_s=60, itl_s=60),
                )
            )

    report = replayed.report
    assert (report.planned, report.due, report.answered, report.errors) == (6, 6, 6, {})
    # Of 1, 2 and 3 blocks, the first 0, 1 and 2 were there: half, but for each prompt's last token.
    assert report.cached_ratio == pytest.approx(0.5, abs=0.1)
    assert (report.good, report.goodput) == (6, 1.0)
    assert sum(each.requests for each in report.engines) == 6
    assert {each.engine for each in report.engines} <= {"m0", "m1"}
    assert [each.output_tokens for each in replayed.outcomes] == [3] * 6


async def test_more_than_is_written_ahead_is_sent(
    tmp_path: Path, write_rows: WriteRows, turns: Turns
) -> None:
    """Bodies are written while there is nothing to send."""
    rows = [turns[0] | {"timestamp": 5 * number} for number in range(WRITTEN_AHEAD + 6)]
    path = write_rows(tmp_path / "trace.jsonl", *rows)
    async with simulated_fleet(parse_fleet("1"), FAST) as fleet:
        replayed = await send(ReplayOptions(trace=path, url=fleet.engines[0].url))

    assert replayed.report.answered == WRITTEN_AHEAD + 6
    assert [each.line for each in sorted(replayed.outcomes, key=lambda each: each.at_s)] == list(
        range(1, WRITTEN_AHEAD + 7)
    )


@pytest.mark.parametrize("row", [CHAT, {"timestamp": 0, "requests": [{"prompt": "hi"}]}])
async def test_chats_and_text_are_replayed(row: Any, tmp_path: Path, write_rows: WriteRows) -> None:
    """On the path of their kind; nothing names the engine, so nobody has a share."""
    path = write_rows(tmp_path / "trace.jsonl", row)
    async with simulated_fleet(parse_fleet("1"), FAST) as fleet:
        replayed = await send(ReplayOptions(trace=path, url=fleet.engines[0].url + "/v1"))

    assert (replayed.report.answered, replayed.report.engines) == (1, [])


async def test_block_prompts_as_text_share_blocks_too(trace: Path) -> None:
    """For endpoints that take no token ids; the simulator's tokens are bytes."""
    shape = PromptShape(chars_per_token=1.0)
    async with simulated_fleet(parse_fleet("1"), FAST) as fleet:
        url = fleet.engines[0].url
        replayed = await send(
            ReplayOptions(trace=trace, url=url, shape=shape, pace=Pace(speed=0.05))
        )

    assert replayed.report.cached_ratio == pytest.approx(0.5, abs=0.1)


async def test_signal_ends_it_with_a_report(trace: Path) -> None:
    """What was under way counts as stopped, what wasn't due yet as neither."""
    slow = EngineSettings(inter_token_ms=10_000.0)
    async with (
        simulated_fleet(parse_fleet("1"), slow) as fleet,
        asyncio.TaskGroup() as group,
    ):
        options = ReplayOptions(
            trace=trace, url=fleet.engines[0].url, model="sim", pace=Pace(speed=0.001)
        )
        sending = group.create_task(send(options))
        async with asyncio.timeout(20):
            while True:
                if any(rank.in_flight for rank in fleet.engines[0].engine.ranks):
                    break
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        replayed = await sending

    assert replayed.was_stopped
    assert replayed.report.errors == {"stopped": 1}
    assert (replayed.report.planned, replayed.report.due) == (6, 1)


async def test_nothing_is_sent_above_the_limit_in_flight(trace: Path) -> None:
    """Sent later, it would be no open loop."""
    slow = EngineSettings(prefill_tokens_per_s=10.0)
    options = SendOptions(max_in_flight=1, timeout_s=1.5)
    async with simulated_fleet(parse_fleet("1"), slow) as fleet:
        replayed = await send(
            ReplayOptions(
                trace=trace, url=fleet.engines[0].url, sending=options, pace=Pace(speed=100)
            )
        )

    assert replayed.report.errors == {"in_flight_limit": 5, "timeout": 1}


@pytest.mark.parametrize(
    ("bytes_", "kind"),
    [
        pytest.param(
            b'HTTP/1.1 429 Slow\r\ncontent-length: 32\r\n\r\n{"error": {"message": "too many"}}'[
                :-2
            ],
            "status_429",
            id="refused",
        ),
        pytest.param(b"", "closed", id="closed"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: ", "cut", id="cut"),
        pytest.param(b"no http at all\r\n\r\n", "no_http", id="no-http"),
        pytest.param(answer(b'data: {"error": {}}\n\n', DONE), "error_event", id="error-event"),
        pytest.param(answer(b"data: {\n\n", DONE), "garbled", id="garbled"),
        pytest.param(answer(said("a")), "unfinished", id="no-done"),
        pytest.param(answer(DONE), "empty", id="nothing-said"),
    ],
)
async def test_failure_is_counted_by_kind(
    endpoint: Endpoint,
    tmp_path: Path,
    bytes_: bytes,
    kind: str,
    write_rows: WriteRows,
    turns: Turns,
) -> None:
    """And the next request is sent as planned."""
    path = write_rows(tmp_path / "trace.jsonl", *turns[:2])
    async with endpoint(bytes_) as url:
        replayed = await send(ReplayOptions(trace=path, url=url, model="m"))

    assert replayed.report.errors == {kind: 2}


@pytest.mark.parametrize(
    ("headers", "option", "engine"),
    [
        pytest.param("X-KVLB-Instance: d0", None, "d0", id="kvlb"),
        pytest.param("x-served-by: a", None, "a", id="another-balancer"),
        pytest.param("x-kvlb-instance: d0\r\nx-pod: p", "X-Pod", "p", id="named"),
        pytest.param("x-other: a", None, None, id="none"),
    ],
)
async def test_engine_is_told_by_a_header(
    endpoint: Endpoint,
    tmp_path: Path,
    headers: str,
    option: str | None,
    engine: str | None,
    write_rows: WriteRows,
    turns: Turns,
) -> None:
    """Kvlb's own, another balancer's, or the one that was named."""
    path = write_rows(tmp_path / "trace.jsonl", turns[0])
    whole = answer(said("a"), DONE).replace(b"connection:", headers.encode() + b"\r\nconnection:")
    async with endpoint(whole) as url:
        replayed = await send(
            ReplayOptions(trace=path, url=url, model="m", sending=SendOptions(engine_header=option))
        )

    assert replayed.outcomes[0].engine == engine


async def test_key_and_session_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_rows: WriteRows, turns: Turns
) -> None:
    """The key of the environment, the session under the header's name that was asked for."""
    monkeypatch.setenv(KEY_VARIABLE, "k3y")
    heads: list[bytes] = []

    async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(said("a"), DONE))
        await writer.drain()
        writer.close()

    path = write_rows(tmp_path / "trace.jsonl", turns[0])
    async with await asyncio.start_server(give, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = SendOptions(session_header="X-Session-ID")
        await send(ReplayOptions(trace=path, url=url, model="m", sending=options))

    assert b"authorization: Bearer k3y\r\n" in heads[0]
    assert b"X-Session-ID: s1\r\n" in heads[0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b'{"error": {"message": "no such model"}}', "404: no such model", id="openai"),
        pytest.param(b'{"message": "gone"}', "404: gone", id="older-vllm"),
        pytest.param(b'{"error": "plain"}', "404: plain", id="string"),
        pytest.param(b"[1]", "404$", id="no-object"),
        pytest.param(b"<html>", "404$", id="no-json"),
    ],
)
async def test_refusal_is_told_in_the_endpoints_words(
    endpoint: Endpoint, body: bytes, says: str
) -> None:
    """As far as it has any."""
    head = b"HTTP/1.1 404 No\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with endpoint(head + body) as url, OpenAiEndpoint(url) as asked:
        with pytest.raises(CallFailedError, match=says):
            await asked.first_model()
