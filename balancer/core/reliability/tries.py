"""How often one request is tried again.

Rules:

1. Each further attempt after one that an engine may have seen costs one of `retries`: a request that
   kills engines must not go round the fleet.
2. An engine that couldn't be reached has seen nothing. As many of those again cost nothing of it.

Cost: two counts per request.
"""

from balancer.core.errors import BalancerError, ConnectTimeoutError, EngineUnreachableError

UNSEEN = (EngineUnreachableError, ConnectTimeoutError)
"""What an engine has seen nothing of."""


class Tries:
    """What is left for one request."""

    __slots__ = ("_seen_left", "_unseen_left")

    def __init__(self, retries: int) -> None:
        self._seen_left = self._unseen_left = retries

    def has_after(self, error: BalancerError) -> bool:
        """Whether there may be another attempt after this failure."""
        return self._seen_left > 0 or (self._unseen_left > 0 and isinstance(error, UNSEEN))

    def spend(self, error: BalancerError) -> None:
        """There is one."""
        if self._unseen_left > 0 and isinstance(error, UNSEEN):
            self._unseen_left -= 1
        else:
            self._seen_left -= 1
