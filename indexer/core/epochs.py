"""Numbers of epochs: each is higher than all before it.

For a rank that an earlier process wrote, higher than that one's too (`pass_by`).
"""


class Epochs:
    """An iterator that never ends and never repeats."""

    def __init__(self, first: int = 1) -> None:
        self._next = first

    def __iter__(self) -> "Epochs":
        return self

    def __next__(self) -> int:
        number = self._next
        self._next += 1
        return number

    def pass_by(self, epoch: int) -> None:
        """From now on only give numbers beyond `epoch`."""
        self._next = max(self._next, epoch + 1)
