"""What the index last said of each rank, kept for the times when it doesn't answer.

Rules:

1. Only ranks of the fleet are remembered; what the index says of others is counted and dropped.
2. Another epoch than last time means that the rank restarted, another number of clears that its cache
   was emptied: whoever asked is told, once.
3. A rank that the index is without is not shown, and nothing is believed of it. Its block size and
   epoch stay, for predictions, and to notice that it restarted.
4. The last block size outlives an epoch: it is the best guess until the rank stores again.

Cost: a few dictionary operations per rank and lookup, and one look at all of them per snapshot of the fleet.
"""

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from indexer.core.index import PrefixMatch
from indexer.core.pulse import SILENT
from indexer.core.types import RankId, Trust


class Voided(NamedTuple):
    """Ranks of which something that was known before is void now."""

    restarted: list[RankId]
    emptied: list[RankId]
    """Their cache was told to be empty; all else goes on."""


class KnownRanks:
    """One per router. The mappings are live views for reading."""

    def __init__(self) -> None:
        self.block_sizes: dict[RankId, int] = {}
        self.trusts: dict[RankId, Trust] = {}
        self.reasons: dict[RankId, str] = {}
        """Why those that aren't exact aren't, where somebody said."""
        self.unknown = 0
        """Ranks that the fleet doesn't have, summed over lookups."""
        self._epochs: dict[RankId, int] = {}
        self._clears: dict[RankId, int] = {}
        """In that epoch."""
        self._missed: set[RankId] = set()
        self._fleet: Set[RankId] = frozenset()
        """As of the last answer."""

    def learn(self, fleet: Set[RankId], answer: Mapping[RankId, PrefixMatch]) -> Voided:
        """Take in one answer of the index; return what was void since the last one."""
        voided = Voided([], [])
        for rank, match in answer.items():
            if rank not in fleet:
                self.unknown += 1
                continue
            self._compare(rank, match, voided)
            self._missed.discard(rank)
            self.trusts[rank] = match.trust
            if match.reason is not None:
                self.reasons[rank] = match.reason
            elif self.reasons:
                self.reasons.pop(rank, None)
            if match.block_size is not None:
                self.block_sizes[rank] = match.block_size
        if fleet is not self._fleet:
            self._keep_only(fleet)
        return voided

    def _compare(self, rank: RankId, match: PrefixMatch, voided: Voided) -> None:
        if self._epochs.get(rank, match.epoch) != match.epoch:
            voided.restarted.append(rank)
        elif self._clears.get(rank, match.clears) != match.clears:
            voided.emptied.append(rank)
        self._epochs[rank] = match.epoch
        self._clears[rank] = match.clears

    @property
    def silent(self) -> int:
        """Ranks whose trust is lower than was written: their indexer has stopped."""
        return sum(reason == SILENT for reason in self.reasons.values())

    def miss(self, ranks: Set[RankId]) -> None:
        """The index answered without them."""
        self._missed |= ranks
        for rank in ranks & self.trusts.keys():
            del self.trusts[rank]
            self.reasons.pop(rank, None)

    def _keep_only(self, fleet: Set[RankId]) -> None:
        self._fleet = fleet
        for rank in self._epochs.keys() - fleet:
            del self._epochs[rank], self._clears[rank]
            self.trusts.pop(rank, None)
            self.reasons.pop(rank, None)
            self.block_sizes.pop(rank, None)
        self._missed &= fleet

    def facts(self) -> Mapping[RankId, Mapping[str, Any]]:
        """What to show of each rank where no indexer can be asked: JSON values."""
        return {
            rank: {
                "trust": self.trusts[rank].value,
                "epoch": epoch,
                "block_size": self.block_sizes.get(rank),
            }
            for rank, epoch in self._epochs.items()
            if rank not in self._missed
        }
