"""What a name stands for, lookup after lookup. Pure.

Rules:

1. A lookup is whole: what it lists is all there is, nothing is kept from before.
2. One that fails changes nothing. A name that nobody knows may be a moment's fault of the resolver:
   it stands for nothing after `MISSING_AFTER` such answers in a row.
3. A name has moved when none of the addresses of the last move's time is left. One more or one less
   is no move: who was reached before may still be.

Cost: constant per lookup.
"""

MISSING_AFTER = 3


class NamedPlaces:
    """One name."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        """As listed last, in order."""
        self._basis: frozenset[str] = frozenset()
        """Who may be connected to."""
        self._missing = 0

    def found(self, addresses: frozenset[str]) -> bool:
        """Take a list, which isn't empty; True if the name has moved."""
        self._missing = 0
        self.addresses = tuple(sorted(addresses))
        if not self._basis.isdisjoint(addresses):
            return False
        has_moved = bool(self._basis)
        self._basis = addresses
        return has_moved

    def unknown(self) -> None:
        """Nobody knows the name."""
        self._missing += 1
        if self._missing >= MISSING_AFTER:
            self.addresses = ()
