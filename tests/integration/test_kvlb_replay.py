"""`kvlb replay` before simulated engines, and against endpoints and traces that fail in every way."""

import asyncio
import gzip
import io
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Queue
from random import Random
from threading import Thread
from typing import Any

import pytest
import structlog
from rich.console import Console
from structlog.testing import capture_logs
from typer.testing import CliRunner

from kvlb.cli import app
from kvlb.demo.run import wait_until_ready
from kvlb.errors import PeerError, SettingsError
from kvlb.openai_endpoint import CallFailedError, OpenAiEndpoint
from kvlb.replay.command import KEY_VARIABLE, Replayed, ReplayOptions, replay, send_trace
from kvlb.replay.core.outcomes import Limits
from kvlb.replay.core.prompts import PromptShape
from kvlb.replay.core.schedule import Pace, plan_schedule
from kvlb.replay.progress import shown_progress
from kvlb.replay.sending import WRITTEN_AHEAD, SendOptions, Sent
from kvlb.replay.trace_file import read_trace
from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

Endpoint = Callable[..., AbstractAsyncContextManager[str]]

FAST = EngineSettings(inter_token_ms=0.5, prefill_tokens_per_s=200_000)
ROWS = [
    {
        "timestamp": 10 * number,
        "input_length": 64 * turn,
        "output_length": 3,
        "hash_ids": [100 * session + block for block in range(turn)],
        "session": f"s{session}",
    }
    for number, (turn, session) in enumerate(
        (turn, session) for turn in (1, 2, 3) for session in (1, 2)
    )
]
CHAT = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x" * 20}],
    "request_points": [1],
}
DONE = b"data: [DONE]\n\n"


def write_rows(path: Path, *rows: Any) -> Path:
    """A trace of these rows; packed if its name says so."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture(autouse=True)
def default_logs() -> Iterator[None]:
    """Commands set up logs for their process; other tests keep theirs."""
    kept = structlog.get_config()
    yield
    structlog.configure(**kept)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two sessions of three turns in a twentieth of a second."""
    return write_rows(tmp_path / "trace.jsonl.gz", *ROWS)


@contextmanager
def served_engine() -> Iterator[str]:
    """An engine on a loop of its own, for commands that run a loop themselves."""
    started: Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Queue()

    async def serve() -> None:
        stopped = asyncio.Event()
        async with simulated_fleet(parse_fleet("1"), FAST) as fleet:
            started.put((fleet.engines[0].url, asyncio.get_running_loop(), stopped))
            await stopped.wait()

    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url, loop, stopped = started.get(timeout=10)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(timeout=10)


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


async def test_more_than_is_written_ahead_is_sent(tmp_path: Path) -> None:
    """Bodies are written while there is nothing to send."""
    rows = [ROWS[0] | {"timestamp": 5 * number} for number in range(WRITTEN_AHEAD + 6)]
    path = write_rows(tmp_path / "trace.jsonl", *rows)
    async with simulated_fleet(parse_fleet("1"), FAST) as fleet:
        replayed = await send(ReplayOptions(trace=path, url=fleet.engines[0].url))

    assert replayed.report.answered == WRITTEN_AHEAD + 6
    assert [each.line for each in sorted(replayed.outcomes, key=lambda each: each.at_s)] == list(
        range(1, WRITTEN_AHEAD + 7)
    )


@pytest.mark.parametrize("row", [CHAT, {"timestamp": 0, "requests": [{"prompt": "hi"}]}])
async def test_chats_and_text_are_replayed(row: Any, tmp_path: Path) -> None:
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
    endpoint: Endpoint, tmp_path: Path, bytes_: bytes, kind: str
) -> None:
    """And the next request is sent as planned."""
    path = write_rows(tmp_path / "trace.jsonl", *ROWS[:2])
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
    endpoint: Endpoint, tmp_path: Path, headers: str, option: str | None, engine: str | None
) -> None:
    """Kvlb's own, another balancer's, or the one that was named."""
    path = write_rows(tmp_path / "trace.jsonl", ROWS[0])
    whole = answer(said("a"), DONE).replace(b"connection:", headers.encode() + b"\r\nconnection:")
    async with endpoint(whole) as url:
        replayed = await send(
            ReplayOptions(trace=path, url=url, model="m", sending=SendOptions(engine_header=option))
        )

    assert replayed.outcomes[0].engine == engine


async def test_key_and_session_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the environment, the session under the header's name that was asked for."""
    monkeypatch.setenv(KEY_VARIABLE, "k3y")
    heads: list[bytes] = []

    async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(said("a"), DONE))
        await writer.drain()
        writer.close()

    path = write_rows(tmp_path / "trace.jsonl", ROWS[0])
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


def test_file_is_written_and_the_page_drawn(trace: Path, tmp_path: Path) -> None:
    """Without a terminal the report is on standard output; files hold everything."""
    out, plot = tmp_path / "report.json", tmp_path / "report.html"
    with served_engine() as url:
        arguments = ["replay", str(trace), "--url", url, "--out", str(out), "--plot", str(plot)]
        result = CliRunner().invoke(app, [*arguments, "--ttft-ms", "60000", "--format", "json"])

    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    written = json.loads(out.read_text())
    assert (printed["answered"], printed["goodput"], "requests" in printed) == (6, 1.0, False)
    assert len(written["requests"]) == 6
    page = plot.read_text()
    assert page.count("<svg") == 5
    assert "trace.jsonl.gz at 1 x" in page
    assert not re.search(r"(src|href)=", page)


def test_report_is_tables_for_people(trace: Path) -> None:
    """With what failed, and why."""
    with served_engine() as url:
        options = ["--model", "nobody", "--speed", "1000"]
        result = CliRunner().invoke(app, ["replay", str(trace), "--url", url, *options])
        shown = CliRunner().invoke(app, ["replay", str(trace), "--url", url, "--limit", "1"])

    assert isinstance(result.exception, PeerError)
    assert "status_404" in result.stdout
    assert "TTFT" in shown.stdout


def test_endpoint_that_lists_no_model_is_told(trace: Path) -> None:
    """And how to go on."""
    with pytest.raises(PeerError, match=r"lists no model.*--model"):
        replay(ReplayOptions(trace=trace, url="http://127.0.0.1:9"), as_json=False)


def test_nothing_answered_is_an_error(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the report."""
    options = ReplayOptions(trace=trace, url="http://127.0.0.1:9", model="m", pace=Pace(speed=1e3))
    with pytest.raises(PeerError, match=r"no request was answered.*no connection"):
        replay(options, as_json=False)

    assert "unreachable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"url": "nowhere"}, "--url", id="url"),
        pytest.param({"out": Path("/nowhere/x.json")}, "--out: there is no directory", id="out"),
        pytest.param({"plot": Path("report.png")}, "--plot: .*report.html", id="plot"),
        pytest.param({"shape": PromptShape(vocabulary=900)}, "--vocabulary", id="vocabulary"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    trace: Path, change: dict[str, Any], says: str
) -> None:
    """Not after an hour of requests."""
    options = ReplayOptions(trace=trace, url="http://127.0.0.1:9")
    with pytest.raises(SettingsError, match=says):
        replay(replace(options, **change), as_json=False)


def test_prompts_are_ids_or_text(trace: Path) -> None:
    """Nothing else."""
    result = CliRunner().invoke(app, ["replay", str(trace), "--prompts", "pictures"])

    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "holds no request", id="empty"),
        pytest.param(b'{"x": 1}\n', "line 1: no format that is known", id="unknown"),
        pytest.param(json.dumps(ROWS[0]).encode() + b"\n{", "line 2: ", id="second-line"),
        pytest.param(gzip.compress(b"{}")[:-9], "can't be read", id="cut-gzip"),
        pytest.param(b"\x1f\x8b\x08\x00 junk", "can't be read", id="no-gzip"),
    ],
)
def test_bad_trace_is_told(tmp_path: Path, content: bytes, says: str) -> None:
    """With the line, where there is one."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)

    with pytest.raises(SettingsError, match=says):
        read_trace(path)


async def test_bar_is_drawn_where_somebody_watches() -> None:
    """Until the end of the block."""
    console = Console(force_terminal=True, file=io.StringIO(), record=True)
    async with shown_progress(Sent(in_flight=2), 3, console):
        await asyncio.sleep(0)

    assert "0/3" in console.export_text()


async def test_log_lines_are_written_where_nobody_does(
    eventually: Callable[[Callable[[], object]], Awaitable[None]],
) -> None:
    """One after the other."""
    console = Console(file=io.StringIO(), force_terminal=False)
    with capture_logs() as lines:
        async with shown_progress(Sent(), 3, console, log_s=0.01):
            await eventually(lambda: len(lines) >= 2)

    assert {each["event"] for each in lines} == {"replay_sent"}
    assert lines[0]["planned"] == 3
