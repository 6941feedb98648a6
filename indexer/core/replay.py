"""One question to a publisher's replay socket: why it is asked, and what may be concluded.

Rules:

1. Answers come in ascending order from the first number asked for that is still buffered.
2. An empty answer to `knows_more` contradicts what was seen: another process gave it.

Cost: constant.
"""

from dataclasses import dataclass
from enum import Enum, auto

from indexer.core.stream_effects import ReplayEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """When to stop waiting and asking."""

    max_held_batches: int = 20_000
    """Live batches that may wait for a replay: twice vLLM's default ring."""
    max_asks: int = 6
    """Replays in a row that may leave a hole or a contradiction."""
    max_silences: int = 2
    """Replays in a row that may go unanswered."""


class Purpose(Enum):
    """Why a replay is asked for."""

    JOIN = auto()
    """Learn a life from its beginning."""
    GAP = auto()
    """Get what is missing from the next number on."""
    VERIFY = auto()
    """See the last applied batch again."""
    REBUILD = auto()
    """Start over, if the beginning can still be had."""


@dataclass(slots=True, kw_only=True)
class Replay:
    """A replay under way."""

    ticket: int
    purpose: Purpose
    from_seq: int
    knows_more: bool
    """A number at or above `from_seq` is known to exist."""
    first_seq: int | None = None

    @property
    def is_contradicted_by_silence(self) -> bool:
        """An end without a batch shows that another process answered."""
        return self.first_seq is None and self.knows_more and self.purpose is not Purpose.JOIN

    def ended(self) -> ReplayEnded:
        """How it ended, given that its end marker came."""
        if self.first_seq is None:
            return ReplayEnded("empty")
        return ReplayEnded("rolled_over" if self.first_seq > self.from_seq else "answered")
