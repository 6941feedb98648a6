"""What finished legs say of one rank: which reports are due, and what they prove when taken together.

Rules:

1. A contradiction is weighed when it comes, and again every `RETRY_S`, for `GRACE_S`, while events that
   would explain it may still be on their way.
2. Of a report's way here only the waiting is in its age, so the index was asked up to `SLACK_S` before
   the moment that the age gives. The earlier one counts: then too little is pruned, never too much.
3. Of the last `WINDOW` comparable legs, `UNSEEN_LIMIT` with blocks that were never told of, or
   `OVER_LIMIT` without the blocks promised, say so of the rank; `DIFFERS_LIMIT` that were promised what
   the tables never had say so of the index. Then counting begins anew.
4. `AGREED_NEEDED` legs in a row with the cached tokens predicted take that back. What events explain
   neither counts nor breaks the row.
5. A leg that computed a whole block makes the engine publish. If `SILENT_LEGS` of them were matched
   since the newest batch, and the first was told of `silent_after_s` ago, the stream is silent.

Cost: constant per report; at most `MAX_PENDING` wait, others are counted as overflown.
"""

from collections import Counter, deque
from enum import StrEnum
from typing import NamedTuple

from indexer.core.contradictions import Cause
from indexer.core.reports import CacheReport, RankTally, Report

RETRY_S = 0.1
GRACE_S = 0.5
SLACK_S = 0.1
WINDOW = 20
UNSEEN_LIMIT = 3
OVER_LIMIT = 5
DIFFERS_LIMIT = 3
AGREED_NEEDED = 20
SILENT_LEGS = 3
MAX_PENDING = 1024


class Evidence(StrEnum):
    """What is proved of a rank's stream and tables."""

    UNSEEN_BLOCKS = "unseen_blocks"
    """The engine has blocks that were never told of: a gap nobody noticed."""
    MISPREDICTED = "mispredicted"
    """Blocks promised were not there, again and again."""
    SILENT = "silent"
    """The engine computes, and publishes nothing."""
    INDEX_DIFFERS = "index_differs"
    """The index gives what the tables have not: it was changed by somebody else, or by a fault."""
    DOUBTED = "doubted"
    """Blocks that legs found missing make others doubtful (`core.doubts`): what is promised is less sure."""
    AGREED = "agreed"
    CONTRADICTED = "contradicted"
    """One leg was, while its rank's batches were missing: nothing by itself."""


_MAY_BE_TOLD_YET = frozenset({Cause.RECOMPUTE_UNTOLD, Cause.UNSEEN})


class Pending(NamedTuple):
    """A contradiction to be weighed."""

    report: CacheReport
    matched_s: float
    """The index was asked then, or a little later."""
    last_s: float
    """From then on its cause is the last word."""


class RankWitness:
    """One epoch of one rank. Times are monotonic."""

    def __init__(self, epoch: int, silent_after_s: float) -> None:
        self.epoch = epoch
        self.overflown = 0
        """Contradictions that came while too many were waiting."""
        self._silent_after_s = silent_after_s
        self._fresh: deque[Pending] = deque()
        self._postponed: deque[tuple[float, Pending]] = deque()
        """When each is due again."""
        self._last: deque[str] = deque(maxlen=WINDOW)
        self._agreed_in_row = 0
        self._has_agreed = False
        self._unheard: deque[tuple[float, float]] = deque()
        """When the newest of the legs was matched at the earliest, and when it was told of."""
        self._is_silence_told = False

    def hear(self, report: Report, now_s: float) -> list[Evidence]:
        """A report of this epoch has come."""
        if isinstance(report, RankTally):
            return self._hear_tally(report, now_s)
        if len(self._fresh) + len(self._postponed) >= MAX_PENDING:
            self.overflown += 1
        else:
            matched_s = now_s - report.age_s - SLACK_S
            self._fresh.append(Pending(report, matched_s, now_s + GRACE_S))
        return []

    @property
    def is_waiting(self) -> bool:
        """Something has to be weighed, or time may prove something."""
        return bool(self._fresh or self._postponed or self._unheard)

    def take_due(self, now_s: float) -> Pending | None:
        """The next report to be weighed; None: none is due."""
        if self._fresh:
            return self._fresh.popleft()
        if self._postponed and self._postponed[0][0] <= now_s:
            return self._postponed.popleft()[1]
        return None

    def postpone(
        self, pending: Pending, cause: Cause, now_s: float, *, is_unwritten: bool = False
    ) -> bool:
        """Whether it will be due again; if not, that cause is the last word.

        `is_unwritten`: the index hasn't got all that the tables have, so it is bound to differ.
        """
        is_early = is_unwritten if cause is Cause.INDEX_DIFFERS else cause in _MAY_BE_TOLD_YET
        if now_s >= pending.last_s or not is_early:
            return False
        self._postponed.append((now_s + RETRY_S, pending))
        return True

    def is_drafting(self, report: CacheReport) -> bool:
        """One block short, on a rank that never was exact."""
        return report.is_one_block_short and not self._has_agreed

    def judge(self, cause: Cause) -> list[Evidence]:
        """A contradiction was weighed."""
        if cause is Cause.UNSEEN:
            return self._count("unseen", UNSEEN_LIMIT, Evidence.UNSEEN_BLOCKS)
        if cause is Cause.INDEX_DIFFERS:
            return self._count("differs", DIFFERS_LIMIT, Evidence.INDEX_DIFFERS)
        if cause.is_over_evidence:
            return self._count("over", OVER_LIMIT, Evidence.MISPREDICTED)
        return []

    def check_silence(self, now_s: float, newest_batch_s: float | None) -> list[Evidence]:
        """Has the stream been silent for too long? Told once, until a batch comes."""
        heard_s = float("-inf") if newest_batch_s is None else newest_batch_s
        while self._unheard and self._unheard[0][0] <= heard_s:
            self._unheard.popleft()
            self._is_silence_told = False
        is_silent = (
            len(self._unheard) == SILENT_LEGS
            and now_s - self._unheard[0][1] >= self._silent_after_s
        )
        if not is_silent or self._is_silence_told:
            return []
        self._is_silence_told = True
        return [Evidence.SILENT]

    def _hear_tally(self, tally: RankTally, now_s: float) -> list[Evidence]:
        if tally.computing_legs and len(self._unheard) < SILENT_LEGS:
            matched_s = now_s - tally.age_s - SLACK_S
            room = SILENT_LEGS - len(self._unheard)
            self._unheard.extend([(matched_s, now_s)] * min(tally.computing_legs, room))
        if not tally.agreed:
            return []
        self._has_agreed = True
        self._last.extend(["agreed"] * min(tally.agreed, WINDOW))
        self._agreed_in_row += tally.agreed
        if self._agreed_in_row < AGREED_NEEDED:
            return []
        self._agreed_in_row = 0
        return [Evidence.AGREED]

    def _count(self, what: str, limit: int, evidence: Evidence) -> list[Evidence]:
        self._agreed_in_row = 0
        self._last.append(what)
        if Counter(self._last)[what] < limit:
            return []
        self._last.clear()
        return [evidence]
