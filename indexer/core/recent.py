"""Remembers the digests of the newest applied payloads, to know a batch when it comes again.

Invariant: a slot is believed only for the number stored with it. A full ring forgets the oldest
number; `matches` then says None, which is not "different".

Cost: 16 bytes per slot; 0.1 µs per KB of payload.
"""

from array import array

from xxhash import xxh3_64_intdigest

_EMPTY = 2**64 - 1


class RecentPayloads:
    """Digest by sequence number, for the newest `slots` numbers."""

    __slots__ = ("_digests", "_seqs", "_slots")

    def __init__(self, slots: int = 4096) -> None:
        self._slots = slots
        self._seqs = array("Q", [_EMPTY]) * slots
        self._digests = array("Q", [0]) * slots

    def remember(self, seq: int, payload: bytes) -> None:
        slot = seq % self._slots
        self._seqs[slot] = seq
        self._digests[slot] = xxh3_64_intdigest(payload)

    def matches(self, seq: int, payload: bytes) -> bool | None:
        """Is `payload` what was applied as `seq`? None: not remembered.

        64 bits: a collision takes a restart for a duplicate once in 2**64 tries.
        """
        slot = seq % self._slots
        if self._seqs[slot] != seq:
            return None
        return self._digests[slot] == xxh3_64_intdigest(payload)

    def forget_all(self) -> None:
        self._seqs = array("Q", [_EMPTY]) * self._slots
