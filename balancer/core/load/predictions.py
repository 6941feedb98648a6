"""Blocks of prompts already routed to one rank, until events confirm them.

Rules:

1. A prediction lives with its leg until the first token, then until its expiry, unless it is
   withdrawn because the leg failed. A block stays while any prediction covers it.
   It expires with time, or once so many tokens were sent after it that the rank may have evicted
   it: events that confirmed it may have been followed by events that took it back.
2. Keys are chained, and every prediction covers its prompts from the root on. So what is predicted
   is prefix-closed, and the end of a run is found by binary search.
3. Bounded: past `max_blocks` the oldest predictions go first, whole, whatever their state.

Cost: `core.load.key_counts` per block and prediction, in and out; a lookup is log2(blocks) of them.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from balancer.core.load.key_counts import KeyCounts
from indexer.core.types import BlockKey


class Prediction:
    """The keys one leg will leave on its rank."""

    __slots__ = ("keys", "number")

    def __init__(self, keys: Sequence[BlockKey], number: int) -> None:
        self.keys = keys
        self.number = number


class RankPredictions:
    """All predictions of one rank."""

    __slots__ = (
        "_covered",
        "_expiries",
        "_live",
        "_max_blocks",
        "_numbers",
        "_pushed_out",
        "_sent_tokens",
        "blocks",
    )

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._covered = KeyCounts()
        self._live: dict[int, Prediction] = {}
        self._expiries: list[tuple[float, int]] = []
        self._pushed_out: list[tuple[int, int]] = []
        """The count of tokens sent at which each expires, beside its time."""
        self._sent_tokens = 0
        self._numbers = count()
        self.blocks = 0
        """Blocks over all predictions; one that two predictions share counts twice."""

    def add(self, keys: Sequence[BlockKey]) -> Prediction:
        """Count `keys` as held until `expire` or `withdraw`."""
        prediction = Prediction(keys[: self._max_blocks], next(self._numbers))
        self._live[prediction.number] = prediction
        self._covered.add(prediction.keys)
        self.blocks += len(prediction.keys)
        while self.blocks > self._max_blocks:
            self.withdraw(next(iter(self._live.values())))
        return prediction

    def sent(self, tokens: int) -> None:
        """So many new tokens are on their way to the rank, and will take room there."""
        self._sent_tokens += tokens

    def expire(self, prediction: Prediction, at_s: float, *, after_tokens: int = 0) -> None:
        """Stop counting it at `at_s`, or when `after_tokens` more were sent (0: not known)."""
        heappush(self._expiries, (at_s, prediction.number))
        if after_tokens:
            heappush(self._pushed_out, (self._sent_tokens + after_tokens, prediction.number))

    def withdraw(self, prediction: Prediction) -> None:
        """Stop counting it now. Doing so twice changes nothing."""
        if self._live.pop(prediction.number, None) is None:
            return
        self.blocks -= len(prediction.keys)
        self._covered.drop(prediction.keys)

    def purge(self, now_s: float) -> None:
        """Drop what has expired."""
        while self._expiries and self._expiries[0][0] <= now_s:
            self._drop(heappop(self._expiries)[1])
        while self._pushed_out and self._pushed_out[0][0] <= self._sent_tokens:
            self._drop(heappop(self._pushed_out)[1])

    def _drop(self, number: int) -> None:
        prediction = self._live.get(number)
        if prediction:
            self.withdraw(prediction)

    def run_blocks(self, keys: Sequence[BlockKey], start: int) -> int:
        """How many of `keys` from `start` on are predicted without a gap."""
        covered = self._covered.held
        if start >= len(keys) or keys[start] not in covered:
            return 0
        if keys[-1] in covered:  # a sibling or the same prompt again: the usual case
            return len(keys) - start
        low, high = start + 1, len(keys) - 1
        while low < high:  # by hand: `bisect` with a key took twice as long
            middle = (low + high) // 2
            if keys[middle] in covered:
                low = middle + 1
            else:
                high = middle
        return low - start

    def clear(self) -> None:
        """Nothing is predicted any more."""
        self._covered.clear()
        self._live.clear()
        self._expiries.clear()
        self._pushed_out.clear()
        self.blocks = 0
