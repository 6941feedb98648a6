"""What `core.stream` asks of its shell, and what it tells it; and what the shell tells back.

Effects are performed in order.

`Effect` is closed: consumers match every case and end in `assert_never`.
"""

from dataclasses import dataclass

from indexer.core.types import Trust


@dataclass(frozen=True, slots=True)
class ApplyBatch:
    """Decode this batch and apply it to the index."""

    seq: int
    payload: bytes
    replayed: bool = False
    """It waited or came by replay, so its age says nothing about the live path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """What applying one batch showed. The shell hands it back after each `ApplyBatch`."""

    is_cleared: bool = False
    """It said that the cache is empty."""
    has_refusals: bool = False
    """Something of it could not be read, or not be used (`core.refusals`)."""
    is_bound_hit: bool = False
    """Blocks had to leave for it though the engine has them (`core.bound`)."""
    is_unfollowed: bool = False
    """What the engine stores is refused for its group (`core.rank_groups`)."""
    orphans: int = 0
    """Blocks that wait for their parent now."""


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask the replay socket from `from_seq` on; hand `ticket` back with every answer.

    It replaces any request before it: answers to an older ticket are ignored.
    """

    from_seq: int
    ticket: int


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """The cache behind this stream begins anew: nothing of the old epoch counts."""

    reason: str


@dataclass(frozen=True, slots=True)
class TrustChanged:
    """From here on the rank's entries can be believed this far."""

    trust: Trust
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A message was not applied, on purpose."""

    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class GapOpened:
    """Numbers `first_seq` to `last_seq` are missing; later ones wait."""

    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class GapRepaired:
    """Everything up to `last_seq` was applied after all, in order."""

    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class GapLost:
    """Numbers `first_seq` to `last_seq` will never come."""

    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class ReplayEnded:
    """One replay is over. `outcome`: answered, empty, cut, silent, contradicted or abandoned."""

    outcome: str


Effect = (
    ApplyBatch
    | RequestReplay
    | OpenEpoch
    | TrustChanged
    | Dropped
    | GapOpened
    | GapRepaired
    | GapLost
    | ReplayEnded
)
