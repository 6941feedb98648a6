"""What a writing process knows of one rank's place in Redis. A value that its writer changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from indexer.core.block_rows import RankFacts
from indexer.core.index import RankUpdate, StaleEpochError
from indexer.core.types import Trust
from indexer.redis_index.keys import RankKeys
from indexer.redis_index.packing import tiers_in
from indexer.redis_index.program import Groups, keys_of_group


@dataclass(slots=True, eq=False, kw_only=True)
class Home:
    """What this process knows of a rank's place in Redis."""

    model: str
    keys: RankKeys
    owner: bytes
    epoch: int
    """0: no epoch was ever opened."""
    seq: bytes
    """Batch that Redis should have last; other words while the rank is rewritten."""
    told: tuple[Trust, str]
    """How far it can be believed, and why not wholly."""
    groups: Groups = field(default_factory=dict)
    clears: int = 0
    """As the table of ranks says."""
    is_whole: bool = True
    is_spoilt: bool = False
    """What was found of it when it was claimed could not be ours."""
    description: bytes = b""
    """What the table of ranks should say of it."""
    record: Sequence[bytes | None] = ()
    """Digest and facts, as found when it was claimed or written last."""
    facts: RankFacts | None = None
    """Whose words those are, if this process wrote them."""

    def check_epoch(self, update: RankUpdate) -> None:
        """Raise StaleEpochError for an update of an epoch that has ended."""
        if update.epoch < self.epoch:
            raise StaleEpochError(f"epoch {update.epoch} ended; {self.epoch} is current")

    def data_keys(self) -> list[str]:
        """Every key the present epoch can have, beside life and state."""
        return [
            key
            for entry in self.groups.values()
            for key in keys_of_group(self.keys, self.epoch, entry)
        ]

    def set_keys(self) -> list[str]:
        """Keys of the sets that have ever had a block."""
        return [
            self.keys.blocks(self.epoch, entry.group, entry.block_size, tier)
            for entry in self.groups.values()
            for tier, _ in tiers_in(entry.tiers)
        ]
