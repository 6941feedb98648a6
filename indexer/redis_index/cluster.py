"""Which node of a Redis Cluster has which keys. Pure.

A server that is none never tells of other nodes, so nobody has to say which of both it is: the
first `MOVED` shows.
"""

from binascii import crc_hqx
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from indexer.redis_index.lane import Address

_SLOTS = 16_384


def slot_of(key: str) -> int:
    """By what stands between the braces, which is all the same for one model."""
    _, _, rest = key.partition("{")
    tag, brace, _ = rest.partition("}")
    return crc_hqx((tag if tag and brace else key).encode(), 0) % _SLOTS


class SlotTable:
    """As one node told it."""

    def __init__(self, answer: Sequence[Any] = (), asked: Address | None = None) -> None:
        """`answer` is of `CLUSTER SLOTS`; a node without a host is the one that was asked."""
        found = sorted((each[0], each[1], each[2]) for each in answer)
        self._ends = [end for _, end, _ in found]
        self._starts = [start for start, _, _ in found]
        self._nodes = [_address(node, asked) for _, _, node in found]

    @property
    def nodes(self) -> set[Address]:
        """Every primary."""
        return set(self._nodes)

    def node(self, slot: int) -> Address | None:
        """None: nobody serves it, or this is no cluster."""
        at = bisect_right(self._starts, slot) - 1
        return self._nodes[at] if at >= 0 and slot <= self._ends[at] else None


def _address(node: Sequence[Any], asked: Address | None) -> Address:
    host = (node[0] or b"").decode()
    if host in {"", "?"} and asked is not None:
        host = asked.host
    return Address(host, node[1])
