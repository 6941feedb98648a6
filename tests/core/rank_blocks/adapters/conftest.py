"""Blocks of adapters that are loaded anew, and what the next process makes of a rank's."""

from collections.abc import Callable
from typing import Any

import pytest

from indexer.core.block_rows import BlockRow
from indexer.core.events import BlockStored
from indexer.core.index import GroupSpec
from indexer.core.types import BlockKey, EngineHash


@pytest.fixture(scope="session")
def new_rank(make_rank: Callable[..., Any]) -> Callable[[], Any]:
    """One that tells of its rows, as for an index that outlives the process."""
    return lambda: make_rank(keeps_rows=True)


@pytest.fixture
def rank(new_rank: Callable[[], Any]) -> Any:
    """A rank that holds nothing yet."""
    return new_rank()


@pytest.fixture(scope="session")
def stored(stored: Callable[..., BlockStored]) -> Callable[..., BlockStored]:
    """Blocks of the adapter, in one of its lives."""

    def store(*names: int, life: int = 1, **fields: Any) -> BlockStored:
        return stored(*names, **{"lora": "ad1", "lora_id": life, **fields})

    return store


@pytest.fixture(scope="session")
def credit(keys_of: Callable[..., list[BlockKey]]) -> Callable[..., int]:
    """Blocks of a prompt for the adapter that are held from its start, whatever their group and tier."""

    def count(rank: Any, *names: int, lora: str | None = "ad1", salt: str | None = None) -> int:
        held = {key for _, _, key in rank.shown}
        keys = keys_of(*names, lora=lora, salt=salt)
        return next((at for at, key in enumerate(keys) if key not in held), len(keys))

    return count


@pytest.fixture(scope="session")
def resumed(new_rank: Callable[[], Any]) -> Callable[[Any], Any]:
    """What the next process makes of all that a rank told."""

    def resume(rank: Any) -> Any:
        rows: dict[int, dict[EngineHash, BlockRow]] = {}
        for update in rank.updates:
            for each in update.rows:
                rows.setdefault(each.group, {}).update(
                    {row.engine_hash: row for row in each.rows()}
                )
        changes = [change for update in rank.updates for change in update.changes]
        later = new_rank()
        assert later.blocks.restore(
            [each for each in changes if isinstance(each, GroupSpec)],
            {group: list(each.values()) for group, each in rows.items()},
            rank.updates[-1].facts,
        )
        later.shown = set(rank.shown)
        return later

    return resume


@pytest.fixture(scope="session")
def adapter() -> Callable[[int], dict[str, Any]]:
    """Fields of a block of one of very many adapters."""
    return lambda number: {"lora": f"user-{number}", "life": 100 + number}
