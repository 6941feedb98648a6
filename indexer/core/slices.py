"""Cuts a long batch into pieces that are applied one after the other.

Rules:

1. A piece holds at most `most_blocks` blocks. All pieces together say what the batch says, in its
   order, so between two of them the rank is as it was at some moment of the batch.
2. A store is cut into stores that chain; one that contradicts itself, or leaves blocks out, is
   left whole, so that it is refused, or understood, as a whole. So is a full report
   (`core.full_report`).
3. Only the first block of a prompt tells the salt: a piece that is not the first has a parent.

Cost: a look at each event.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import msgspec

from indexer.core.events import BlockRemoved, BlockStored, Event, EventBatch
from indexer.core.reports import FULL_REPORT_SESSION

Item = TypeVar("Item")


def slices(batch: EventBatch, most_blocks: int) -> Iterator[EventBatch]:
    """The batch in pieces; itself if it is short enough."""
    if sum(map(_blocks, batch.events)) <= most_blocks:
        yield batch
        return
    piece: list[Event] = []
    blocks = 0
    for event in batch.events:
        for part in _parts_of(event, most_blocks):
            if piece and blocks + _blocks(part) > most_blocks:
                yield EventBatch(batch.ts, batch.rank, piece)
                piece, blocks = [], 0
            piece.append(part)
            blocks += _blocks(part)
    yield EventBatch(batch.ts, batch.rank, piece)


def _blocks(event: Event) -> int:
    return 1 if event.what == "cleared" else len(event.hashes)


def _parts_of(event: Event, most_blocks: int) -> Iterator[Event]:
    if _blocks(event) <= most_blocks:
        yield event
    elif isinstance(event, BlockRemoved):
        for start in range(0, len(event.hashes), most_blocks):
            hashes = event.hashes[start : start + most_blocks]
            yield msgspec.structs.replace(event, hashes=hashes)
    elif isinstance(event, BlockStored) and _may_be_cut(event):
        size, extras = event.block_size, event.extra_keys
        for start in range(0, len(event.hashes), most_blocks):
            end = start + most_blocks
            yield msgspec.structs.replace(
                event,
                hashes=event.hashes[start:end],
                parent=event.hashes[start - 1] if start else event.parent,
                token_ids=event.token_ids[start * size : end * size],
                extra_keys=None if extras is None else extras[start:end],
            )
    else:
        yield event


def _may_be_cut(event: BlockStored) -> bool:
    """It is whole, and consistent in itself; and no full report, of which the beginning counts."""
    hashes, extras = event.hashes, event.extra_keys
    return (
        event.session_id != FULL_REPORT_SESSION
        and event.block_size > 0
        and len(event.token_ids) == len(hashes) * event.block_size
        and (extras is None or len(extras) == len(hashes))
        and len({*hashes, event.parent}) == len(hashes) + 1
    )


def parts(items: Iterable[Item], most: int) -> Iterator[list[Item]]:
    """Lists of at most `most` items each."""
    rest = iter(items)
    while part := list(islice(rest, most)):
        yield part
