"""What one rank's cache is about to evict, told from what was sent there.

Engines evict what was used longest ago. So the prompts sent to a rank and the answers that came back
tell what its cache holds and in which order that leaves, without events and without an index: as well
where those live in another process.

Rules:

1. A sample of every prompt's blocks stands for all of them (`core.load.reuse`). Answers take room, too;
   their blocks have no keys that we know, so they have made-up ones.
2. It holds as much as the rank's capacity says. Until that is known it is only bounded.
3. A block is as old as the last prompt that used it.
4. What a prompt in flight brings is promised until it is computed, or withdrawn: then the room is free
   again, and what would have left for it is back where it was. What it found there counts as used.

Cost: 0.1 µs per sampled block, 0.5 µs for one that is new.
"""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from balancer.core.load.reuse import SAMPLE_TOKENS, sample_blocks
from indexer.core.types import BlockKey

MAX_SAMPLES = 8_192


class Promise(msgspec.Struct, eq=False, gc=False):
    """A sampled block that prompts in flight will leave there."""

    key: BlockKey
    legs: int


class ShadowCache:
    """Of one rank."""

    __slots__ = (
        "_answered_tokens",
        "_answers",
        "_leaving",
        "_promised",
        "_sample_tokens",
        "_used_s",
        "capacity_tokens",
    )

    def __init__(self) -> None:
        self._used_s: OrderedDict[int, float] = OrderedDict()
        """When each was used last, longest ago first."""
        self._leaving: OrderedDict[int, float] = OrderedDict()
        """What leaves for promised ones: all of it used before what stays."""
        self._promised: dict[BlockKey, Promise] = {}
        self._sample_tokens = SAMPLE_TOKENS
        self._answered_tokens = 0
        self._answers = 0
        self.capacity_tokens = 0
        """0: not known."""

    def use(self, keys: Sequence[BlockKey], block_size: int, now_s: float) -> Sequence[Promise]:
        """A prompt was sent there; `keys` are sampled. Returns what it promises."""
        self._sample_tokens = sample_blocks(block_size) * block_size
        used_s, leaving, promised, promises = self._used_s, self._leaving, self._promised, []
        for key in keys:
            found = promised.get(key)
            if found is not None:
                found.legs += 1
                promises.append(found)
            elif key not in used_s and key not in leaving:
                promised[key] = new = Promise(key, 1)
                promises.append(new)
            if leaving:
                leaving.pop(key, None)
            used_s[key] = now_s
            used_s.move_to_end(key)
        self._evict()
        return promises

    def computed(self, promises: Sequence[Promise]) -> None:
        """Of one prompt: its blocks are there."""
        promised = self._promised
        for each in promises:
            if promised.get(each.key) is each:
                del promised[each.key]
        self._evict()

    def withdraw(self, promises: Sequence[Promise]) -> None:
        """Of one prompt, which was never computed. What another one promises, too, stays."""
        for each in promises:
            each.legs -= 1
            if not each.legs and self._promised.get(each.key) is each:
                del self._promised[each.key]
                self._used_s.pop(each.key, None)
                self._leaving.pop(each.key, None)
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
        self._leaving.clear()
        self._promised.clear()

    def _evict(self) -> None:
        """Let go what no longer fits, or have back what does."""
        most = MAX_SAMPLES
        if self.capacity_tokens:
            most = min(most, max(1, self.capacity_tokens // self._sample_tokens))
        used_s, leaving = self._used_s, self._leaving
        for _ in range(len(used_s) - most):
            key, at_s = used_s.popitem(last=False)
            leaving[key] = at_s
        while leaving and len(used_s) < most:
            key, at_s = leaving.popitem()
            used_s[key] = at_s
            used_s.move_to_end(key, last=False)
        for _ in range(len(leaving) - len(self._promised)):
            leaving.popitem(last=False)
