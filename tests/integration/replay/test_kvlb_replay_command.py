"""`kvlb replay` as a command: what it writes and shows, and what it refuses."""

import asyncio
import gzip
import io
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from structlog.testing import capture_logs
from typer.testing import CliRunner

from kvlb.cli import app
from kvlb.errors import PeerError, SettingsError
from kvlb.replay.command import ReplayOptions, replay
from kvlb.replay.core.prompts import PromptShape
from kvlb.replay.core.schedule import Pace
from kvlb.replay.progress import shown_progress
from kvlb.replay.sending import Sent
from kvlb.replay.trace_file import read_trace
from kvlb.simulated import parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

FAST = EngineSettings(inter_token_ms=0.5, prefill_tokens_per_s=200_000)


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
        pytest.param(
            b'{"timestamp": 0, "input_length": 64, "output_length": 3, "hash_ids": [1]}\n{',
            "line 2: ",
            id="second-line",
        ),
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
