"""Prompts of ten blocks, and what ranks hold of them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import BlockIndex, BlocksDropped, BlocksHeld, Change, Prompt, RankUpdate
from indexer.core.types import BlockKey, RankId, Tier

SIZE = 4
TOKENS = range(1000, 1041)
"""Ten blocks of four and one token more, so that all ten may be cached."""


@pytest.fixture(scope="session")
def keys_of() -> Callable[..., Sequence[BlockKey]]:
    """Keys of the blocks of these tokens."""

    def keys(
        tokens: Sequence[int] = TOKENS, *, size: int = SIZE, **namespace: Any
    ) -> Sequence[BlockKey]:
        root = root_key(Namespace(**{"model": "tiny", **namespace}))
        return block_keys(root, pack_tokens(tokens), size)

    return keys


def _prompt(tokens: Sequence[int] = TOKENS, **namespace: Any) -> Prompt:
    return Prompt(Namespace(**{"model": "tiny", **namespace}), tokens)


@pytest.fixture(scope="session")
def prompt() -> Callable[..., Prompt]:
    """A prompt of these tokens."""
    return _prompt


@pytest.fixture(scope="session")
def update() -> Callable[..., RankUpdate]:
    """Changes of one rank."""

    def make(rank: RankId, *changes: Change, epoch: int = 1, model: str = "tiny") -> RankUpdate:
        return RankUpdate(rank=rank, model=model, epoch=epoch, seq=0, changes=changes)

    return make


@pytest.fixture(scope="session")
def held() -> Callable[..., BlocksHeld]:
    """These blocks came."""

    def change(blocks: Sequence[BlockKey], tier: Tier = Tier.GPU, group: int = 0) -> BlocksHeld:
        return BlocksHeld(group, tier, blocks)

    return change


@pytest.fixture(scope="session")
def dropped() -> Callable[..., BlocksDropped]:
    """These blocks went."""

    def change(blocks: Sequence[BlockKey], tier: Tier = Tier.GPU, group: int = 0) -> BlocksDropped:
        return BlocksDropped(group, tier, blocks)

    return change


@pytest.fixture(scope="session")
def overlap() -> Callable[..., Awaitable[dict[RankId, int]]]:
    """Tokens per rank."""

    async def ask(index: BlockIndex, of: Prompt | None = None) -> dict[RankId, int]:
        return {rank: each.tokens for rank, each in (await index.match(of or _prompt())).items()}

    return ask
