"""Log lines of machines: the order they leave in, and that none is lost."""

import asyncio
import io
import json
import logging
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import structlog

from balancer.core.record import RequestRecord
from kvlb import logs
from kvlb.logs import LineLog, Moments, configure_logs, request_log


@pytest.fixture
def out() -> io.BytesIO:
    return io.BytesIO()


@pytest.fixture
def log(out: io.BytesIO) -> LineLog:
    return LineLog(out, tells_requests=True)


def record(number: int = 1) -> RequestRecord:
    return RequestRecord(request_id=f"r{number}", path="/v1/x", arrived_s=1.0, ended_s=1.25)


def written(out: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


async def test_request_leaves_a_line_of_its_own(log: LineLog, out: io.BytesIO) -> None:
    """With the fields that structlog would have written."""
    log.request_done(record())
    log.flush()

    (line,) = written(out)
    assert line["event"] == "request_done"
    assert (line["level"], line["request_id"], line["seconds"]) == ("info", "r1", 0.25)
    assert line["timestamp"].endswith("Z")
    assert line["legs"] == []


async def test_lines_of_requests_are_written_together_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without anybody asking for it."""
    monkeypatch.setattr(logs, "LATEST_S", 0.05)
    flushed = asyncio.Event()

    class Out(io.BytesIO):
        def flush(self) -> None:
            flushed.set()

    out = Out()
    log = LineLog(out, tells_requests=True)
    log.request_done(record(1))
    log.request_done(record(2))
    assert written(out) == []

    async with asyncio.timeout(20):
        await flushed.wait()
    assert [each["request_id"] for each in written(out)] == ["r1", "r2"]


async def test_other_lines_leave_at_once_and_in_order(log: LineLog, out: io.BytesIO) -> None:
    """A request's line that waited leaves before the line that came after it."""
    log.request_done(record())
    log.warning(b'{"event":"instance_held_back"}')

    assert [each["event"] for each in written(out)] == ["request_done", "instance_held_back"]


async def test_few_lines_wait(log: LineLog, out: io.BytesIO) -> None:
    """Past a number they leave, however soon that is."""
    for number in range(logs.MOST_WAITING):
        log.request_done(record(number))

    assert len(written(out)) == logs.MOST_WAITING


def test_process_that_ends_loses_no_line() -> None:
    """What waits is written on the way out."""
    program = """
import asyncio, structlog
from balancer.core.record import RequestRecord
from kvlb.logs import configure_logs, request_log

async def serve():
    request_log()(RequestRecord(request_id="r", path="/v1/x", arrived_s=1.0))

configure_logs()
asyncio.run(serve())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert json.loads(done.stderr)["event"] == "request_done"
    assert done.stdout == b""


def test_level_above_info_keeps_requests_out() -> None:
    """As it keeps other news out."""
    configure_logs(logging.ERROR)
    assert request_log() is None
    configure_logs()
    assert request_log() is not None
    structlog.reset_defaults()
    assert request_log() is None


def test_moments_are_spelt_as_in_other_lines() -> None:
    """Microseconds of UTC, cut, from one second to the next."""
    moments = Moments()
    start = datetime(2026, 11, 30, 23, 59, 59, 999_000, tzinfo=UTC)
    steps = [start + timedelta(microseconds=each) for each in (0, 999, 1000, 1001, 1_500_007)]

    told = [moments.spell(round(each.timestamp() * 1e6) * 1000 + 999) for each in steps]

    assert [each.decode() for each in told] == [
        f"{each.isoformat(timespec='microseconds').removesuffix('+00:00')}Z" for each in steps
    ]
