"""Tells two publishers behind one rank from one that restarts: restarts that no lost connection explains.

Rules:

1. A process that ends takes its connection along. So one new life after a lost connection is what it
   looks like; on a port that engines connect to, several in a row without one are two publishers
   that took turns, and what is known under the rank's name belongs to nobody in particular.
2. So many batches of one life end the suspicion.

Cost: constant.
"""

OWN_REASONS = frozenset(("started", "rebuilt", "cache_dropped"))
"""Epochs that we opened without the publisher's numbers saying so."""
_SUSPICIOUS_LIVES = 3
_CALM_BATCHES = 1000


class Interleaving:
    """Of one rank."""

    def __init__(self) -> None:
        self.is_suspected = False
        self._is_explained = False
        self._lives = self._batches = 0

    def on_connection_lost(self) -> None:
        """The next life is no surprise."""
        self._is_explained = True

    def on_epoch(self, reason: str) -> bool:
        """A life began; True if by now two publishers must be taking turns."""
        if reason in OWN_REASONS:
            return False
        self._batches = 0
        if self._is_explained:
            self._is_explained = False
            return False
        self._lives += 1
        if self._lives >= _SUSPICIOUS_LIVES:
            self.is_suspected = True
        return self.is_suspected

    def on_batch(self) -> bool:
        """A batch was applied; True if that ends the suspicion."""
        self._batches += 1
        if self._batches < _CALM_BATCHES:
            return False
        was_suspected, self.is_suspected = self.is_suspected, False
        self._lives = 0
        return was_suspected
