"""Watches a running balancer for some minutes: every finished request, judged as it ends.

Where the index is another process's, that one is asked what it knows of each rank, if it is named.
"""

import asyncio
import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from balancer.fleet.engine_sockets import tls_context
from kvlb.audit.live_rules import (
    DIFFERING,
    Decision,
    RankFacts,
    RankName,
    assign_causes,
    judge,
    read_facts,
)
from kvlb.audit.report import AuditReport, Row, Verdict, build_report
from kvlb.errors import PeerError

MOST_DECISIONS = 1000
"""What a balancer keeps, and what it tells at once."""
INTERVAL_S = 1.0
WEIGHING_S = 1.0
"""As long it takes at most until an indexer has weighed what a leg showed: it waits for events."""
TIMEOUT_S = 10.0


async def watch_balancer(
    url: str,
    *,
    minutes: float,
    stopped: asyncio.Event,
    interval_s: float = INTERVAL_S,
    indexer: str | None = None,
) -> AuditReport:
    """Sample until the minutes are over or `stopped` is set. Raises PeerError.

    `indexer` is the address of its status, if the index is another process's.
    """
    key = os.environ.get("KVLB_ADMIN_API_KEY")
    headers = {"X-API-Key": key} if key else {}
    async with httpx.AsyncClient(
        trust_env=False, verify=tls_context(), timeout=TIMEOUT_S, headers=headers
    ) as http:
        watch = BalancerWatch(url, http, indexer)
        await watch.begin()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 60 * minutes
        while not stopped.is_set() and (left_s := end_s - loop.time()) > 0:
            await _pause(stopped, min(left_s, interval_s))
            await watch.look()
        await watch.look()
        if watch.has_differences:
            await asyncio.sleep(WEIGHING_S)
            await watch.learn()
        return watch.report()


async def _pause(stopped: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopped.wait()
    except TimeoutError:
        return


class _Pages:
    """What is read of a balancer, and of the process that has its index."""

    def __init__(self, url: str, http: httpx.AsyncClient, indexer: str | None) -> None:
        self._url = url
        self._http = http
        self._indexer = indexer

    async def decisions(self) -> Sequence[Decision]:
        """Finished requests, oldest first."""
        page = await self._get(self._url, f"/explain/recent?limit={MOST_DECISIONS}")
        try:
            read = msgspec.convert(page.get("decisions"), list[Decision])
        except msgspec.ValidationError as error:
            raise PeerError(f"{self._url} is no kvlb balancer of this release: {error}") from error
        return read[::-1]

    async def facts(self) -> Mapping[RankName, RankFacts]:
        """What is known of each rank."""
        if self._indexer is not None:
            return await self._told_by(self._indexer)
        page = await self._get(self._url, "/status")
        return {
            (instance["alias"], rank["rank"]): read_facts(rank["index"])
            for instance in page.get("instances", ())
            for rank in instance["ranks"]
        }

    async def _told_by(self, indexer: str) -> Mapping[RankName, RankFacts]:
        ranks = (await self._get(indexer, "/status")).get("ranks")
        if not isinstance(ranks, list):
            raise PeerError(f"{indexer} is no kvlb indexer; name another with --indexer")
        # The rank's name is a pair: its instance's address and its number.
        return {(shown["alias"], shown["rank"][1]): read_facts(shown) for shown in ranks}

    async def _get(self, url: str, path: str) -> Mapping[str, Any]:
        what, option = ("balancer", "--url") if url == self._url else ("indexer", "--indexer")
        try:
            answer = await self._http.get(url + path)
            body = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PeerError(
                f"no {what} answers at {url} ({type(error).__name__}); name another with {option}"
            ) from error
        except ValueError as error:
            raise PeerError(f"{url} is no kvlb {what}: it answered no JSON") from error
        if answer.status_code in {401, 403}:
            raise PeerError(f"{url}: set KVLB_ADMIN_API_KEY to its admin.api_key")
        if answer.status_code != httpx.codes.OK or not isinstance(body, Mapping):
            raise PeerError(f"{url}{path} answered {answer.status_code}")
        return body


class BalancerWatch:
    """Everything a balancer has finished since `begin`, as far as it was seen in time."""

    def __init__(self, url: str, http: httpx.AsyncClient, indexer: str | None = None) -> None:
        self._pages = _Pages(url, http, indexer)
        self._rows: list[Row] = []
        self._seen: deque[Decision] = deque(maxlen=MOST_DECISIONS)
        self._missed = 0
        """Times when more had ended than the balancer keeps."""
        self._unanswered = 0
        self._first: Mapping[RankName, RankFacts] = {}
        self._last: Mapping[RankName, RankFacts] = {}

    async def begin(self) -> None:
        """What ended before is not ours to judge. Raises PeerError."""
        self._first = self._last = await self._pages.facts()
        self._seen.extend(await self._pages.decisions())

    async def look(self) -> None:
        """Judge what has ended since the last look."""
        try:
            told = await self._pages.decisions()
            facts = await self._pages.facts()
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

    @property
    def has_differences(self) -> bool:
        """Whether there is anything that an indexer may still have to weigh."""
        return any(row.verdict in DIFFERING for row in self._rows)

    async def learn(self) -> None:
        """Ask once more what is known of the ranks, for what was seen already."""
        try:
            self._last = await self._pages.facts()
        except PeerError:
            self._unanswered += 1

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
        events["index_elsewhere"] = sum(self._is_untold(row) for row in rows)
        for counts in weighed.values():
            for cause, count in counts.items():
                events[f"weighed_{cause}"] += count
        return build_report(rows, +events)

    def _is_untold(self, row: Row) -> bool:
        """Whether a difference has no cause since nobody told us what the indexer made of it."""
        facts = self._last.get((row.src, row.rank or 0), RankFacts())
        return row.verdict is Verdict.UNEXPLAINED and facts.contradictions is None


def _identity(decision: Decision) -> tuple[str, float | None, float | None]:
    """Clients may send one request id twice."""
    return decision.request_id, decision.duration_s, decision.first_byte_s


def _increase(before: RankFacts, after: RankFacts) -> dict[str, int]:
    known = before.contradictions or {}
    grown = {
        cause: count - known.get(cause, 0) for cause, count in (after.contradictions or {}).items()
    }
    return {cause: count for cause, count in grown.items() if count > 0}
