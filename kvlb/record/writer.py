"""The two files of a capture, written line by line as things happen."""

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from kvlb.errors import SettingsError

EVENTS, REQUESTS = ".events.jsonl.gz", ".requests.jsonl.gz"


class CaptureWriter:
    """Open from construction until the `with` block ends."""

    def __init__(self, name: Path, clock: Callable[[], float]) -> None:
        """Create both files; `clock` is wall time. Raises SettingsError if they can't be."""
        self.events_path = name.with_name(name.name + EVENTS)
        self.requests_path = name.with_name(name.name + REQUESTS)
        self.clock = clock
        self.messages = 0
        """As they came live."""
        self.replayed = 0
        """That replays told, of before and of what was lost."""
        self.requests = 0
        for path in (self.events_path, self.requests_path):
            if path.exists():
                raise SettingsError(f"{path} exists; choose another --out")
        try:
            self._events = gzip.open(self.events_path, "wb")  # noqa: SIM115 - closed by __exit__
            self._requests = gzip.open(self.requests_path, "wb")  # noqa: SIM115 - likewise
        except OSError as error:
            raise SettingsError(f"--out {name}: {error.strerror or error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._events.close()
        self._requests.close()

    def flush(self) -> None:
        """Have everything so far in the files, readable whatever becomes of this process."""
        # Events first: a request beside which events are missing could look mispredicted.
        self._events.flush()
        self._requests.flush()

    def message(self, src: str, frames: list[bytes]) -> None:
        """One message of an event socket, with the time of now."""
        self.messages += 1
        row = {"t": self.clock(), "src": src, "frames": [frame.hex() for frame in frames]}
        self._events.write(msgspec.json.encode(row) + b"\n")

    def request(self, row: Mapping[str, Any]) -> None:
        """One request and its answer."""
        self.requests += 1
        self._write({"i": self.requests, "kind": "request", **row})

    def note(self, kind: str, **fields: Any) -> None:
        """Anything else."""
        self._write({"t0": self.clock(), "kind": kind, **fields})

    def _write(self, row: Mapping[str, Any]) -> None:
        self._requests.write(msgspec.json.encode(row) + b"\n")
