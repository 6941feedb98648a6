"""Which paths belong to the data plane, and what becomes of each.

Rules:

1. `/v1/...`, `/v2/...`, `/inference/...` and `/cohere/...` are engines' paths, known or not,
   except the model list, which is merged and answered by the administration, and commands that
   it passes on to several engines (`core.fan_out`).
2. Outside them only the names listed here are engines' paths. Facts about one engine (`/health`,
   `/metrics`, `/version`, `/load`) mean nothing behind a balancer and are not forwarded.
3. What administers one engine is refused: forwarded to some instance it would do harm.
4. A path is matched as a whole, without a trailing slash, and holds no escapes.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from balancer.core.errors import BalancerError, MethodNotAllowedError, PathNotFoundError
from balancer.core.fan_out import COMMANDS
from balancer.core.request import Endpoint


class PathUse(StrEnum):
    """What the data plane does with a path."""

    GENERATE = "generate"
    """Routed by cache, split over two legs."""
    FORWARD = "forward"
    """Handed whole to one capable instance."""


@dataclass(frozen=True, slots=True)
class EnginePath:
    """A path that some engine may serve."""

    use: PathUse
    methods: tuple[str, ...] = ("POST",)


_GENERATE = EnginePath(PathUse.GENERATE)
_FORWARD = EnginePath(PathUse.FORWARD)
_FORWARD_GET = EnginePath(PathUse.FORWARD, ("GET",))

_PATHS = {endpoint.value: _GENERATE for endpoint in Endpoint} | dict.fromkeys(
    (
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/generative_scoring",
        "/v1/systemone",
        "/v1/decisions",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/cohere/v2/chat/render",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
    ),
    _FORWARD,
)
_PATHS["/tokenizer_info"] = _FORWARD_GET

_STORED_RESPONSE = re.compile(r"/v1/responses/[A-Za-z0-9_.-]+(/cancel)?")

_REFUSED = frozenset(
    {
        "/abort_requests",
        "/collective_rpc",
        "/fault_tolerance/apply",
        "/fault_tolerance/status",
        "/inference/v1/abort_requests",
        "/invocations",
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
        "/v1/realtime",
        "/version",
    }
)

_ENGINE_PREFIXES = ("/v1/", "/v2/", "/inference/", "/cohere/")


def belongs_to_engines(path: str) -> bool:
    """Tell whether the data plane answers `path`, be it with a refusal."""
    if path == "/v1/models" or path.startswith("/v1/models/") or path in COMMANDS:
        return False
    return path.startswith(_ENGINE_PREFIXES) or path in _PATHS or path in _REFUSED


def find_path(method: str, path: str) -> EnginePath:
    """Return what to do with `path`. Raises PathNotFoundError or MethodNotAllowedError."""
    found = _PATHS.get(path) or _stored_response(path)
    if found is None:
        raise _unknown(path)
    if method not in found.methods:
        allow = ", ".join(found.methods)
        raise MethodNotAllowedError(f"this path takes {allow}", allow=allow)
    return found


def _stored_response(path: str) -> EnginePath | None:
    match = _STORED_RESPONSE.fullmatch(path)
    if match is None or path == "/v1/responses/render":
        return None
    return _FORWARD if match.group(1) else _FORWARD_GET


def _unknown(path: str) -> BalancerError:
    if path in _REFUSED:
        return PathNotFoundError(
            "this path concerns one engine, so it is not forwarded: ask the engine itself"
        )
    return PathNotFoundError("no engine serves this path")
