"""What can go wrong between a publisher and whoever follows it, switched on by name.

Rules:

1. `every` counts batches by their number: with 3, batches 2, 5, 8, ... are affected.
2. What a subscriber gets live is decided here, what replay still has, and how it is answered. The
   cache itself never errs: a follower that copes ends up knowing exactly what is in it.

Cost: nothing while no fault is on.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec

Every = Annotated[int, msgspec.Meta(ge=1)]
Frames = list[bytes]
Batch = tuple[bytes, bytes]
"""Number and payload, as sent."""

_A_CLEAR_OF_1970 = msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}], 0])


class EventFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The faults of one engine's event streams. None and False are no fault."""

    drop_every: Every | None = None
    """Withheld from live subscribers; replay has it."""
    lose_every: Every | None = None
    """Its number is used up, and nobody ever gets it."""
    duplicate_every: Every | None = None
    """Sent twice."""
    swap_every: Every | None = None
    """Sent after the one that follows it."""
    stale_every: Every | None = None
    """Followed by an old message under number 0 that says the cache is empty."""
    malformed_every: Every | None = None
    """Preceded by messages with too few frames, a short number, and bytes that mean nothing."""
    bad_event_every: Every | None = None
    """One event more is in it, with a field of a wrong type."""
    contradiction_every: Every | None = None
    """Stores more are in it that name a hash twice, themselves as their parent, and nothing."""
    mixes_hash_forms: bool = False
    """Removals name hashes as byte strings where stores name them as numbers."""
    hides_clears: bool = False
    """A reset or sleep tells nothing."""
    hides_stores: bool = False
    """Nobody is ever told of new blocks, nor that something is missing."""
    hides_removals: bool = False
    """Nobody is ever told of blocks that went."""
    is_silent: bool = False
    """The engine works on and publishes nothing any more."""
    copies_medium: str | None = None
    """Every block is announced on this medium, too: a copy, without tokens and never removed."""
    replay: Literal["answered", "silent", "twice", "cut", "holes"] = "answered"
    """Requests get no answer; or the answer comes twice, ends in its middle without its end
    marker, or lacks every second batch."""
    replay_delay_s: float = 0.0
    """So long a replay waits, while live batches go on."""


def affects(every: int | None, seq: int) -> bool:
    """Whether a fault that befalls every `every`-th batch befalls this one."""
    return every is not None and (seq + 1) % every == 0


class FaultyWire:
    """Decides what live subscribers get of each batch."""

    def __init__(self) -> None:
        self.faults = EventFaults()
        self.dropped_batches = 0
        self._held_back: Frames | None = None

    def live(self, topic: bytes, seq: bytes, payload: bytes) -> Iterator[Frames]:
        """Messages to send when this batch is due."""
        faults, number = self.faults, int.from_bytes(seq, "big")
        message = [topic, seq, payload]
        if affects(faults.malformed_every, number):
            yield from malformed(topic)
        if affects(faults.drop_every, number) or affects(faults.lose_every, number):
            self.dropped_batches += 1
        elif affects(faults.swap_every, number) and self._held_back is None:
            self._held_back = message
            return
        else:
            yield message
        if affects(faults.duplicate_every, number):
            yield message
        if self._held_back is not None:
            held_back, self._held_back = self._held_back, None
            yield held_back
        if affects(faults.stale_every, number):
            yield [topic, bytes(8), _A_CLEAR_OF_1970]

    def is_kept(self, seq: bytes) -> bool:
        """Whether replay will have this batch."""
        return not affects(self.faults.lose_every, int.from_bytes(seq, "big"))

    def replayed(self, batches: Sequence[Batch]) -> Iterator[Batch | None]:
        """Batches of one answer in order, None for the end marker."""
        match self.faults.replay:
            case "silent":
                return
            case "cut":
                yield from batches[: (len(batches) + 1) // 2]
                return
            case "holes":
                yield from batches[::2]
            case "twice":
                yield from batches
                yield None
                yield from batches
            case _:
                yield from batches
        yield None


def malformed(topic: bytes) -> Iterator[Frames]:
    """Messages that no release sends."""
    yield [b"lonely"]
    yield [topic, bytes(8)]
    yield [topic, b"short", b"payload"]
    yield [topic, b"\xfe" * 8, b"\xc1 no msgpack"]
    yield [topic, bytes(3) + b"\xfe" * 5, b"\xc1 under a number that could come"]
