"""Requests that a prefill leg and a decode leg can serve together, and those that one must."""

from typing import Any

import pytest

from balancer.core.request import Endpoint
from balancer.core.routing.prefill_policy import is_splittable

SPLITTABLE: list[dict[str, Any]] = [
    {},
    {"prompt": "text", "max_tokens": 5, "min_tokens": 5},
    {"prompt": [1, 2, 3]},
    {"prompt": ["one"]},
    {"prompt": [[1, 2]]},
    {"n": 1, "best_of": 1, "use_beam_search": False},
    {"n": True, "best_of": None},
    {"max_tokens": None, "min_tokens": 0},
    {"min_tokens": 7},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream_options": None},
    {"echo": False, "logprobs": 3},
    {"max_tokens": "5", "min_tokens": "5"},
    {"max_tokens": 5.0, "n": "1"},
]

NOT_SPLITTABLE: list[dict[str, Any]] = [
    {"prompt_logprobs": 2},
    {"prompt_logprobs": 0},
    {"echo": True, "logprobs": 0},
    {"use_beam_search": True},
    {"n": 4},
    {"n": []},
    {"best_of": 2},
    {"n": 1, "best_of": "3"},
    {"n": 0},
    {"prompt_embeds": "AAAA"},
    {"prompt": ["one", "two"]},
    {"prompt": [[1], [2]]},
]

CHAT_OR_COMPLETION = pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])


@CHAT_OR_COMPLETION
@pytest.mark.parametrize("body", SPLITTABLE, ids=repr)
def test_two_legs_can_serve(body: dict[str, Any], endpoint: Endpoint) -> None:
    """Prefill computes the prompt, decode all that the client asked for."""
    assert is_splittable(body, 0, endpoint)


@CHAT_OR_COMPLETION
@pytest.mark.parametrize("body", NOT_SPLITTABLE, ids=repr)
def test_two_legs_cannot_serve(body: dict[str, Any], endpoint: Endpoint) -> None:
    """Decode could not answer it (F34)."""
    assert not is_splittable(body, 0, endpoint)


def test_a_completion_isnt_split_as_a_chat_is() -> None:
    """It echoes without logprobs."""
    body = {"echo": True, "max_tokens": 7}

    assert is_splittable(body, 0, Endpoint.COMPLETIONS)
    assert not is_splittable(body, 0, Endpoint.CHAT)


def test_several_prompts_are_not_split() -> None:
    """Only the first one's transfer would come back."""
    assert is_splittable({"prompt": ["one"]}, 1, Endpoint.COMPLETIONS)
    assert not is_splittable({"prompt": ["one", "two"]}, 2, Endpoint.COMPLETIONS)
