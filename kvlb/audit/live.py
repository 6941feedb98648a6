"""Watches a running balancer for some minutes: every finished request, judged as it ends."""

import asyncio
import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from balancer.fleet.engine_sockets import tls_context
from kvlb.audit.live_rules import (
    Decision,
    RankFacts,
    RankName,
    assign_causes,
    judge,
    read_facts,
)
from kvlb.audit.report import AuditReport, Row, build_report
from kvlb.errors import PeerError

MOST_DECISIONS = 1000
"""What a balancer keeps, and what it tells at once."""
INTERVAL_S = 1.0
TIMEOUT_S = 10.0


async def watch_balancer(
    url: str, *, minutes: float, stopped: asyncio.Event, interval_s: float = INTERVAL_S
) -> AuditReport:
    """Sample until the minutes are over or `stopped` is set. Raises PeerError."""
    key = os.environ.get("KVLB_ADMIN_API_KEY")
    headers = {"X-API-Key": key} if key else {}
    async with httpx.AsyncClient(
        trust_env=False, verify=tls_context(), timeout=TIMEOUT_S, headers=headers
    ) as http:
        watch = BalancerWatch(url, http)
        await watch.begin()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 60 * minutes
        while not stopped.is_set() and (left_s := end_s - loop.time()) > 0:
            await _pause(stopped, min(left_s, interval_s))
            await watch.look()
        await watch.look()
        return watch.report()


async def _pause(stopped: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopped.wait()
    except TimeoutError:
        return


class _Balancer:
    """The two pages that are read."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url = url
        self._http = http

    async def decisions(self) -> Sequence[Decision]:
        """Finished requests, oldest first."""
        page = await self._get(f"/explain/recent?limit={MOST_DECISIONS}")
        try:
            read = msgspec.convert(page.get("decisions"), list[Decision])
        except msgspec.ValidationError as error:
            raise PeerError(f"{self._url} is no kvlb balancer of this release: {error}") from error
        return read[::-1]

    async def facts(self) -> Mapping[RankName, RankFacts]:
        """What is known of each rank."""
        page = await self._get("/status")
        return {
            (instance["alias"], rank["rank"]): read_facts(rank["index"])
            for instance in page.get("instances", ())
            for rank in instance["ranks"]
        }

    async def _get(self, path: str) -> Mapping[str, Any]:
        try:
            answer = await self._http.get(self._url + path)
            body = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PeerError(
                f"no balancer answers at {self._url} ({type(error).__name__}); name another "
                "with --url"
            ) from error
        except ValueError as error:
            raise PeerError(f"{self._url} is no kvlb balancer: it answered no JSON") from error
        if answer.status_code in {401, 403}:
            raise PeerError(f"{self._url}: set KVLB_ADMIN_API_KEY to its admin.api_key")
        if answer.status_code != httpx.codes.OK or not isinstance(body, Mapping):
            raise PeerError(f"{self._url}{path} answered {answer.status_code}")
        return body


class BalancerWatch:
    """Everything a balancer has finished since `begin`, as far as it was seen in time."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._balancer = _Balancer(url, http)
        self._rows: list[Row] = []
        self._seen: deque[Decision] = deque(maxlen=MOST_DECISIONS)
        self._missed = 0
        """Times when more had ended than the balancer keeps."""
        self._unanswered = 0
        self._first: Mapping[RankName, RankFacts] = {}
        self._last: Mapping[RankName, RankFacts] = {}

    async def begin(self) -> None:
        """What ended before is not ours to judge. Raises PeerError."""
        self._first = self._last = await self._balancer.facts()
        self._seen.extend(await self._balancer.decisions())

    async def look(self) -> None:
        """Judge what has ended since the last look."""
        try:
            told = await self._balancer.decisions()
            facts = await self._balancer.facts()
        except PeerError:
            self._unanswered += 1  # it restarts, perhaps; what ended meanwhile is lost
            return
        known = {_identity(each) for each in self._seen}
        new = [each for each in told if _identity(each) not in known]
        if len(new) == len(told) == MOST_DECISIONS:
            self._missed += 1
        for decision in new:
            self._rows += judge(decision, self._last, facts)
        self._seen.extend(new)
        self._last = facts

    def report(self) -> AuditReport:
        """Everything so far."""
        weighed = {
            rank: _increase(self._first.get(rank, RankFacts()), facts)
            for rank, facts in self._last.items()
        }
        rows = [
            msgspec.structs.replace(row, i=number)
            for number, row in enumerate(assign_causes(self._rows, weighed), start=1)
        ]
        events = Counter(overrun=self._missed, unanswered=self._unanswered)
        for counts in weighed.values():
            for cause, count in counts.items():
                events[f"weighed_{cause}"] += count
        return build_report(rows, +events)


def _identity(decision: Decision) -> tuple[str, float | None, float | None]:
    """Clients may send one request id twice."""
    return decision.request_id, decision.duration_s, decision.first_byte_s


def _increase(before: RankFacts, after: RankFacts) -> dict[str, int]:
    grown = {
        cause: count - before.contradictions.get(cause, 0)
        for cause, count in after.contradictions.items()
    }
    return {cause: count for cause, count in grown.items() if count > 0}
