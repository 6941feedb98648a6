"""docs/configuration.md names every key of the indexer and of an instance, with its default."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from indexer.config import IndexerConfig
from indexer.redis_index.settings import RedisSettings
from kvlb.settings import InstanceEntry, KvlbSettings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
ROWS = re.compile(r"^\| ((?:`[a-z_.]+`(?:, )?)+) \|(.*)\|$", re.MULTILINE)


def documented() -> dict[str, str]:
    """The rest of its row by key."""
    return {
        key: rest
        for keys, rest in ROWS.findall(PAGE.read_text("utf-8"))
        for key in re.findall(r"`([a-z_.]+)`", keys)
    }


def fields_of(struct: type[msgspec.Struct]) -> list[Any]:
    return [each for each in msgspec.structs.fields(struct) if each.name != "instances"]


def test_every_key_of_the_indexer_is_documented() -> None:
    """And none that doesn't exist."""
    keys = {key.removeprefix("indexer.") for key in documented() if key.startswith("indexer.")}

    assert keys == {each.name for each in fields_of(IndexerConfig)}


@pytest.mark.parametrize("field", fields_of(IndexerConfig), ids=lambda each: each.name)
def test_defaults_of_the_indexer_are_as_documented(field: Any) -> None:
    """The number in the third column is the one in the code."""
    default = documented()[f"indexer.{field.name}"].split("|")[1].strip()

    assert default == ("none" if field.default is None else f"{field.default:g}")


def test_every_key_of_an_instance_is_documented() -> None:
    """Where its events are included."""
    assert {each.name for each in fields_of(InstanceEntry)} <= documented().keys()


def test_every_section_of_the_file_is_documented() -> None:
    """A key of the top level is a row or the head of rows."""
    heads = {key.partition(".")[0] for key in documented()}

    assert {each.name for each in fields_of(KvlbSettings)} <= heads


@pytest.mark.parametrize("field", fields_of(RedisSettings), ids=lambda each: each.name)
def test_keys_of_redis_are_documented_with_their_defaults(field: Any) -> None:
    """And no others."""
    keys = {key.removeprefix("redis.") for key in documented() if key.startswith("redis.")}
    default = documented()[f"redis.{field.name}"].split("|")[1].strip()

    assert keys == {each.name for each in fields_of(RedisSettings)}
    shown = f"{field.default:g}" if isinstance(field.default, int | float) else str(field.default)
    assert default == ("none" if field.default is None else shown)
