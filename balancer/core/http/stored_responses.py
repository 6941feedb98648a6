"""Which instance keeps which response of the Responses API.

vLLM keeps them in the memory of one server (`VLLM_ENABLE_RESPONSES_API_STORE`), so whatever names
a response has to go where it was made.

Rules:

1. Bounded: the response unused for longest is forgotten first. What is forgotten, or was made
   through another balancer, is found by asking (`dataplane.forwarding`).
2. Advice only: an instance that restarted has lost its responses and says so itself.
3. The id of an answer is read from the side, out of its first event or its body; an answer over
   1 MiB keeps its id to itself.

Cost: O(1) per response, about 200 bytes each. Reading an answer copies it once, up to its id.
"""

import re
from collections import OrderedDict
from typing import Final

import msgspec

from indexer.core.types import InstanceId

MAX_ID_CHARS: Final = 256
_MAX_READ_BYTES: Final = 1024 * 1024
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class StoredResponses:
    """Holders by response id."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._holders: OrderedDict[str, InstanceId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def put(self, response: str, holder: InstanceId) -> None:
        """`holder` has made it."""
        self._holders[response] = holder
        self._holders.move_to_end(response)
        while len(self._holders) > self._limit:
            self._holders.popitem(last=False)

    def find(self, response: str) -> InstanceId | None:
        """Who has made it; None: not known."""
        holder = self._holders.get(response)
        if holder is not None:
            self._holders.move_to_end(response)
        return holder

    def drop(self, response: str) -> None:
        """Its holder has lost or deleted it."""
        self._holders.pop(response, None)


class _Named(msgspec.Struct):
    id: str | None = None


class _Event(msgspec.Struct):
    response: _Named | None = None


class ResponseIdReader:
    """Reads the id out of one answer. `feed` until `is_over`, then `finish`."""

    __slots__ = ("_data", "_is_stream", "id", "is_over")

    def __init__(self, *, is_stream: bool) -> None:
        self.id: str | None = None
        self.is_over = False
        """More of the answer wouldn't help."""
        self._is_stream = is_stream
        self._data = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Take what the engine sent."""
        if self.is_over:
            return
        seen_bytes = len(self._data)
        self._data += chunk
        if self._is_stream:
            self._read_events(max(0, seen_bytes - 3))
        if len(self._data) > _MAX_READ_BYTES:
            self._end(None)

    def finish(self) -> None:
        """The answer is complete."""
        if not self.is_over:
            self._end(None if self._is_stream else _decode(self._data, _Named))

    def _read_events(self, scan_from: int) -> None:
        """Look at the first event that has data; comments go by."""
        while (match := _EVENT_END.search(self._data, scan_from)) is not None:
            event = self._data[: match.start()]
            lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
            del self._data[: match.end()]
            scan_from = 0
            if lines:
                first = _decode(b"\n".join(lines), _Event)
                self._end(first.response if isinstance(first, _Event) else None)
                return

    def _end(self, named: object) -> None:
        self.is_over = True
        self._data = bytearray()
        if isinstance(named, _Named) and named.id and len(named.id) <= MAX_ID_CHARS:
            self.id = named.id


def _decode(data: bytes | bytearray, kind: type[msgspec.Struct]) -> msgspec.Struct | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
