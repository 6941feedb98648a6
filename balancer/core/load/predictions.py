"""Blocks of prompts already routed to one rank, until events confirm them.

Rules:

1. A prediction lives with its leg until the first token, then until its expiry, unless it is
   withdrawn because the leg failed. A block stays while any prediction covers it.
   It expires with time, or once so many tokens were sent after it that the rank may have evicted
   it: events that confirmed it may have been followed by events that took it back.
2. Every prediction covers its prompts from the root on. So what is predicted is prefix-closed, and
   found as `core.load.chain_tree` finds it, in the tree in which the blocks in use are, too.
3. Bounded: past `max_blocks` the oldest predictions go first, whole, whatever their state. Of those that are
   gone no more is kept than of those that live.

Cost: that of the tree, in, out and looked up: not one of blocks.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final, TypeVar

import msgspec

from balancer.core.load.chain_tree import ChainTree, Stretch
from indexer.core.types import BlockKey

_Due = TypeVar("_Due", int, float)
_FEW: Final = 64
"""So many expiries of what is gone may be kept beside as many as live."""


class Prediction(msgspec.Struct, eq=False):
    """The chains one leg will leave on its rank."""

    ends: Sequence[Stretch]
    blocks: int
    number: int


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

    def __init__(self, max_blocks: int, tree: ChainTree) -> None:
        """`tree`: where the rank's chains in use are."""
        self._max_blocks = max_blocks
        self._covered = tree
        self._live: dict[int, Prediction] = {}
        self._expiries: list[tuple[float, int]] = []
        self._pushed_out: list[tuple[int, int]] = []
        """The count of tokens sent at which each expires, beside its time."""
        self._sent_tokens = 0
        self._numbers = count()
        self.blocks = 0
        """Blocks over all predictions; one that two predictions share counts twice."""

    def add(self, chains: Sequence[Sequence[BlockKey]]) -> Prediction:
        """Count these, of a prompt each, as held until `expire` or `withdraw`."""
        ends, room = [], self._max_blocks
        for keys in chains:
            kept = keys if len(keys) <= room else keys[:room]
            ends.append(self._covered.add(kept))
            room -= len(kept)
        prediction = Prediction(ends, self._max_blocks - room, next(self._numbers))
        self._live[prediction.number] = prediction
        self.blocks += prediction.blocks
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
        most = 2 * len(self._live) + _FEW
        if len(self._expiries) > most:
            self._expiries = self._of_living(self._expiries)
        if len(self._pushed_out) > most:
            self._pushed_out = self._of_living(self._pushed_out)

    def withdraw(self, prediction: Prediction) -> None:
        """Stop counting it now. Doing so twice changes nothing."""
        if self._live.pop(prediction.number, None) is None:
            return
        self.blocks -= prediction.blocks
        for end in prediction.ends:
            self._covered.drop(end)

    def end_computed(self, before: Prediction | None = None) -> None:
        """Stop counting those whose expiry is set: what they cover was computed, and is gone.

        `before`: only those that are older than this one.
        """
        newest = inf if before is None else before.number
        for number in [number for _, number in self._expiries if number < newest]:
            self._drop(number)

    def purge(self, now_s: float) -> None:
        """Drop what has expired."""
        while self._expiries and self._expiries[0][0] <= now_s:
            self._drop(heappop(self._expiries)[1])
        while self._pushed_out and self._pushed_out[0][0] <= self._sent_tokens:
            self._drop(heappop(self._pushed_out)[1])

    @property
    def next_s(self) -> float:
        """When the next one expires by time."""
        return self._expiries[0][0] if self._expiries else inf

    def clear(self) -> None:
        """Nothing is predicted any more."""
        for each in tuple(self._live.values()):
            self.withdraw(each)
        self._expiries.clear()
        self._pushed_out.clear()

    def _of_living(self, due: list[tuple[_Due, int]]) -> list[tuple[_Due, int]]:
        kept = [each for each in due if each[1] in self._live]
        heapify(kept)
        return kept

    def _drop(self, number: int) -> None:
        prediction = self._live.get(number)
        if prediction:
            self.withdraw(prediction)
