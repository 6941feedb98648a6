"""What a backend offers that outlives the indexer's process: `RankJournal`.

Rules:

1. A rank has one owner: the process that claimed it last. What an earlier one writes is refused.
2. `BlockIndex.apply` keeps an update's rows and facts together with its changes, as a whole.
3. What the backend lost or missed is noticed (`IndexLostError`) and written anew by `rewrite`;
   until that is complete the rank is absent from every answer.
4. A rank that isn't renewed leaves by itself when its lease ends.
5. A process that ends on purpose releases its ranks: another may own them at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from indexer.core.block_rows import BlockRow, RankFacts
from indexer.core.index import GroupSpec, RankUpdate
from indexer.core.types import RankId, Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank as its last owner left it."""

    epoch: int
    seq: int
    """Batch applied last."""
    digest: int
    """Of that batch's payload."""
    trust: Trust
    facts: RankFacts
    groups: Sequence[GroupSpec]
    rows: Mapping[int, Sequence[BlockRow]]
    """By group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a rank's stream goes on."""

    seq: int
    digest: int
    trust: Trust


class RankJournal(Protocol):
    """Tested by tests/integration/redis_index/ and tests/integration/indexer/."""

    @property
    def heartbeat_s(self) -> float:
        """How often `renew` wants to be called for each rank."""
        ...

    def writing(self) -> AbstractAsyncContextManager[None]:
        """Held while an update is written: few are on the way at a time, so lookups wait behind few.

        What waits for it grows into fewer and longer updates. Nobody waits long.
        """
        ...

    async def restore(self, rank: RankId, model: str) -> RankRecord | None:
        """Own `rank` from now on. None: nothing of it can be gone on with.

        So it is with an epoch that was opened and never got a batch.
        Raises IndexLostError if what there is can't be read: then the caller owns it all the same,
        and begins anew. Raises NotOwnerError if another process has taken it from this one and still keeps it.
        """
        ...

    async def last_epoch(self, rank: RankId, model: str) -> int:
        """Newest epoch known of a rank that this process owns; 0: none."""
        ...

    async def rewrite(self, model: str, trust: Trust, parts: Iterable[RankUpdate]) -> None:
        """Replace all that is known of a rank by these updates, which are of one epoch."""
        ...

    async def renew(self, rank: RankId) -> None:
        """Extend the lease. Raises IndexLostError if what was written last isn't there."""
        ...

    async def entries(self, rank: RankId) -> int:
        """How many keys it has of a rank, counted once per group and tier."""
        ...

    async def withdraw(self, rank: RankId) -> None:
        """Drop a rank's entries from every answer until it is rewritten."""
        ...

    async def probe(self) -> None:
        """Return if the backend answers."""
        ...

    async def release(self) -> None:
        """Own no rank any more; what is known of each stays for its next owner.

        The last call. Raises IndexUnavailableError: then the next owner waits for the lease.
        """
        ...
