"""How much output a request asks for, as engines read its limits.

Rules (vLLM's request models, which pydantic reads without being strict):

1. A whole number is an int, or a float, a string or a boolean that comes to one: 5, 5.0, "5", true.
2. A completion knows `max_tokens` alone, and has 16 without. A chat goes by `max_completion_tokens`
   unless that is null; what `max_tokens` says beside it must only be a number. Other paths have
   names of their own.
3. A limit below 1 is refused (`core.routing.refusals` says what else is).

Cost: a look at three fields.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from balancer.core.request import Endpoint

COMPLETIONS_MAX_TOKENS: Final = 16
"""vLLM's default on /v1/completions."""
UNLIMITED: Final = float("inf")

_NAMES: Final[Mapping[Endpoint, tuple[str, ...]]] = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.TOKENS: ("max_tokens",),
}
_WHOLE_NUMBER: Final = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?")
_MAX_DIGITS: Final = 18


def whole_number(value: object) -> int | None:
    """Return what engines read as a whole number; None: they refuse it."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if not isinstance(value, str):
        return None
    read = _WHOLE_NUMBER.fullmatch(value.strip())
    if read is None or len(read[1]) > _MAX_DIGITS:
        return None
    return int(read[1])


def output_limit(body: Mapping[str, Any], endpoint: Endpoint) -> float | None:
    """Return the most tokens that an answer may have; None: engines refuse what the body says."""
    if endpoint is Endpoint.TOKENS:
        asked = body.get("sampling_params")
        body = asked if isinstance(asked, Mapping) else {}
    limits = [whole_number(body[name]) for name in _NAMES[endpoint] if body.get(name) is not None]
    if not limits:
        return COMPLETIONS_MAX_TOKENS if endpoint is Endpoint.COMPLETIONS else UNLIMITED
    most = limits[0]
    return None if most is None or most < 1 or None in limits else most


def explicit_limit(body: Mapping[str, Any], endpoint: Endpoint) -> int | None:
    """Return the limit that counts, whatever it is; None: there is none, or it is no number.

    Of a chat or a completion.
    """
    for name in _NAMES[endpoint]:
        if body.get(name) is not None:
            return whole_number(body[name])
    return COMPLETIONS_MAX_TOKENS if endpoint is Endpoint.COMPLETIONS else None
