"""One line per event or incident of an engine's stream, for people or as JSON.

Rules:

1. Counts, never contents: no token ids, hashes, salts or adapter names.
2. A removal names hashes only; its tokens are told from the block size that stores of its group
   announced, and left out while none was seen.
3. Every kind of effect has a name here, or is left out on purpose.

Cost: some microseconds per event.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, assert_never

from indexer.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)
from indexer.core.stream_effects import (
    ApplyBatch,
    Dropped,
    Effect,
    GapLost,
    GapOpened,
    GapRepaired,
    OpenEpoch,
    ReplayEnded,
    RequestReplay,
    TrustChanged,
)

Line = Mapping[str, Any]
"""What happened, as JSON values; `what` is always there."""

EFFECTS: Mapping[type[Effect], str | None] = {
    ApplyBatch: None,
    Dropped: "dropped",
    GapOpened: "gap",
    GapRepaired: "repaired",
    GapLost: "lost",
    RequestReplay: "replay",
    ReplayEnded: "replay_ended",
    OpenEpoch: "epoch",
    TrustChanged: "trust",
}
"""What each effect is called on a line; None: its events have lines of their own."""

WORDS = {"waiting": "waiting for a publisher at"}
"""What people read where the name alone would be too short."""

QUIET_REPLAYS = frozenset({"answered", "empty"})
"""Replays that ended as they should."""


class EventLines:
    """Describes batches and effects of one engine; remembers block sizes."""

    def __init__(self) -> None:
        self._block_sizes: dict[tuple[int, int], int] = {}

    def describe_batch(
        self, rank: int, seq: int, batch: EventBatch, *, replayed: bool
    ) -> Iterator[Line]:
        """One line per event, and one per event that could not be decoded."""
        for event in batch.events:
            line = {"what": "", "seq": seq, "rank": rank, **self._describe(rank, event)}
            yield {**line, "replayed": True} if replayed else line
        for reason in batch.rejected:
            yield {"what": "rejected", "seq": seq, "rank": rank, "reason": reason}

    def describe_effect(self, rank: int, effect: Effect) -> Line | None:
        """A gap, a replay, a restart, a change of trust; None for what has its own lines."""
        what = EFFECTS[type(effect)]
        if what is None or (isinstance(effect, ReplayEnded) and effect.outcome in QUIET_REPLAYS):
            return None
        facts = {name: value for name, value in asdict(effect).items() if name != "ticket"}
        return {"what": what, "rank": rank, **facts}

    def _describe(self, rank: int, event: Event) -> dict[str, Any]:
        match event:
            case BlockStored():
                if event.block_size:
                    self._block_sizes[rank, event.group] = event.block_size
                return {
                    "what": "stored",
                    "tokens": len(event.token_ids),
                    "blocks": len(event.hashes),
                    "tier": event.tier.value,
                    "group": event.group,
                    "lora": event.lora is not None,
                    "root": event.parent is None,
                }
            case BlockRemoved():
                size = self._block_sizes.get((rank, event.group))
                return {
                    "what": "removed",
                    "tokens": len(event.hashes) * size if size else None,
                    "blocks": len(event.hashes),
                    "tier": event.tier.value,
                    "group": event.group,
                }
            case AllBlocksCleared():
                return {"what": "cleared"}
            case _:
                assert_never(event)


def render_line(line: Line) -> str:
    """`line` for people."""
    what = str(line["what"])
    if what in {"stored", "removed", "cleared", "rejected", "dropped"}:
        return f"seq {line['seq']:<6} rank {line['rank']}  {what:<8} {_details(line)}".rstrip()
    return f"{'---':<10} rank {line['rank']}  {WORDS.get(what, what)} {_incident(line)}".rstrip()


def _details(line: Line) -> str:
    if "blocks" not in line:
        return str(line.get("reason", ""))
    tokens = "? tokens" if line["tokens"] is None else _count(line["tokens"], "token")
    words = [f"{tokens:<12} {_count(line['blocks'], 'block'):<11} {line['tier']}"]
    if line["group"]:
        words.append(f"group {line['group']}")
    words += [name for name in ("lora", "root", "replayed") if line.get(name)]
    return "  ".join(words)


def _incident(line: Line) -> str:
    if "last_seq" in line:
        return f"{line['first_seq']}..{line['last_seq']}"
    if "from_seq" in line:
        return f"{line['from_seq']}.."
    return " ".join(
        str(line[name])
        for name in ("endpoint", "hint", "trust", "reason", "outcome")
        if name in line
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
