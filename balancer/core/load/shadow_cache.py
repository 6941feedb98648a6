"""What one rank's cache is about to evict, told from what was sent there.

Engines evict what was used longest ago. So the prompts sent to a rank and the answers that came back
tell what its cache holds and in which order that leaves, without events and without an index: as well
where those live in another process.

Rules:

1. A sample of every prompt's blocks stands for all of them (`core.load.reuse`). Answers take room, too;
   their blocks have no keys that we know, so they have made-up ones.
2. It holds as much as the rank's capacity says. Until that is known it is only bounded.
3. A block is as old as the last prompt that used it.

Cost: 0.15 µs per sampled block.
"""

from collections import OrderedDict
from collections.abc import Sequence

from balancer.core.load.reuse import SAMPLE_TOKENS, sample_blocks
from indexer.core.types import BlockKey

MAX_SAMPLES = 8_192


class ShadowCache:
    """Of one rank."""

    __slots__ = ("_answered_tokens", "_answers", "_sample_tokens", "_used_s", "capacity_tokens")

    def __init__(self) -> None:
        self._used_s: OrderedDict[int, float] = OrderedDict()
        """When each was used last, longest ago first."""
        self._sample_tokens = SAMPLE_TOKENS
        self._answered_tokens = 0
        self._answers = 0
        self.capacity_tokens = 0
        """0: not known."""

    def use(self, keys: Sequence[BlockKey], block_size: int, now_s: float) -> None:
        """A prompt was sent there; `keys` are sampled."""
        self._sample_tokens = sample_blocks(block_size) * block_size
        used_s = self._used_s
        for key in keys:
            used_s[key] = now_s
            used_s.move_to_end(key)
        self._evict()

    def answer(self, tokens: int, now_s: float) -> None:
        """So many tokens were generated."""
        self._answered_tokens += tokens
        while self._answered_tokens >= self._sample_tokens:
            self._answered_tokens -= self._sample_tokens
            self._answers -= 1  # below any key
            self._used_s[self._answers] = now_s
        self._evict()

    @property
    def free_tokens(self) -> float:
        """Room in which nothing lies; 0 if the capacity isn't known."""
        return max(0.0, self.capacity_tokens - len(self._used_s) * self._sample_tokens)

    def oldest_s(self, now_s: float) -> float:
        """How long nobody has used what leaves next."""
        return now_s - next(iter(self._used_s.values()), now_s)

    def clear(self) -> None:
        """Nothing is there any more."""
        self._used_s.clear()

    def _evict(self) -> None:
        most = MAX_SAMPLES
        if self.capacity_tokens:
            most = min(most, max(1, self.capacity_tokens // self._sample_tokens))
        for _ in range(len(self._used_s) - most):
            self._used_s.popitem(last=False)
