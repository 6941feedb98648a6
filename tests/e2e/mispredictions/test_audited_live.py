"""`kvlb audit --live` of an index that is wrong: the cause is told, and the exit code is 1."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from kvlb.audit.command import print_audit
from kvlb.audit.live import watch_balancer
from kvlb.audit.report import AuditReport
from simulator.core.event_faults import EventFaults

Composed = Callable[..., AbstractAsyncContextManager[Any]]

KNOWN_S = 0.5
"""For so long at least blocks were known before they are lost: reports tell times to 0.1 s."""
HIDDEN, TOLD = EventFaults(hides_clears=True), EventFaults()


def indexer_apart(kvlb: Any) -> str | None:
    """What `--indexer` has to say."""
    return None if kvlb.indexer_url == kvlb.url else str(kvlb.indexer_url)


@asynccontextmanager
async def watched(
    kvlb: Any, *indexers: str | None
) -> AsyncIterator[Sequence[asyncio.Task[AuditReport]]]:
    """Watches over what the block has asked, of a rank whose blocks are known for a while."""
    stopped = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        watches = [
            group.create_task(watch_balancer(kvlb.url, minutes=1, stopped=stopped, indexer=indexer))
            for indexer in indexers
        ]
        await kvlb.fill_truly()
        known_s = asyncio.get_running_loop().time() + KNOWN_S
        while asyncio.get_running_loop().time() < known_s:
            await kvlb.agree()
        yield watches
        stopped.set()


async def reset(kvlb: Any, faults: EventFaults) -> None:
    """The engine loses everything; then the last prompt is asked for, which the index has."""
    engine = kvlb.engines[0]
    engine.set_event_faults(faults)
    await kvlb.http.post(f"{engine.url}/reset_prefix_cache")
    await kvlb.ask(kvlb.true_prompts[-1])


async def test_ghost_is_wrong_and_nothing_else(
    composed: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    """One difference, counted once, under its own cause, whoever has the index; exit code 1."""
    async with (
        composed("1") as kvlb,
        watched(kvlb, indexer_apart(kvlb), None) as (watching, unaided),
    ):
        await reset(kvlb, HIDDEN)
        await kvlb.until(lambda: kvlb.is_counted("ghost"))
    report, without = watching.result(), unaided.result()

    assert (report.wrong, report.explained, report.unexplained) == ({"ghost": 1}, {}, 0)
    assert (report.requests - report.exact, report.over) == (1, 1)
    capsys.readouterr()
    assert print_audit(report, as_json=False) == 1
    printed = capsys.readouterr()
    assert "1 ghost" in printed.out
    assert not printed.err
    # Of another process's index no cause is known without asking it; what it takes is said.
    is_apart = indexer_apart(kvlb) is not None
    assert print_audit(without, as_json=True) == 1
    assert ("--indexer" in capsys.readouterr().err) is is_apart
    assert without.unexplained == without.events.get("index_elsewhere", 0) == int(is_apart)


async def test_reset_that_is_told_late_is_explained(composed: Composed) -> None:
    """The same difference, and nothing is wrong: exit code 0, even if the watch ends at once."""
    async with composed("1") as kvlb, watched(kvlb, indexer_apart(kvlb)) as (watching,):
        await reset(kvlb, TOLD)
    report = watching.result()

    assert (report.wrong, report.explained) == ({}, {"reset_seen_late": 1})
    assert (report.requests - report.exact, report.over) == (1, 1)
    assert print_audit(report, as_json=True) == 0


async def test_command_finds_nothing_where_nothing_is_wrong(composed: Composed) -> None:
    """As a process, while requests come."""
    async with composed("1") as kvlb, asyncio.TaskGroup() as group:
        apart = indexer_apart(kvlb)
        command = [sys.executable, "-m", "kvlb", "audit", "--live", "--url", kvlb.url]
        command += [] if apart is None else ["--indexer", apart]
        process = await asyncio.create_subprocess_exec(
            *command, "--minutes", "0.02", "--format", "json", stdout=asyncio.subprocess.PIPE
        )
        await kvlb.fill_truly()
        ended = group.create_task(process.communicate())
        while not ended.done():
            await kvlb.agree()
    report = json.loads(ended.result()[0])

    assert (process.returncode, report["wrong"], report["unexplained"]) == (0, {}, 0)
    assert report["exact"] == report["requests"] > 0
