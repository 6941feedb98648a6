"""A balancer is watched while it serves: what its index says, held against its engines."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kvlb.audit.command import print_audit
from kvlb.audit.live import BalancerWatch, watch_balancer
from kvlb.audit.report import Verdict, build_report
from kvlb.errors import PeerError
from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings
from simulator.service import RunningEngine

ENGINE = EngineSettings(inter_token_ms=1.0, prefill_tokens_per_s=200_000)


@dataclass(frozen=True, slots=True)
class Balancer:
    """A running kvlb, and a client for it and its engines."""

    url: str
    http: httpx.AsyncClient

    async def chat(self, text: str, **more: Any) -> None:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}
        answer = await self.http.post(f"{self.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        # It is in the log once the last byte is out, which the client may have seen before.
        await until(lambda: self._has_logged(answer.headers["x-request-id"]))

    async def _has_logged(self, request_id: str) -> bool:
        recent = (await self.http.get(f"{self.url}/explain/recent")).json()["decisions"]
        return request_id in {each["request_id"] for each in recent}

    async def held_blocks(self) -> int:
        status = (await self.http.get(f"{self.url}/status")).json()
        ranks = [rank for instance in status["instances"] for rank in instance["ranks"]]
        return sum(rank["index"]["held_blocks"] for rank in ranks)

    async def is_ready(self) -> bool:
        answer = await self.http.get(f"{self.url}/ready")
        return answer.status_code == 200 and not answer.json()["reasons"]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait, with a deadline, for what nobody announces."""
    async with asyncio.timeout(20):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def balancing(engines: Sequence[RunningEngine]) -> AsyncIterator[Balancer]:
    options = [instance_option(each) for each in engines]
    settings = load_settings(None, Overrides(instances=options, port=0), {})
    async with running_kvlb(settings) as kvlb, httpx.AsyncClient(trust_env=False) as http:
        balancer = Balancer(kvlb.url, http)
        await until(balancer.is_ready)
        yield balancer


async def test_balancer_is_watched_while_it_serves() -> None:
    """Each request once; what ended before is none of ours."""
    long = "the same long question " * 20
    async with (
        simulated_fleet(parse_fleet("2"), ENGINE) as fleet,
        balancing(fleet.engines) as balancer,
    ):
        await balancer.chat("before anybody watched")
        watch = BalancerWatch(balancer.url, balancer.http)
        await watch.begin()
        await balancer.chat(long)
        await until(lambda: _holds(balancer, 28))
        await watch.look()
        await balancer.chat(long)
        await watch.look()
        report = watch.report()

    assert (report.requests, report.exact) == (2, 2)
    assert [row.reported for row in report.rows] == [0, 464]


async def _holds(balancer: Balancer, blocks: int) -> bool:
    return await balancer.held_blocks() >= blocks


async def test_cache_reset_behind_our_back_is_an_error_that_is_seen() -> None:
    """More was predicted than there was, and the report says how much."""
    long = "the same long question " * 20
    async with (
        simulated_fleet(parse_fleet("1"), ENGINE) as fleet,
        balancing(fleet.engines) as balancer,
    ):
        watch = BalancerWatch(balancer.url, balancer.http)
        await watch.begin()
        await balancer.chat(long)
        await until(lambda: _holds(balancer, 28))
        await balancer.http.post(f"{fleet.engines[0].url}/reset_prefix_cache")
        await balancer.chat(long)
        await watch.look()
        report = watch.report()

    assert (report.requests, report.over, report.over_tokens) == (2, 1, 464)
    assert report.rows[-1].verdict is not Verdict.EXACT


async def test_watching_what_is_no_balancer_is_said() -> None:
    """Nobody there, or something else."""
    with pytest.raises(PeerError, match="no balancer answers"):
        await watch_balancer("http://127.0.0.1:9", minutes=1, stopped=asyncio.Event())
    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:
        with pytest.raises(PeerError, match="answered 404"):
            await watch_balancer(fleet.engines[0].url, minutes=1, stopped=asyncio.Event())


async def test_indexer_that_is_none_is_said() -> None:
    """Nobody there, or a balancer: by the option's name."""
    async with (
        simulated_fleet(parse_fleet("1"), ENGINE) as fleet,
        balancing(fleet.engines) as balancer,
    ):
        for indexer, says in (
            ("http://127.0.0.1:9", "no indexer answers .* --indexer"),
            (balancer.url, "is no kvlb indexer; .* --indexer"),
        ):
            with pytest.raises(PeerError, match=says):
                await watch_balancer(
                    balancer.url, minutes=1, stopped=asyncio.Event(), indexer=indexer
                )


async def test_balancer_that_goes_away_leaves_what_was_seen() -> None:
    """The looks that got no answer are counted."""
    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:
        async with balancing(fleet.engines) as balancer, httpx.AsyncClient() as http:
            watch = BalancerWatch(balancer.url, http)
            await watch.begin()
            await balancer.chat("a question")
            await watch.look()
        async with httpx.AsyncClient(trust_env=False) as http:
            watch._pages._http = http
            await watch.look()
        report = watch.report()

    assert len(report.rows) == 1
    assert report.events == {"unanswered": 1}


def test_report_without_a_request_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """And exits 1: nothing compared is no success."""
    assert print_audit(build_report([], {}), as_json=False) == 1
    assert "no request ended meanwhile" in capsys.readouterr().err


async def test_command_watches_a_balancer() -> None:
    """As a process of its own, for as long as it is told to; nothing compared is exit code 1."""
    async with (
        simulated_fleet(parse_fleet("1"), ENGINE) as fleet,
        balancing(fleet.engines) as balancer,
    ):
        watching = ("audit", "--live", "--url", balancer.url, "--minutes", "0.01")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvlb", *watching, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()

    assert process.returncode == 1
    assert b"no request ended meanwhile" in said
