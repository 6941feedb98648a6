"""Gives sequences their blocks and remembers what the blocks hold.

Rules:

1. A hit is the longest run of known full blocks from the start that leaves at least one token to
   compute: a prompt of exactly n blocks that is wholly known hits n - 1.
2. Allocation is all or nothing. Hit blocks that nobody uses count as free ones it consumes.
3. Blocks are announced when the step that fills them is scheduled, one `BlockStored` for all that
   a step fills; blocks that arrive from another engine when they have arrived.
"""

from collections.abc import Sequence

from simulator.core.blocks import BlockPool
from simulator.core.live_request import LiveRequest
from simulator.core.types import BlockStored


class KvCache:
    """The prefix cache of one rank."""

    def __init__(self, pool: BlockPool, *, block_size: int, none_hash: bytes) -> None:
        self._pool = pool
        self._block_size = block_size
        self._none_hash = none_hash
        self.computed_s = 0.0
        """When everything announced so far has been computed: the end of the present step."""

    def find_prefix(self, live: LiveRequest) -> list[int]:
        """Return the blocks that already hold the beginning of this request."""
        limit = (len(live.tokens) - 1) // self._block_size
        live.extend_hashes(limit, self._block_size, self._none_hash)
        hit: list[int] = []
        for block_hash in live.hashes[:limit]:
            block_id = self._pool.find(block_hash)
            if block_id is None:
                break
            hit.append(block_id)
        return hit

    def count_known(self, live: LiveRequest) -> int:
        """Leading blocks of another engine's request that are cached here, under equal hashes."""
        count = 0
        for block_hash in live.hashes[: (len(live.tokens) - 1) // self._block_size]:
            if self._pool.find(block_hash) is None:
                break
            count += 1
        return count

    def allocate(self, live: LiveRequest, total_tokens: int, hit: Sequence[int] = ()) -> bool:
        """Make room for the first `total_tokens` tokens, reusing `hit`; False if there is none."""
        needed = -(-total_tokens // self._block_size) - len(live.blocks) - len(hit)
        revived = sum(map(self._pool.is_free, hit))
        if max(needed, 0) + revived > self._pool.free_blocks:
            return False
        self._pool.touch(hit)
        live.blocks.extend(hit)
        live.registered += len(hit)
        if needed > 0:
            live.blocks.extend(self._pool.take(needed))
        return True

    def announce_filled(self, live: LiveRequest, computed_tokens: int) -> None:
        """Register and announce the blocks that are full once this many tokens are computed."""
        first, full = live.registered, computed_tokens // self._block_size
        if full <= first:
            return
        live.extend_hashes(full, self._block_size, self._none_hash)
        self._pool.register(live.blocks[first:full], live.hashes[first:full])
        live.registered = full
        self._announce(live, first, full)

    def announce_reused(self, live: LiveRequest, blocks: int) -> None:
        """Announce a reused prefix once more, though no new block holds it."""
        if blocks:
            self._announce(live, 0, blocks)

    def free(self, live: LiveRequest) -> None:
        """Give all blocks back, the tail first."""
        self._pool.release(reversed(live.blocks))
        self.disown(live)

    def disown(self, live: LiveRequest) -> list[int]:
        """Take the blocks from the sequence without freeing them."""
        blocks, live.blocks = live.blocks, []
        live.registered = 0
        return blocks

    def _announce(self, live: LiveRequest, first: int, end: int) -> None:
        request, size = live.request, self._block_size
        self._pool.announce(
            BlockStored(
                hashes=tuple(live.hashes[first:end]),
                parent=live.hashes[first - 1] if first else None,
                token_ids=live.tokens[first * size : end * size].tolist(),
                block_size=size,
                extra_keys=tuple(map(live.extra_keys, range(first, end))),
                lora_id=request.lora_id,
                lora_name=request.lora_name,
                session_id=request.session_id,
            )
        )
