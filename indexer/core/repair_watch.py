"""How long a rank's batches have been missing, and when that is too long for it to be called exact.

Rules:

1. While a question to the replay socket is open, live batches wait, and the tables are not what the
   engine has. Healthy engines answer within milliseconds, so for `grace_s` nothing is said. Questions
   that follow each other without a pause count as one.
2. From then on the repair is overdue (`RankTrust.on_overdue`) until none is open.
3. A leg that found other blocks than promised shows that what is missing matters: no grace is left.
   Not during a rebuild, which is asked for only where trust is low already.

Cost: constant.
"""

from typing import Final

from indexer.core.replay import Purpose
from indexer.core.stream_effects import Effect
from indexer.core.trust import RankTrust

_REASONS: Final = {
    Purpose.JOIN: "joining",
    Purpose.GAP: "gap_open",
    Purpose.VERIFY: "unverified",
    Purpose.REBUILD: "rebuilding",
}


class RepairWatch:
    """One per stream. Times are monotonic."""

    def __init__(self, trust: RankTrust, grace_s: float) -> None:
        self._trust = trust
        self._grace_s = grace_s
        self._purpose: Purpose | None = None
        self._due_s = float("inf")
        """When the repair under way will be overdue; never, once that has been said."""

    def look(self, purpose: Purpose | None, now_s: float) -> list[Effect]:
        """What is asked for now, if anything is; after whatever may have changed that."""
        was, self._purpose = self._purpose, purpose
        if purpose is None:
            self._due_s = float("inf")
            return self._trust.on_repair_ended()
        if was is None:
            self._due_s = now_s + self._grace_s
        if now_s < self._due_s:
            return []
        self._due_s = float("inf")
        return self._trust.on_overdue(_REASONS[purpose])

    def on_contradicted(self) -> None:
        """A leg was. The next look tells."""
        if self._purpose not in {None, Purpose.REBUILD}:
            self._due_s = float("-inf")

    def wait_s(self, now_s: float) -> float:
        """How long until the next look is due; infinite if none is."""
        return max(0.0, self._due_s - now_s)
