"""What a KV-cache group is, from the first event that tells of it.

Rules:

1. vLLM names kinds since 0.22. Kinds that aren't known here are not followed.
2. Before that, a group is taken for full attention; `core.rank_blocks` sees whether it stays so.
"""

from typing import Final

from indexer.core.events import BlockStored
from indexer.core.index import GroupKind, GroupSpec

_KIND_OF: Final = {
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.WINDOW,
    "sliding_window_mla": GroupKind.WINDOW,
    "mamba": GroupKind.STATE,
}


def spec_of(event: BlockStored) -> GroupSpec | None:
    """Describe the group; None: of a kind that isn't followed."""
    kind = _KIND_OF.get(event.kind) if event.kind else GroupKind.FULL
    if kind is None:
        return None
    return GroupSpec(
        group=event.group,
        kind=kind,
        block_size=event.block_size,
        window_tokens=event.window_tokens if kind is GroupKind.WINDOW else None,
    )


def is_aligned(event: BlockStored) -> bool:
    """Whether its tokens fill its hashes exactly: no block was left out."""
    return len(event.token_ids) == len(event.hashes) * event.block_size
