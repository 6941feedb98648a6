"""One rank's tables and recent batches, and reports that contradict what was predicted from them."""

from collections.abc import Callable
from typing import Any

import pytest

from indexer.core.contradictions import Weighed, weigh
from indexer.core.events import BlockRemoved, BlockStored, EventBatch
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import BlocksDropped, BlocksHeld
from indexer.core.rank_blocks import RankBlocks
from indexer.core.rank_holdings import RankHoldings
from indexer.core.recent_batches import RecentBatches
from indexer.core.reports import CacheReport
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier

SIZE = 4
RANK = RankId(InstanceId("http://e0:8000"), 0)
PROMPT = list(range(10 * SIZE))
KEYS = block_keys(root_key(Namespace(model="tiny")), pack_tokens(PROMPT), SIZE)


class Rank:
    """One rank's tables and recent batches; each batch comes a second after the last."""

    keys = KEYS

    def __init__(self, since_s: float = 0.0, **limits: Any) -> None:
        self.blocks = RankBlocks(rank=RANK, model="tiny", epoch=1)
        self.recent = RecentBatches(since_s, **limits)
        self.seq = 0

    @staticmethod
    def stored(*hashes: int, parent: int | None = None, first: int = 0, **more: Any) -> BlockStored:
        """Blocks number `first` and on of the one prompt."""
        span = PROMPT[first * SIZE : (first + len(hashes)) * SIZE]
        above = None if parent is None else EngineHash(parent)
        return BlockStored([EngineHash(each) for each in hashes], above, span, SIZE, **more)

    @staticmethod
    def branch(*hashes: int, parent: int, start: int) -> BlockStored:
        """Blocks of another prompt under a block of the first."""
        span = list(range(start, start + len(hashes) * SIZE))
        return BlockStored([EngineHash(each) for each in hashes], EngineHash(parent), span, SIZE)

    @staticmethod
    def removed(*hashes: int, tier: Tier = Tier.GPU) -> BlockRemoved:
        return BlockRemoved([EngineHash(each) for each in hashes], tier=tier)

    @property
    def held(self) -> RankHoldings:
        return RankHoldings(self.blocks)

    def batch(self, *events: Any) -> None:
        self.seq += 1
        batch = EventBatch(0.0, 0, list(events))
        self.recent.note(float(self.seq), batch)
        for change in self.blocks.apply(self.seq, batch).changes:
            if isinstance(change, BlocksDropped):
                self.recent.lose(float(self.seq), change.keys)
            elif isinstance(change, BlocksHeld):
                self.recent.gain(float(self.seq), change.keys)

    def over(self, block: int, matched_s: float) -> Weighed:
        """The engine lacked a block that was promised."""
        return self._weigh(block, matched_s, predicted_blocks=block + 2, cached_blocks=block)

    def under(self, block: int, matched_s: float = 0.5) -> Weighed:
        """The engine had a block that was not promised."""
        return self._weigh(block, matched_s, predicted_blocks=0, cached_blocks=block + 1)

    def _weigh(
        self, block: int, matched_s: float, *, predicted_blocks: int, cached_blocks: int
    ) -> Weighed:
        report = CacheReport(
            rank=RANK,
            epoch=1,
            age_s=0.0,
            block_size=SIZE,
            predicted_tokens=predicted_blocks * SIZE,
            cached_tokens=cached_blocks * SIZE,
            key=KEYS[block],
        )
        weighed = weigh(report, matched_s, self.held, self.recent)
        for event in weighed.events:
            self.blocks.apply(self.seq, EventBatch(0.0, None, [event]))
        self.recent.remove(float(self.seq), list(weighed.events))
        return weighed

    def copies(self, key: BlockKey) -> int:
        found = self.held.copies_below(key)
        return sum(each.copies for each in found if each.key == key)


@pytest.fixture(scope="session")
def new_rank() -> Callable[..., Rank]:
    """A rank that nothing was told of; `limits` are those of what it remembers."""
    return Rank


@pytest.fixture
def rank() -> Rank:
    """A rank that remembers everything."""
    return Rank()
