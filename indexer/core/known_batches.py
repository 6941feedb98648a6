"""What one life of a publisher has shown so far: batches that wait, and digests of the applied.

Rules:

1. `held` has only numbers that were not applied. `newest` is the highest number, held or applied.
2. A full ring of digests forgets the oldest number. Forgotten is not "different":
   `is_duplicate` and `contradicts` both say no.

Cost: one digest per applied batch, 0.1 µs per KB; 16 bytes per slot of the ring.
"""

from array import array

from xxhash import xxh3_64_intdigest

_EMPTY = 2**64 - 1


def payload_digest(payload: bytes) -> int:
    """What stands for a payload once it was applied."""
    return xxh3_64_intdigest(payload)


class KnownBatches:
    """Payload by sequence number: whole while it waits, as a digest once it was applied."""

    __slots__ = ("_digests", "_first", "_seqs", "_slots", "held", "newest", "newest_payload")

    def __init__(self, slots: int = 4096) -> None:
        self.held: dict[int, bytes] = {}
        self.newest = -1
        self.newest_payload = b""
        self._slots = slots
        self._first = 0
        """Number that was seen first."""
        self._seqs = array("Q", [_EMPTY]) * slots
        self._digests = array("Q", [0]) * slots

    def hold(self, seq: int, payload: bytes) -> None:
        """`payload` waits for its turn."""
        self.held[seq] = payload
        self._see(seq, payload)

    def applied(self, seq: int, payload: bytes) -> None:
        """`payload` has had its turn."""
        slot = seq % self._slots
        self._seqs[slot] = seq
        self._digests[slot] = payload_digest(payload)
        self._see(seq, payload)

    def remember(self, seq: int, digest: int) -> None:
        """A payload of this digest had its turn in an earlier process."""
        slot = seq % self._slots
        self._seqs[slot] = seq
        self._digests[slot] = digest
        self._see(seq, b"")

    def is_duplicate(self, seq: int, payload: bytes) -> bool:
        """This is, byte for byte, what is known under this number."""
        return self._same(seq, payload) is True

    def contradicts(self, seq: int, payload: bytes) -> bool:
        """Something else is known under this number."""
        return self._same(seq, payload) is False

    def lacks(self, seq: int) -> bool:
        """Nothing came under this number, though an earlier and a later one did."""
        is_remembered = max(self._first, self.newest - self._slots) < seq < self.newest
        return is_remembered and self._same(seq, b"") is None

    def first_held_or(self, seq: int) -> int:
        """The lowest number held, or `seq` if that is lower."""
        return min(seq, min(self.held, default=seq))

    def _same(self, seq: int, payload: bytes) -> bool | None:
        held = self.held.get(seq)
        if held is not None:
            return held == payload
        slot = seq % self._slots
        if self._seqs[slot] != seq:
            return None
        # 64 bits: a restart is taken for a duplicate once in 2**64 times.
        return self._digests[slot] == payload_digest(payload)

    def _see(self, seq: int, payload: bytes) -> None:
        if self.newest < 0:
            self._first = seq
        if seq >= self.newest:
            self.newest, self.newest_payload = seq, payload
