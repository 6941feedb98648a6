"""docs/configuration.md names every key of the file, with its default."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

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


def sections() -> dict[str, type[msgspec.Struct]]:
    """Struct by the name of its section."""
    found: dict[str, type[msgspec.Struct]] = {"redis": RedisSettings}
    for each in msgspec.structs.fields(KvlbSettings):
        if isinstance(each.default, msgspec.Struct):
            found[each.name] = type(each.default)
    return found


KEYS = [
    pytest.param(
        f"{section}.{field.name}", getattr(struct(), field.name), id=f"{section}.{field.name}"
    )
    for section, struct in sections().items()
    for field in fields_of(struct)
] + [
    pytest.param(field.name, field.default, id=field.name)
    for field in fields_of(KvlbSettings)
    if field.name not in sections()
]


def rendered(default: object) -> str:
    """As the page writes it."""
    match default:
        case None | {}:
            return "none"
        case bool():
            return str(default).lower()
        case float():
            return f"{default:g}"
        case str():
            return f"`{default}`"
        case _:
            return str(default)


@pytest.mark.parametrize(("key", "default"), KEYS)
def test_every_key_is_documented_with_its_default(key: str, default: object) -> None:
    """The page and the typed settings say the same."""
    cells = [cell.strip() for cell in documented()[key].split("|")]

    if key != "redis.password_env":  # its default depends on the environment
        assert rendered(default) in cells[:2]


def test_no_key_is_documented_that_does_not_exist() -> None:
    """A key that was removed leaves the page, too."""
    known = {str(each.values[0]) for each in KEYS} | {
        each.name for each in fields_of(InstanceEntry)
    }

    assert documented().keys() - known == set()


def test_every_key_of_an_instance_is_documented() -> None:
    """Where its events are included."""
    assert {each.name for each in fields_of(InstanceEntry)} <= documented().keys()


def test_every_section_of_the_file_is_documented() -> None:
    """A key of the top level is a row or the head of rows."""
    heads = {key.partition(".")[0] for key in documented()}

    assert {each.name for each in fields_of(KvlbSettings)} <= heads
