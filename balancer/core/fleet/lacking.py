"""Which instances don't serve a path, learned from their own refusals.

In a fleet of mixed releases, front-ends or kinds of model the same path is served by some
instances only (docs/endpoints.md). Nothing says so beforehand.

Rules:

1. Only what says that the *path* isn't there counts: an engine without the route, or with the
   route switched off. A model or a response that isn't there is another matter. A 501 says nothing
   else, in whatever words.
2. What was learned holds for a minute: engines restart with other flags.
3. Bounded by instances and paths; both are few.
"""

import json
from typing import Any, Final

from indexer.core.types import InstanceId

BELIEVED_S: Final = 60.0
_MAX_KEPT: Final = 4096
_SWITCHED_OFF: Final = frozenset({"NotImplementedError", "PermissionDeniedError", "Not Found"})
"""Types of errors about routes. An unknown model is a `NotFoundError`."""


class LackingPaths:
    """What instances have refused lately."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[InstanceId, str], float] = {}

    def note(self, instance: InstanceId, path: str, now_s: float) -> None:
        """`instance` has said that it doesn't serve `path`."""
        if len(self._until_s) >= _MAX_KEPT:
            self._until_s = {key: end_s for key, end_s in self._until_s.items() if end_s > now_s}
        if len(self._until_s) < _MAX_KEPT:
            self._until_s[instance, path] = now_s + BELIEVED_S

    def lacks(self, instance: InstanceId, path: str, now_s: float) -> bool:
        """Tell whether it is known not to serve `path`."""
        end_s = self._until_s.get((instance, path))
        return end_s is not None and now_s < end_s


def may_lack(status: int) -> bool:
    """Tell whether the body of an answer with this status is worth a look."""
    return status in {403, 404, 501}


def says_lacking(status: int, body: bytes) -> bool:
    """Tell whether an answer says that there is no such path."""
    if status == 501 or (status == 404 and not body):
        return True  # a router without words of its own
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(read, dict):
        return False
    if read.get("detail") == "Not Found":
        return True
    error: Any = read.get("error")
    if read.get("object") == "error":  # up to 0.10.0
        error = read
    kind = error.get("type") if isinstance(error, dict) else None
    return isinstance(kind, str) and kind in _SWITCHED_OFF
