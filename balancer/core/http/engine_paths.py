"""Which paths belong to the data plane, and what becomes of each.

Rules:

1. `/v1/...`, `/v2/...`, `/inference/...` and `/cohere/...` are engines' paths, known or not,
   except the model list, which is merged and answered by the administration, and commands that
   it passes on to several engines (`core.fleet.fan_out`).
2. Outside them only the names listed here are engines' paths. Facts about one engine (`/health`,
   `/metrics`, `/version`, `/load`) mean nothing behind a balancer and are not forwarded.
3. What administers one engine is refused: forwarded to some instance it would do harm.
4. A path is matched as a whole, without a trailing slash, and holds no escapes.
5. Where GET is taken HEAD is, too; what an engine says to it is its own business.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from balancer.core.errors import BalancerError, MethodNotAllowedError, PathNotFoundError
from balancer.core.fleet.fan_out import COMMANDS
from balancer.core.request import SPLIT, Endpoint


class PathUse(StrEnum):
    """What the data plane does with a path."""

    GENERATE = "generate"
    """Routed by cache, split over two legs."""
    FORWARD = "forward"
    """Handed whole to one capable instance."""
    SESSION = "session"
    """A WebSocket, relayed to one instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePath:
    """A path that some engine may serve."""

    use: PathUse
    methods: tuple[str, ...] = ("POST",)
    generates: bool = False
    """It runs a prompt on one rank of an instance, as the scored paths do."""
    infers: bool = False
    """It runs a model over what it is sent, and keeps nothing: it may be done again elsewhere."""
    marks_end: bool = False
    """Its streams end with an event that says so: one that stops before was cut."""
    makes_response: bool = False
    """Its answers are kept by the instance that gave them, under an id."""
    endpoint: Endpoint | None = None
    """Which of the paths that are routed by cache and split it is; None: it is none."""
    scored: Endpoint | None = None
    """Which of those that are routed by cache and handed over whole."""
    response: str | None = None
    """Id of the kept response that the path names."""


_FORWARD = EnginePath(use=PathUse.FORWARD)
_FORWARD_INFER = EnginePath(use=PathUse.FORWARD, infers=True)
_FORWARD_GENERATE = EnginePath(use=PathUse.FORWARD, generates=True, infers=True)
_READ = ("GET", "HEAD")

_PATHS = {
    each.value: EnginePath(use=PathUse.GENERATE, generates=True, infers=True, endpoint=each)
    for each in SPLIT
} | dict.fromkeys(
    (
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/responses/render",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/cohere/v2/chat/render",
        "/tokenize",
        "/detokenize",
    ),
    _FORWARD,
)
_PATHS |= dict.fromkeys(
    (
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/systemone",
        "/v1/decisions",
    ),
    _FORWARD_INFER,
)
_PATHS |= dict.fromkeys(
    (
        "/cohere/v2/chat",
        "/generative_scoring",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions/batch",
    ),
    _FORWARD_GENERATE,
)
_PATHS |= {
    each.value: EnginePath(
        use=PathUse.FORWARD,
        generates=True,
        infers=True,
        marks_end=True,
        scored=each,
        makes_response=each is Endpoint.RESPONSES,
    )
    for each in Endpoint
    if each not in SPLIT
}
_PATHS["/invocations"] = replace(_FORWARD_GENERATE, marks_end=True)
"""A chat or a completion, as its body says."""
_PATHS["/tokenizer_info"] = EnginePath(use=PathUse.FORWARD, methods=_READ)
_PATHS["/v1/realtime"] = EnginePath(use=PathUse.SESSION)

RESPONSE_ID = "[A-Za-z0-9_.-]{1,256}"
_RESPONSE_ID = re.compile(RESPONSE_ID)
_STORED_RESPONSE_PATH = "/v1/responses/{response_id}"
_STORED_RESPONSE = re.compile(rf"/v1/responses/({RESPONSE_ID})(/cancel)?")

_REFUSED = frozenset(
    {
        "/abort_requests",
        "/collective_rpc",
        "/fault_tolerance/apply",
        "/fault_tolerance/status",
        "/inference/v1/abort_requests",
        "/is_paused",
        "/is_scaling_elastic_ep",
        "/is_sleeping",
        "/kv_event_sources",
        "/load",
        "/pause",
        "/ping",
        "/release_kv_cache_memory",
        "/resume",
        "/scale_elastic_ep",
        "/server_info",
        "/version",
    }
)

_ENGINE_PREFIXES = ("/v1/", "/v2/", "/inference/", "/cohere/")


def belongs_to_engines(path: str) -> bool:
    """Tell whether the data plane answers `path`, be it with a refusal."""
    if path in _PATHS:
        return True
    if path == "/v1/models" or path.startswith("/v1/models/") or path in COMMANDS:
        return False
    return path.startswith(_ENGINE_PREFIXES) or path in _REFUSED


def find_path(method: str, path: str) -> EnginePath:
    """Return what to do with `path`. Raises PathNotFoundError or MethodNotAllowedError."""
    found = _PATHS.get(path) or _stored_response(path)
    if found is None:
        raise _unknown(path)
    if found.use is PathUse.SESSION:
        raise PathNotFoundError("this path is a WebSocket: ask for it with `Upgrade: websocket`")
    if method not in found.methods:
        allow = ", ".join(found.methods)
        raise MethodNotAllowedError(f"this path takes {allow}", allow=allow)
    return found


def methods_of(path: str) -> tuple[str, ...]:
    """The methods an engine path takes; none if no engine serves it."""
    found = _PATHS.get(path) or _stored_response(path)
    return () if found is None or found.use is PathUse.SESSION else found.methods


def every_path() -> dict[str, EnginePath]:
    """Every path that some engine may serve; where one names a response, with `{response_id}`."""
    kept = (_STORED_RESPONSE_PATH, f"{_STORED_RESPONSE_PATH}/cancel")
    found = {each: _stored_response(each.replace("{response_id}", "any")) for each in kept}
    return _PATHS | {each: use for each, use in found.items() if use is not None}


def may_name_response(name: str) -> bool:
    """Tell whether a path can name this response: what can't is never written into one."""
    return _RESPONSE_ID.fullmatch(name) is not None


def is_session(path: str) -> bool:
    """Tell whether `path` is a WebSocket of the engines'."""
    found = _PATHS.get(path)
    return found is not None and found.use is PathUse.SESSION


def _stored_response(path: str) -> EnginePath | None:
    match = _STORED_RESPONSE.fullmatch(path)
    if match is None or path == "/v1/responses/render":
        return None
    methods = ("POST",) if match.group(2) else (*_READ, "DELETE")
    return EnginePath(use=PathUse.FORWARD, methods=methods, response=match.group(1))


def _unknown(path: str) -> BalancerError:
    if path in _REFUSED:
        return PathNotFoundError(
            "this path concerns one engine, so it is not forwarded: ask the engine itself"
        )
    return PathNotFoundError("no engine serves this path")
