"""What engines refuse of the fields that a prefill leg doesn't show them."""

from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.request import Endpoint
from balancer.core.routing.refusals import Refusal, find_refusal

CHAT, TEXT = Endpoint.CHAT, Endpoint.COMPLETIONS
NO, LIKELY, CERTAIN = Refusal.NO, Refusal.LIKELY, Refusal.CERTAIN
BOTH = pytest.mark.parametrize("endpoint", [CHAT, TEXT])
ENGINES = pydantic.TypeAdapter(bool)
"""vLLM's request models are pydantic's, and read without being strict."""


@BOTH
@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({}, NO),
        ({"stream": True, "stream_options": {"include_usage": True}}, NO),
        ({"stream_options": {}}, NO),
        ({"stream_options": {"include_usage": True}}, CERTAIN),
        ({"stream": False, "stream_options": {"include_usage": True}}, CERTAIN),
        ({"n": 4}, NO),
        ({"n": "1"}, NO),
        ({"n": 0}, CERTAIN),
        ({"n": []}, CERTAIN),
        ({"use_beam_search": "yes"}, NO),
        ({"use_beam_search": None}, CERTAIN),
        ({"echo": 1}, NO),
        ({"echo": "perhaps"}, CERTAIN),
        ({"max_tokens": None}, NO),
        ({"max_tokens": "5", "min_tokens": 5.0}, NO),
        ({"max_tokens": 0}, CERTAIN),
        ({"max_tokens": -3}, CERTAIN),
        ({"max_tokens": False}, CERTAIN),
        ({"max_tokens": "five"}, CERTAIN),
        ({"max_tokens": 5, "min_tokens": 6}, CERTAIN),
        ({"min_tokens": 5}, NO),
        ({"min_tokens": None}, CERTAIN),
        ({"min_tokens": -1}, CERTAIN),
        ({"min_tokens": "x"}, CERTAIN),
        ({"prompt_logprobs": 3}, NO),
        ({"prompt_logprobs": 0, "stream": True}, NO),
        ({"prompt_logprobs": 3, "stream": True}, CERTAIN),
        ({"prompt_logprobs": -2}, CERTAIN),
        ({"prompt_logprobs": "2"}, CERTAIN),
        ({"max_tokens": 0, "use_beam_search": True}, LIKELY),
        ({"max_tokens": 5, "min_tokens": 6, "use_beam_search": True}, LIKELY),
        ({"min_tokens": None, "use_beam_search": True}, CERTAIN),
        ({"prompt_logprobs": -1}, LIKELY),
        ({"prompt_logprobs": 21}, LIKELY),
        ({"logprobs": 1, "logprob_token_ids": [1, 2]}, NO),
        ({"logprob_token_ids": []}, NO),
        ({"logprob_token_ids": [1, 2]}, LIKELY),
        ({"logprobs": 1, "logprob_token_ids": [1] * 129}, LIKELY),
        ({"logprobs": 1, "logprob_token_ids": {"1": 2}}, LIKELY),
    ],
    ids=repr,
)
def test_what_no_engine_takes_on_either_path(
    body: dict[str, Any], refusal: Refusal, endpoint: Endpoint
) -> None:
    """Sure where every release says so."""
    assert find_refusal(body, endpoint) is refusal


@pytest.mark.parametrize(
    ("body", "of_chat", "of_completion"),
    [
        ({"n": None}, NO, CERTAIN),
        ({"echo": None}, CERTAIN, NO),
        ({"max_completion_tokens": 0}, LIKELY, NO),
        ({"max_completion_tokens": -1}, CERTAIN, NO),
        ({"max_completion_tokens": "x", "max_tokens": 5}, CERTAIN, NO),
        ({"max_completion_tokens": 9, "max_tokens": 5, "min_tokens": 7}, NO, CERTAIN),
        ({"max_completion_tokens": 9, "max_tokens": "x"}, CERTAIN, CERTAIN),
        ({"echo": True, "max_tokens": 0}, CERTAIN, LIKELY),
        ({"min_tokens": 17}, NO, CERTAIN),
        ({"min_tokens": 17, "max_tokens": None}, NO, LIKELY),
        ({"logprobs": True}, NO, NO),
        ({"logprobs": 2}, CERTAIN, NO),
        ({"logprobs": -1}, CERTAIN, LIKELY),
        ({"logprobs": -2}, CERTAIN, CERTAIN),
        ({"logprobs": 21}, CERTAIN, LIKELY),
        ({"logprobs": "true"}, NO, CERTAIN),
        ({"logprobs": "1"}, NO, CERTAIN),
        ({"top_logprobs": 2}, CERTAIN, NO),
        ({"logprobs": False, "top_logprobs": 0}, NO, NO),
        ({"logprobs": True, "top_logprobs": 20}, NO, NO),
        ({"logprobs": True, "top_logprobs": 21}, LIKELY, NO),
        ({"logprobs": False, "logprob_token_ids": [1]}, LIKELY, NO),
    ],
    ids=repr,
)
def test_a_chat_is_no_completion(
    body: dict[str, Any], of_chat: Refusal, of_completion: Refusal
) -> None:
    """Each has names, types and defaults of its own."""
    assert (find_refusal(body, CHAT), find_refusal(body, TEXT)) == (of_chat, of_completion)


@BOTH
@pytest.mark.parametrize(
    ("limit", "prompt_tokens", "refusal"),
    [
        (1000, None, NO),
        (1001, None, CERTAIN),
        (10**30, 4, CERTAIN),
        (600, 400, NO),
        (601, 400, LIKELY),
    ],
)
def test_an_answer_that_a_context_has_no_room_for(
    limit: int, prompt_tokens: int | None, refusal: Refusal, endpoint: Endpoint
) -> None:
    """Alone it is refused; behind its prompt it is cut short by late releases."""
    found = find_refusal(
        {"max_tokens": limit}, endpoint, prompt_tokens=prompt_tokens, context_tokens=1000
    )

    assert found is refusal


@BOTH
def test_of_a_context_that_nobody_tells_nothing_is_known(endpoint: Endpoint) -> None:
    """Nor of an answer without a limit."""
    assert find_refusal({"max_tokens": 10**9}, endpoint, prompt_tokens=10**9) is NO
    assert find_refusal({}, CHAT, prompt_tokens=10**9, context_tokens=1000) is NO


@given(st.one_of(st.sampled_from(["On", "NO", "t", "2", "", 2, 1.0, 0.5]), st.text(max_size=4)))
def test_a_flag_is_what_engines_read_as_one(value: object) -> None:
    """Value by value as pydantic has it."""
    try:
        ENGINES.validate_python(value)
    except pydantic.ValidationError:
        expected = CERTAIN
    else:
        expected = NO

    assert find_refusal({"use_beam_search": value}, TEXT) is expected
