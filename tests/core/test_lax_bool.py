"""Flags of JSON bodies, as pydantic reads them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from balancer.core.http.lax_bool import FALSE_WORDS, TRUE_WORDS, is_flag, is_true

engines_flag = TypeAdapter(bool | None)
words = st.sampled_from(sorted(TRUE_WORDS | FALSE_WORDS)).flatmap(
    lambda word: st.sampled_from([word, word.upper(), word.title(), f" {word}", f"{word}."])
)
json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 0.0, 1.0, 2, -1, 0.5, 10**400, float("nan"), [], {}, [True], ""]),
    st.integers(),
    words,
    st.text(max_size=5),
)


@given(json_values)
def test_flag_is_what_pydantic_makes_of_it(value: Any) -> None:
    """What it refuses is no flag, and not true; null is neither."""
    try:
        expected = engines_flag.validate_python(value)
    except ValidationError:
        assert (is_flag(value), is_true(value)) == (False, False)
    else:
        assert is_true(value) is (expected is True)
        assert is_flag(value) is (expected is not None)


@pytest.mark.parametrize("value", ["true", "Yes", "1", 1, 1.0, True], ids=repr)
def test_true_by_whatever_word(value: Any) -> None:
    """Those that vLLM streams for."""
    assert is_true(value)
