"""Who writes the line that every finished request leaves in the log.

structlog takes ten calls and a system call for a line, and a request is one line at least. Whoever
starts the process and knows where its log goes may hand in a cheaper way (`kvlb.logs`).
"""

from collections.abc import Callable

import msgspec
import structlog

from balancer.core.record import RequestRecord
from balancer.core.request_line import request_line

LogRequest = Callable[[RequestRecord], None]
REQUEST_DONE = "request_done"


class LoggedRequests:
    """Logs requests as everything else is logged."""

    def __init__(self) -> None:
        # Bound once: a lazy logger is put together anew for every line.
        self._log = structlog.stdlib.get_logger(__name__).bind()

    def __call__(self, record: RequestRecord) -> None:
        self._log.info(REQUEST_DONE, **msgspec.to_builtins(request_line(record)))
