"""uvicorn's protocols, where they are not exact enough for a proxy.

Rules:

1. Trailers of a chunked request are no headers. uvicorn adds them to the request's headers, where
   a client could hide from us what an engine then believes.
2. A client of HTTP/1.0 doesn't know chunks: an answer without a length ends with its connection.
3. A server that shuts down leaves WebSocket sessions alone until its time for draining is over;
   uvicorn would close them at once.
4. A handshake that `websockets` doesn't read is refused at once: it would be given up without an
   answer, and the connection left open. So whoever is upgraded is either served or gone.
"""

from typing import Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import HeaderLineTooLong, RequestLineTooLong, TooManyHeaders
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS

from balancer.core.errors import (
    BadRequestError,
    BalancerError,
    HeadTooLargeError,
    TargetTooLongError,
)
from balancer.dataplane.bounded_http import BoundedHttp, raw_error

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""Of one WebSocket message, in both directions."""


class ExactHttp(BoundedHttp):
    """HTTP/1.1 and 1.0."""

    def on_headers_complete(self) -> None:
        """The headers end here; what comes behind the body is told to nobody."""
        self.scope["headers"] = list(self.headers)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _AnyLength()


class PatientWebSocket(WebSocketsSansIOProtocol):
    """A session may end by itself."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        why = self.conn.handshake_exc
        if why is not None and not self.handshake_initiated and not self.transport.is_closing():
            self.close_sent = True
            self.transport.write(raw_error(_refusal(why)))
            self.transport.close()

    def shutdown(self) -> None:
        """The server stops. Who serves the session closes it when its time is over."""
        if self.close_sent:
            super().shutdown()


def _refusal(why: Exception) -> BalancerError:
    match why:
        case RequestLineTooLong():
            return TargetTooLongError(f"a handshake's target is over {MAX_LINE_LENGTH} bytes")
        case HeaderLineTooLong():
            return HeadTooLargeError(f"a handshake's header is over {MAX_LINE_LENGTH} bytes")
        case TooManyHeaders():
            return HeadTooLargeError(f"a handshake has over {MAX_NUM_HEADERS} headers")
        case _:
            return BadRequestError("this is no WebSocket handshake")


class _AnyLength(int):
    """A length that every body has, for uvicorn's count of what is left to send."""

    def __lt__(self, sent_bytes: int) -> bool:
        return False

    def __sub__(self, sent_bytes: int) -> "_AnyLength":
        return self
