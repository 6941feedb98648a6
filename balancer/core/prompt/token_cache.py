"""Remembers the tokens of prompts and of their pieces, least recently used out first, bounded in bytes.

Rules:

1. Keys are digests of everything that shapes the prompt, so a prompt is never kept in clear.
2. One entry's tokens are never changed, so they can be handed out without a copy.

Cost: O(1); four bytes per token and about `ENTRY_BYTES` per entry.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

ENTRY_BYTES = 256
"""What an entry costs beside its tokens: key, links, array header."""

Tokens = Sequence["array[int]"]
"""Packed ids, one array per prompt of the request."""


class TokenCache:
    """Not thread-safe: its owner sees to that."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, Tokens] = OrderedDict()
        self._held_bytes = 0

    def get(self, key: bytes) -> Tokens | None:
        tokens = self._entries.get(key)
        if tokens is not None:
            self._entries.move_to_end(key)
        return tokens

    def put(self, key: bytes, tokens: Tokens) -> None:
        """Remember `tokens`; one that is over the whole limit is not kept."""
        old = self._entries.pop(key, None)
        if old is not None:
            self._held_bytes -= _entry_bytes(old)
        size = _entry_bytes(tokens)
        if size > self._limit_bytes:
            return
        self._entries[key] = tokens
        self._held_bytes += size
        while self._held_bytes > self._limit_bytes:
            _, evicted = self._entries.popitem(last=False)
            self._held_bytes -= _entry_bytes(evicted)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._held_bytes = 0


def _entry_bytes(tokens: Tokens) -> int:
    return ENTRY_BYTES + sum(len(each) * each.itemsize for each in tokens)
