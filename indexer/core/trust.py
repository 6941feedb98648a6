"""How far one rank's entries can be believed, why, and the way back.

Rules:

1. A change is reported once; a second reason for the same level changes nothing.
2. A loss is healed by a clear only if the clear came after it.

Cost: constant.
"""

from indexer.core.stream_effects import Effect, TrustChanged
from indexer.core.types import Trust


class RankTrust:
    """Trust of one rank. It starts with nothing known."""

    def __init__(self) -> None:
        self.level = Trust.LOAD_ONLY
        self.reason = "no_events_yet"
        self._impaired_at = 0
        """First number after the newest loss."""

    def set(self, level: Trust, reason: str) -> list[Effect]:
        if level is self.level:
            return []
        self.level, self.reason = level, reason
        return [TrustChanged(level, reason)]

    @property
    def is_healed_by_replay(self) -> bool:
        """What could not be read once can't be read again; anything else is worth a replay."""
        return self.level is Trust.DEGRADED and self.reason != "events_rejected"

    def degrade(self, reason: str, *, at: int) -> list[Effect]:
        """Something before number `at` was lost or can't be proved."""
        self._impaired_at = at
        return self.set(Trust.DEGRADED, reason)

    def on_cleared(self, seq: int) -> list[Effect]:
        """Batch `seq` said that the cache is empty: no older loss matters any more."""
        if self.level is Trust.DEGRADED and seq >= self._impaired_at:
            return self.set(Trust.EXACT, "cleared")
        return []
