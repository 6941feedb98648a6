"""When a request asks its engine to announce again what it reuses (`kv_cache_report_mode=full`).

Rules:

1. Only for a rank that has been degraded for `interval_s`: by then a replay from the beginning has
   been tried, or is not to be had.
2. At most one request per rank in that time; none that names a session of its own.
3. Only engines from 0.30 on: they echo the session, by which the indexer tells what is announced again
   from a block more. An engine whose release isn't known yet is put down to be asked.

Cost: constant per request, and a dict entry per degraded rank.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from balancer.core.http.headers import find_header
from balancer.core.request import GenerateRequest
from balancer.core.routing.plan import Candidate
from indexer.core.pulse import SILENT
from indexer.core.reports import FULL_REPORT_SESSION
from indexer.core.types import InstanceId, RankId, Trust

_FIRST_RELEASE: Final = (0, 30)
_RELEASE: Final = re.compile(r"v?(\d+)\.(\d+)")
_NEW_RELEASE_S = 300.0
"""An engine is asked again for its release: it may have been replaced."""

SESSION_HEADER: Final = (b"x-session-id", FULL_REPORT_SESSION.encode())


class FullReports:
    """One per balancer. Times are monotonic."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.asked = 0
        """Requests that have asked for it."""
        self._degraded_s: dict[RankId, float] = {}
        self._asked_s: dict[RankId, float] = {}
        self._releases: dict[InstanceId, tuple[float, bool]] = {}
        """When it was learned, and whether the engine can do it."""
        self._unknown: dict[InstanceId, None] = {}

    def ask(self, candidate: Candidate, request: GenerateRequest, now_s: float) -> bool:
        """Whether this request, which prefills on `candidate`, is to ask for it."""
        rank = candidate.rank
        # Where its indexer has stopped nobody would hear the report.
        is_heard = candidate.trust is Trust.DEGRADED and candidate.trust_reason != SILENT
        if not self.interval_s or not is_heard:
            self._degraded_s.pop(rank, None)
            return False
        since_s = self._degraded_s.setdefault(rank, now_s)
        last_s = self._asked_s.get(rank, float("-inf"))
        if now_s - max(since_s, last_s) < self.interval_s:
            return False
        if _names_session(request) or not self._is_able(rank.instance, now_s):
            return False
        self._asked_s[rank] = now_s
        self.asked += 1
        return True

    def take_unknown(self) -> list[InstanceId]:
        """Instances whose release is wanted."""
        unknown, self._unknown = list(self._unknown), {}
        return unknown

    def learn(self, instance: InstanceId, release: str, now_s: float) -> None:
        """An engine has told its release."""
        found = _RELEASE.match(release)
        is_able = found is not None and (int(found[1]), int(found[2])) >= _FIRST_RELEASE
        self._releases[instance] = now_s, is_able

    def _is_able(self, instance: InstanceId, now_s: float) -> bool:
        learned_s, is_able = self._releases.get(instance, (float("-inf"), False))
        if now_s - learned_s > _NEW_RELEASE_S:
            self._unknown[instance] = None
            return False
        return is_able


def with_full_report(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A body that asks for it."""
    xargs = body.get("vllm_xargs")
    known = xargs if isinstance(xargs, Mapping) else {}
    return {**body, "vllm_xargs": {**known, "kv_cache_report_mode": "full"}}


def _names_session(request: GenerateRequest) -> bool:
    xargs = request.body.get("vllm_xargs")
    is_in_xargs = isinstance(xargs, Mapping) and "session_id" in xargs
    is_in_body = request.body.get("session_id") is not None
    return is_in_body or is_in_xargs or find_header(request.headers, b"x-session-id") is not None
