"""What a request says besides its prompt: its session, its length, its limit."""

from typing import Any

import pytest

from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.candidates import PromptMatches, request_shape
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt


def prompt(tokens: int, first: int = 0) -> Prompt:
    return Prompt(Namespace(model="m"), range(first, first + tokens))


def request(
    body: dict[str, Any] | None = None,
    *,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    raw_body: bytes = b"{}",
    endpoint: Endpoint = Endpoint.CHAT,
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        endpoint=endpoint,
        body=body or {},
        raw_body=raw_body,
        headers=headers,
        model="m",
        base_model="m",
        lora=None,
    )


def session_of(asked: GenerateRequest, view: PromptView | None = None) -> str | None:
    view = view or PromptView()
    matches = PromptMatches(prompts=view.prompts, block_sizes={})
    return request_shape(asked, view, matches, "X-Session-ID").session


@pytest.mark.parametrize(
    ("asked", "session"),
    [
        pytest.param(
            request({"user": "u"}, headers=((b"x-session-id", b"h"),)), "h", id="header-first"
        ),
        pytest.param(request({"user": "u", "prompt_cache_key": "k"}), "u", id="user"),
        pytest.param(request({"user": "", "prompt_cache_key": "k"}), "k", id="cache-key"),
        pytest.param(request({"user": 5}, headers=((b"x-session-id", b""),)), None, id="none"),
        pytest.param(request(headers=((b"x-other", b"h"),)), None, id="another-header"),
    ],
)
def test_a_session_is_named_by_the_client(asked: GenerateRequest, session: str | None) -> None:
    """The header wins over the body."""
    assert session_of(asked) == session


def test_prompts_that_begin_alike_are_one_session() -> None:
    """If the client names none; a prompt shorter than a block begins nothing."""
    one = session_of(request(), PromptView(prompts=(prompt(64),)))
    other = session_of(request(), PromptView(prompts=(prompt(32),)))
    short = session_of(request(), PromptView(prompts=(prompt(5),)))

    assert one is not None
    assert one == other
    assert short is None


@pytest.mark.parametrize(
    ("raw_body", "tokens"),
    [(b"x" * 400, 100), (b"x" * 10**6, 8192)],
    ids=["text", "images"],
)
def test_an_unscorable_length_is_guessed_from_the_body(raw_body: bytes, tokens: int) -> None:
    """Four bytes to a token, up to a limit."""
    shape = request_shape(
        request(raw_body=raw_body), PromptView(), PromptMatches(block_sizes={}), "x-session-id"
    )

    assert shape.prompt_tokens == tokens


@pytest.mark.parametrize(
    ("body", "endpoint", "limit"),
    [
        ({"max_tokens": 5}, Endpoint.CHAT, 5),
        ({"max_tokens": 5, "max_completion_tokens": 9}, Endpoint.CHAT, 9),
        ({"max_tokens": "5"}, Endpoint.CHAT, 5),
        ({"max_tokens": 0}, Endpoint.COMPLETIONS, 1),
        ({}, Endpoint.COMPLETIONS, 16),
    ],
)
def test_the_output_limit_is_the_engines(
    body: dict[str, Any], endpoint: Endpoint, limit: float
) -> None:
    """Completions have a default of 16, chats have none."""
    shape = request_shape(
        request(body, endpoint=endpoint),
        PromptView(prompts=(prompt(40),)),
        PromptMatches(block_sizes={}),
        "x-session-id",
    )

    assert shape.max_output_tokens == limit
    assert shape.prompt_tokens == 40
