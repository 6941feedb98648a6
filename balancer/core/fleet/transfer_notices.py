"""LMCache's notices that a prompt's blocks were sent: what is expected, and what came. Pure.

Rules:

1. A notice is a msgpack map `{"type": "ProxyNotif", "req_id": ...}`, sent once by each tensor-parallel
   rank of the prefill engine (LMCache, `pd_backend`). `req_id` is what the prefill leg was told.
2. Only names that a running request expects are kept, so nobody fills our memory by sending others.
3. A notice may come before the prefill leg has answered, or never.
"""

from collections.abc import Callable

import msgspec

MAX_MESSAGE_BYTES = 4096


class NoticeRefusedError(Exception):
    """A message of no use; `reason` is a metric label: `malformed`, `other_type` or `unexpected`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Message(msgspec.Struct, frozen=True):
    type: str
    req_id: str = ""


class Expected:
    """The notices of one request."""

    __slots__ = ("_on_all", "name", "outstanding")

    def __init__(self, name: str, notices: int, on_all: Callable[[], None]) -> None:
        """`on_all` is called when the last has come."""
        self.name = name
        self.outstanding = notices
        self._on_all = on_all

    def count(self) -> None:
        """One has come. More than expected change nothing."""
        self.outstanding -= 1
        if self.outstanding == 0:
            self._on_all()


class NoticeBook:
    """Who expects what."""

    def __init__(self) -> None:
        self._expected: dict[str, Expected] = {}
        self._decoder = msgspec.msgpack.Decoder(_Message)

    def expect(self, expected: Expected) -> None:
        """Keep the notices of this name."""
        self._expected[expected.name] = expected

    def forget(self, expected: Expected) -> None:
        """Nobody waits for it any more."""
        self._expected.pop(expected.name, None)

    def on_message(self, payload: bytes) -> None:
        """Raises NoticeRefusedError."""
        try:
            message = self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise NoticeRefusedError("malformed") from error
        if message.type != "ProxyNotif":
            raise NoticeRefusedError("other_type")
        expected = self._expected.get(message.req_id)
        if expected is None:
            raise NoticeRefusedError("unexpected")
        expected.count()
