"""docs/configuration.md is what the typed settings say of themselves."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from kvlb.errors import SettingsError
from kvlb.reference.docstrings import field_docstrings, paragraphs
from kvlb.reference.keys import Key, sections
from kvlb.reference.kinds import default, kind
from kvlb.reference.page import render_page, render_section
from kvlb.settings import KvlbSettings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
KEYS = [pytest.param(key, id=f"{each.name}-{key.name}") for each in sections() for key in each.keys]


class Above(msgspec.Struct):
    """Has a title.

    Says more,
    on two lines.
    """

    kept: int = 1
    """First paragraph,
    on two lines.

    Not for the reader."""
    renewed: int = 1
    """Old words."""
    silent: int = 1


class Below(Above):  # noqa: D101 - as it may be
    kept: int = 2
    renewed: int = 2
    """New words."""


class Kinds(msgspec.Struct):
    """One field of each kind."""

    required: str
    flag: bool = True
    limit_s: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    room_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 * 1024 * 1024
    count: int = 0
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    only: Literal["a"] = "a"
    word: Literal["a", "b", "c"] | None = None
    names: tuple[str, ...] = ()
    by_name: dict[str, int] = {}


def test_page_is_what_the_settings_say() -> None:
    """It is generated and committed, so that it can be read without running anything."""
    assert PAGE.read_text("utf-8") == render_page(), "run `make docs`, and commit what it writes"


@pytest.mark.parametrize("key", KEYS)
def test_every_key_says_what_it_means(key: Key) -> None:
    """In one sentence or more, under the field."""
    assert key.meaning.endswith((".", "?")), "write a docstring under the field"


def test_every_key_of_the_settings_is_there_once() -> None:
    """Also one of a section that nobody had heard of when the page was made."""
    names = [key.name for each in sections() if each.name != "instances" for key in each.keys]

    assert sorted(names) == sorted(keys_of(KvlbSettings()))


def keys_of(settings: msgspec.Struct, prefix: str = "") -> list[str]:
    found = []
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if name in {
            "redis",
            "registration",
            "lmcache_notices",
            "discovery",
        }:  # not there unless asked for
            found += [key.name for each in sections() if each.name == name for key in each.keys]
        elif isinstance(value, msgspec.Struct):
            found += keys_of(value, f"{prefix}{name}.")
        elif name != "instances":
            found.append(prefix + name)
    return found


def test_words_say_what_holds_where_null_means_something() -> None:
    """They leave the meaning for the column of defaults."""
    (key,) = (each.values[0] for each in KEYS if each.id == "redis-redis.password_env")

    assert isinstance(key, Key)
    assert key.default == "`KVLB_REDIS_PASSWORD`, if that is set"
    assert key.meaning == "Environment variable that holds the password."


def test_section_can_be_had_alone() -> None:
    """What an operator asks for while the file is open."""
    shown = render_section("redis")

    assert shown in render_page()
    assert "`redis.prefix`" in shown
    assert "routing.policy" not in shown


def test_unknown_section_names_the_nearest() -> None:
    """As an unknown key of the file does."""
    with pytest.raises(SettingsError, match="did you mean `redis`"):
        render_section("reddis")


def test_words_of_a_field_are_its_first_paragraph() -> None:
    """A subclass may have better ones, or none of its own."""
    assert field_docstrings(Below) == {
        "kept": "First paragraph, on two lines.",
        "renewed": "New words.",
    }


def test_words_of_a_struct_are_its_own() -> None:
    """Paragraph by paragraph."""
    assert paragraphs(Above) == ("Has a title.", "Says more, on two lines.")
    assert paragraphs(Below) == ()


@pytest.mark.parametrize(
    ("name", "words", "absent"),
    [
        ("required", "text", "required"),
        ("flag", "`true` or `false`", "`true`"),
        ("limit_s", "seconds > 0", "0.5"),
        ("room_bytes", "bytes ≥ 1", "67108864 (64 MiB)"),
        ("count", "whole number", "0"),
        ("share", "number, 0 to 1", "1"),
        ("only", "`a`", "`a`"),
        ("word", "`a`, `b` or `c`", "none"),
        ("names", "list: text", "none"),
        ("by_name", "mapping: text → whole number", "none"),
    ],
)
def test_types_and_defaults_are_said_for_people(name: str, words: str, absent: str) -> None:
    """Units come from the name, bounds from the type."""
    (field,) = (each for each in msgspec.structs.fields(Kinds) if each.name == name)

    assert kind(name, msgspec.inspect.type_info(field.type)) == words
    assert default(field) == absent


@pytest.mark.parametrize("type_", [bytes, Path])
def test_type_without_words_is_a_bug(type_: Any) -> None:
    """Whoever brings a new one writes what it is."""
    with pytest.raises(TypeError, match="`key`"):
        kind("key", msgspec.inspect.type_info(type_))
