"""Settings are decoded strictly, and refused by the key's own name."""

import math
from enum import StrEnum
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.settings.errors import (
    ConfigError,
    Secret,
    decode_settings,
    encode_custom,
    nearest,
)


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section."""

    policy: str = "kvlb"
    key: Secret | None = None
    limit_s: float = 1.0


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole file."""

    routing: Inner = Inner()
    many: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = {}
    maybe: Inner | None = None


class Ranged(msgspec.Struct, frozen=True):
    """Checks itself."""

    low: int = 0
    high: int = 1

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low: must not exceed `high`")


def test_a_structs_own_check_names_the_field() -> None:
    """The decoder knows the struct only."""
    with pytest.raises(ConfigError, match=r"^`range\.low`: must not exceed `high`$"):
        decode_settings({"low": 2}, Ranged, where="range")


def test_valid_settings_are_decoded() -> None:
    """What is written is what comes out, defaults included."""
    data = {"routing": {"policy": "session"}, "by_name": {"a": {}}, "many": [{}]}

    outer = decode_settings(data, Outer, where="")

    assert outer == Outer(routing=Inner(policy="session"), by_name={"a": Inner()}, many=(Inner(),))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(
            {"routing": {"polcy": 1}},
            "unknown key `balancer.routing.polcy`; did you mean `policy`?",
            id="struct-in-struct",
        ),
        pytest.param(
            {"many": [{}, {"limits": 1}]},
            "unknown key `balancer.many[1].limits`; did you mean `limit_s`?",
            id="list-item",
        ),
        pytest.param(
            {"by_name": {"a": {"kee": 1}}},
            "unknown key `balancer.by_name.a.kee`; did you mean `key`?",
            id="mapping-value",
        ),
        pytest.param(
            {"maybe": {"zzz": 1}},
            "unknown key `balancer.maybe.zzz`; valid here: `key`, `limit_s`, `policy`",
            id="optional-and-nothing-near",
        ),
        pytest.param({1: 2}, "unknown key `balancer.1`; valid here:", id="key-is-no-string"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(data: object, message: str) -> None:
    """The message has the full path and a suggestion."""
    with pytest.raises(ConfigError) as raised:
        decode_settings(data, Outer, where="balancer")

    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(
            {"routing": 3}, "`b.routing`: Expected `object`, got `int`", id="not-an-object"
        ),
        pytest.param(
            {"many": [{"limit_s": "x"}]},
            "`b.many[0].limit_s`: Expected `float`, got `str`",
            id="wrong-type-in-list",
        ),
        pytest.param({"routing": {"key": 7}}, "`b.routing.key`: Expected `str`", id="secret"),
        pytest.param([], "`b`: Expected `object`, got `array`", id="whole-section"),
        pytest.param({"many": {"a": 1}}, "`b.many`: Expected `array`", id="object-for-list"),
        pytest.param({"by_name": [1]}, "`b.by_name`: Expected `object`", id="list-for-object"),
    ],
)
def test_wrong_value_is_refused_with_its_path(data: object, message: str) -> None:
    """Types and ranges are msgspec's business, the path is ours."""
    with pytest.raises(ConfigError) as raised:
        decode_settings(data, Outer, where="b")

    assert str(raised.value).startswith(message)


def test_whole_file_has_no_path() -> None:
    """At the top there is no key to name."""
    with pytest.raises(ConfigError, match=r"^Expected `object`, got `null`$"):
        decode_settings(None, Outer, where="")


def test_list_at_the_top_is_named_by_number() -> None:
    """A section that is a list joins its path without a dot."""
    with pytest.raises(ConfigError, match=r"^`instances\[0\]`: Expected"):
        decode_settings([3], list[Inner], where="instances")


def test_secret_does_not_show() -> None:
    """Neither its repr nor its encoded form tells a secret."""
    inner = decode_settings({"key": "s3cret"}, Inner, where="")

    assert "s3cret" not in repr(inner)
    assert msgspec.to_builtins(inner, enc_hook=encode_custom)["key"] == "***"
    assert inner.key is not None
    assert inner.key.reveal() == "s3cret"


def test_secrets_are_equal_by_value() -> None:
    """Two configurations with the same secret are the same configuration."""
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert hash(Secret("a")) == hash(Secret("a"))


def test_only_secrets_are_encoded_specially() -> None:
    """Anything else is a mistake in the settings' types."""
    with pytest.raises(NotImplementedError):
        encode_custom(object())


def test_nothing_is_near_nothing() -> None:
    """Without valid names there is nothing to suggest."""
    assert nearest("x", []) == ""


@given(st.text(max_size=12))
def test_a_key_is_taken_or_refused_never_ignored(key: str) -> None:
    """Law: a mapping with one key decodes only if that key is a field."""
    if key in Inner.__struct_fields__:
        return
    with pytest.raises(ConfigError, match="unknown key"):
        decode_settings({key: None}, Inner, where="x")


class Colour(StrEnum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


class Choices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sections with choices."""

    colour: Colour | None = None
    size: Literal["big", "small"] = "big"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(
            {"colour": "rde"},
            "`colour`: Invalid enum value 'rde'; valid here: `red`, `blue`",
            id="enumeration",
        ),
        pytest.param(
            {"size": "tiny"},
            "`size`: Invalid enum value 'tiny'; valid here: `big`, `small`",
            id="literal",
        ),
        pytest.param({"size": 3}, "`size`: Expected `str`, got `int`", id="other-type"),
    ],
)
def test_wrong_choice_lists_the_valid_ones(data: object, message: str) -> None:
    """Nobody should have to look them up."""
    with pytest.raises(ConfigError) as raised:
        decode_settings(data, Choices, where="")

    assert str(raised.value) == message


def test_right_choice_is_taken() -> None:
    """By its value."""
    assert decode_settings({"colour": "red", "size": "small"}, Choices, where="") == Choices(
        colour=Colour.RED, size="small"
    )


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_number_must_be_finite(number: float) -> None:
    """YAML has `.inf` and `.nan`; no limit or time may be either."""
    with pytest.raises(ConfigError, match=r"`many\[0\].limit_s`: Expected a finite number"):
        decode_settings({"many": [{"limit_s": number}]}, Outer, where="")
