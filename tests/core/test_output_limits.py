"""How engines read what a request says of its answer's length."""

from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.request import Endpoint
from balancer.core.routing.output_limits import explicit_limit, output_limit, whole_number

ENGINES = pydantic.TypeAdapter(int)
"""vLLM's request models are pydantic's, and read without being strict."""


def engines_read(value: Any) -> int | None:
    try:
        return ENGINES.validate_python(value)
    except pydantic.ValidationError:
        return None


@pytest.mark.parametrize(
    "value",
    [
        *(5, 0, -1, 5.0, 5.5, float("inf"), float("nan"), True, False, None),
        *(
            "5",
            " 5 ",
            "\u00a05",
            "+5",
            "-5",
            "005",
            "5.0",
            "5.",
            "5.5",
            "5e0",
            "1_000",
            "1__0",
            "_1",
            "1_",
        ),
        *("", " ", "+", "five", "true", "null", "\u0665", [5], {"a": 5}),
    ],
    ids=repr,
)
def test_a_whole_number_is_what_engines_read_as_one(value: Any) -> None:
    """Value by value as pydantic has it."""
    assert whole_number(value) == engines_read(value)


@given(st.text(alphabet="0123456789+-._ \te", max_size=6))
def test_texts_are_numbers_where_engines_say_so(text: str) -> None:
    """The law, over whatever looks like a number."""
    assert whole_number(text) == engines_read(text)


def test_a_number_that_no_engine_could_mean_is_none() -> None:
    """Nor is it read digit by digit."""
    assert whole_number("9" * 5000) is None


@pytest.mark.parametrize(
    ("body", "endpoint", "limit"),
    [
        ({"max_tokens": 5}, Endpoint.CHAT, 5),
        ({"max_tokens": "5"}, Endpoint.CHAT, 5),
        ({"max_tokens": 5.0}, Endpoint.COMPLETIONS, 5),
        ({"max_tokens": True}, Endpoint.COMPLETIONS, 1),
        ({"max_tokens": 5, "max_completion_tokens": 9}, Endpoint.CHAT, 9),
        ({"max_tokens": 0, "max_completion_tokens": 9}, Endpoint.CHAT, 9),
        ({"max_tokens": 5, "max_completion_tokens": None}, Endpoint.CHAT, 5),
        ({"max_tokens": 5, "max_completion_tokens": 9}, Endpoint.COMPLETIONS, 5),
        ({"max_completion_tokens": 0}, Endpoint.COMPLETIONS, 16),
        ({"max_tokens": None}, Endpoint.COMPLETIONS, 16),
        ({"max_tokens": None}, Endpoint.CHAT, float("inf")),
        ({"max_tokens": 5}, Endpoint.MESSAGES, 5),
        ({"max_output_tokens": 5, "max_tokens": 9}, Endpoint.RESPONSES, 5),
        ({"sampling_params": {"max_tokens": 5}, "max_tokens": 9}, Endpoint.TOKENS, 5),
        ({"sampling_params": None}, Endpoint.TOKENS, float("inf")),
        ({"max_tokens": 0}, Endpoint.COMPLETIONS, None),
        ({"max_tokens": False}, Endpoint.CHAT, None),
        ({"max_tokens": "five"}, Endpoint.CHAT, None),
        ({"max_completion_tokens": 0, "max_tokens": 5}, Endpoint.CHAT, None),
        ({"max_completion_tokens": 9, "max_tokens": 5.5}, Endpoint.CHAT, None),
    ],
)
def test_the_limit_is_the_engines(
    body: dict[str, Any], endpoint: Endpoint, limit: float | None
) -> None:
    """By the names that a path has, and by its default."""
    assert output_limit(body, endpoint) == limit


@pytest.mark.parametrize(
    ("body", "endpoint", "limit"),
    [
        ({"max_tokens": 5}, Endpoint.CHAT, 5),
        ({"max_tokens": 5, "max_completion_tokens": "9"}, Endpoint.CHAT, 9),
        ({"max_tokens": 5, "max_completion_tokens": 0}, Endpoint.CHAT, 0),
        ({"max_tokens": -5, "max_completion_tokens": 9}, Endpoint.COMPLETIONS, -5),
        ({"max_tokens": "five"}, Endpoint.COMPLETIONS, None),
        ({}, Endpoint.COMPLETIONS, 16),
        ({"max_tokens": None}, Endpoint.CHAT, None),
    ],
    ids=repr,
)
def test_the_limit_that_counts_is_told_whatever_it_is(
    body: dict[str, Any], endpoint: Endpoint, limit: int | None
) -> None:
    """Also one that no engine takes."""
    assert explicit_limit(body, endpoint) == limit
