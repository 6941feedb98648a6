"""Stores what an event tells; of what a request of ours has had announced again, no copy more.

Rules:

1. A request of `FULL_REPORT_SESSION` makes its engine announce the prefix that it reuses, from the root
   on, and then what it computes below, like any other. So what begins at the root is there at least
   once, and what has a parent is one copy more.
2. If nothing was reused, what begins at the root was computed: one copy, and none before it.
"""

from collections.abc import Sequence
from typing import Protocol

from indexer.core.events import BlockStored
from indexer.core.reports import FULL_REPORT_SESSION
from indexer.core.types import EngineHash


class StoringGroup(Protocol):
    """What is asked of a group: `core.full_group`, `core.window_group`."""

    def has_copy(self, engine_hash: EngineHash, tier: int) -> bool:
        """Whether a removal would find one."""
        ...

    def store(self, event: BlockStored, tier: int) -> None: ...
    def remove(self, hashes: Sequence[EngineHash], tier: int) -> None: ...


def store_of_session(group: StoringGroup, event: BlockStored, tier: int) -> None:
    """Have `group` take in an event with tokens, and with a session."""
    if event.session_id != FULL_REPORT_SESSION or event.parent is not None:
        group.store(event, tier)
        return
    known = [each for each in event.hashes if group.has_copy(each, tier)]
    group.store(event, tier)
    group.remove(known, tier)
