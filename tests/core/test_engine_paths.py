"""Which paths the data plane answers, and how."""

import pytest

from balancer.core.errors import MethodNotAllowedError, PathNotFoundError
from balancer.core.http.engine_paths import (
    PathUse,
    belongs_to_engines,
    every_path,
    find_path,
    is_session,
    methods_of,
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_generation_is_routed_by_cache(path: str) -> None:
    """These two are scored and split."""
    assert find_path("POST", path).use is PathUse.GENERATE


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/v2/rerank"),
        ("POST", "/tokenize"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1-a"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/render"),
        ("POST", "/invocations"),
        ("GET", "/tokenizer_info"),
        ("HEAD", "/tokenizer_info"),
    ],
)
def test_other_engine_paths_are_forwarded(method: str, path: str) -> None:
    """Whole, to one instance (F54)."""
    assert belongs_to_engines(path)
    assert find_path(method, path).use is PathUse.FORWARD


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "POST"),
        ("OPTIONS", "/v1/embeddings", "POST"),
        ("POST", "/v1/responses/resp_1", "GET, HEAD, DELETE"),
        ("GET", "/v1/responses/resp_1/cancel", "POST"),
        ("GET", "/v1/responses/render", "POST"),
    ],
)
def test_wrong_method_is_told_with_the_right_one(method: str, path: str, allow: str) -> None:
    """405, not 404 (F44)."""
    with pytest.raises(MethodNotAllowedError) as caught:
        find_path(method, path)

    assert caught.value.allow == allow


@pytest.mark.parametrize(
    "path",
    [
        "/v1/nonsense",
        "/v1/completions/",
        "/v1/responses/a b",
        "/v1/responses/a/b",
        "/pause",
        "/collective_rpc",
        "/inference/v1/abort_requests",
    ],
)
def test_unknown_and_administrative_paths_are_404(path: str) -> None:
    """What would change one engine never reaches a random one."""
    assert belongs_to_engines(path)
    with pytest.raises(PathNotFoundError):
        find_path("POST", path)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/m", "/health", "/metrics", "/status", "/", "/docs"]
)
def test_administration_is_not_ours(path: str) -> None:
    """The model list is merged, the rest is about the balancer."""
    assert not belongs_to_engines(path)


def test_kept_responses_are_named_by_their_path() -> None:
    """The id, be it to read, to delete or to cancel; only making one keeps one."""
    assert find_path("GET", "/v1/responses/resp_1").response == "resp_1"
    assert find_path("POST", "/v1/responses/resp_1/cancel").response == "resp_1"
    assert find_path("POST", "/v1/responses").makes_response
    assert not find_path("POST", "/v1/responses/render").makes_response


def test_sockets_are_told_apart() -> None:
    """An ordinary request for one is told what it takes."""
    assert is_session("/v1/realtime")
    assert not is_session("/v1/responses")
    assert not is_session("/v1/nonsense")
    assert belongs_to_engines("/v1/realtime")
    with pytest.raises(PathNotFoundError, match="WebSocket"):
        find_path("GET", "/v1/realtime")


def test_methods_are_known_without_asking_for_one() -> None:
    """For preflights: what is no plain path of the engines' takes nothing."""
    assert methods_of("/v1/embeddings") == ("POST",)
    assert methods_of("/v1/realtime") == ()
    assert methods_of("/pause") == ()


def test_every_path_is_found_by_its_name() -> None:
    """Also those that hold an id."""
    paths = every_path()

    for path, use in paths.items():
        named = path.replace("{response_id}", "any")
        assert belongs_to_engines(named)
        if use.use is not PathUse.SESSION:
            assert all(find_path(method, named) == use for method in use.methods)
    assert {"/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"} <= set(paths)
