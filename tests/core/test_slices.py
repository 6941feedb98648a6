"""Long batches are applied in pieces."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from indexer.core.block_rows import BlockRow
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from indexer.core.rank_blocks import RankBlocks
from indexer.core.slices import slices
from indexer.core.types import EngineHash, InstanceId, RankId

SIZE = 2


def stored(first: int, blocks: int, parent: int | None = None, **fields: object) -> BlockStored:
    hashes = [EngineHash(first + at) for at in range(blocks)]
    tokens = [100 * name + at for name in hashes for at in range(SIZE)]
    event = {
        "hashes": hashes,
        "parent": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "extra_keys": [[f"image-{name}", 0] if name % 3 == 0 else None for name in hashes],
        "kind": "full_attention",
        **fields,
    }
    return BlockStored(**event)  # type: ignore[arg-type]


def batch(*events: Event) -> EventBatch:
    return EventBatch(1.5, 0, list(events))


def sizes(pieces: Sequence[EventBatch]) -> list[list[int]]:
    return [
        [0 if isinstance(each, AllBlocksCleared) else len(each.hashes) for each in piece.events]
        for piece in pieces
    ]


def applied(batches: Sequence[EventBatch]) -> tuple[list[BlockRow], dict[str, int]]:
    """Contents of a rank that they were applied to, and what it set aside."""
    blocks = RankBlocks(
        rank=RankId(InstanceId("http://engine:8000"), 0), model="tiny", epoch=1, keeps_rows=True
    )
    for each in batches:
        blocks.apply(0, each)
    parts = list(blocks.snapshot(0, 0))
    rows = [row for part in parts for group in part.rows for row in group.rows()]
    return sorted(rows), dict(blocks.counts)


def test_short_batch_is_one_piece() -> None:
    """It is handed on as it is."""
    short = batch(stored(1, 3), BlockRemoved([EngineHash(2)]))

    assert list(slices(short, 4)) == [short]


def test_no_piece_is_longer_than_asked() -> None:
    """Events are kept together where they fit, and cut where they don't."""
    events = batch(
        stored(1, 2),
        stored(3, 7, parent=2),
        AllBlocksCleared(),
        BlockRemoved([EngineHash(at) for at in range(1, 7)]),
    )

    assert sizes(list(slices(events, 4))) == [[2], [4], [3, 0], [4], [2]]


def test_cut_store_chains() -> None:
    """Each piece hangs on the one before; only the first may be the beginning of a prompt."""
    first, second, third = (piece.events[0] for piece in slices(batch(stored(1, 5)), 2))

    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert isinstance(third, BlockStored)
    assert (first.parent, second.parent, third.parent) == (None, 2, 4)
    assert second == stored(3, 2, parent=2)
    assert third == stored(5, 1, parent=4)


def test_store_without_extra_keys_is_cut_too() -> None:
    """Releases before 0.17 have none."""
    pieces = list(slices(batch(stored(1, 4, extra_keys=None)), 3))

    assert sizes(pieces) == [[3], [1]]


def test_store_that_contradicts_itself_stays_whole() -> None:
    """Cut in pieces it would be taken for several good ones."""
    twice = [EngineHash(1), EngineHash(2), EngineHash(1), EngineHash(3)]
    odd = (
        stored(1, 4, hashes=twice),
        stored(1, 4, parent=3),
        stored(1, 4, token_ids=[1]),
        stored(1, 4, block_size=0),
        stored(1, 4, extra_keys=[None]),
    )

    for event in odd:
        assert list(slices(batch(event, event), 3)) == [batch(event), batch(event)]


events = st.lists(
    # A hash names a whole prefix: block 5 always follows block 4.
    st.builds(
        lambda first, blocks: stored(first, blocks, first - 1 or None), *[st.integers(1, 9)] * 2
    )
    | st.builds(BlockRemoved, st.lists(st.integers(1, 12).map(EngineHash), min_size=1, max_size=9))
    | st.just(AllBlocksCleared()),
    max_size=8,
)


@given(events, st.integers(1, 6))
def test_pieces_say_what_the_batch_says(events: list[Event], most_blocks: int) -> None:
    """Whatever is cut where, the rank ends up the same."""
    whole = batch(*events)

    assert applied(list(slices(whole, most_blocks))) == applied([whole])
