"""Walks the settings: which keys there are, section by section, and what each means.

Rules:

1. The order is that of the fields, those that are inherited first.
2. A docstring may end in a sentence `Default: ...`. It is for keys whose typed default is null and whose
   absence means something, and is shown in place of that null.
3. What has no docstring has no meaning for the reader: a test refuses it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec import inspect
from msgspec.structs import FieldInfo

from balancer.core.settings.transfer import STRUCTS
from kvlb.reference.docstrings import field_docstrings, paragraphs
from kvlb.reference.kinds import default, kind, without_null
from kvlb.settings import KvlbSettings

DEFAULT = "Default: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One line of the file."""

    name: str
    """As the file spells it, with its section: `routing.policy`."""
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A mapping of the file, or one entry of a list of them, or the top of the file."""

    name: str
    """Empty for the top of the file."""
    title: str
    prose: tuple[str, ...]
    keys: tuple[Key, ...]


def sections() -> tuple[Section, ...]:
    """Everything: `instances` first, then the top of the file, then its sections."""
    (instances,) = (each for each in _fields(KvlbSettings) if each.name == "instances")
    entry = inspect.type_info(instances.type)
    assert isinstance(entry, inspect.VarTupleType)  # noqa: S101 - for the type checker
    return (
        _section("instances", entry.item_type, prefix=""),
        _section("", inspect.type_info(KvlbSettings), prefix=""),
        *(
            _section(field.name, type_, prefix=f"{field.name}.")
            for field in _fields(KvlbSettings)
            if isinstance(type_ := _type(field), inspect.StructType)
        ),
        *(
            _section(field.name, item, prefix=f"{field.name}[].")
            for field in _fields(KvlbSettings)
            if (item := _item(_type(field))) is not None and field.name != "instances"
        ),
    )


def transfer_sections() -> tuple[Section, ...]:
    """What may stand under an instance's `transfer`, connector by connector."""
    return tuple(
        _section(f"transfer.{name}", inspect.type_info(struct), prefix="")
        for name, struct in sorted(STRUCTS.items())
    )


def _item(type_: inspect.Type) -> inspect.StructType | None:
    """Of a list of mappings, the mapping."""
    item = type_.item_type if isinstance(type_, inspect.VarTupleType) else None
    return item if isinstance(item, inspect.StructType) else None


def _section(name: str, type_: inspect.Type, *, prefix: str) -> Section:
    assert isinstance(type_, inspect.StructType)  # noqa: S101 - for the type checker
    title, *prose = paragraphs(type_.cls)
    return Section(name=name, title=title, prose=tuple(prose), keys=tuple(_keys(type_.cls, prefix)))


def _keys(struct: type[msgspec.Struct], prefix: str) -> Iterator[Key]:
    words = field_docstrings(struct)
    for field in _fields(struct):
        type_ = _type(field)
        if isinstance(type_, inspect.StructType) or _item(type_) is not None:
            continue  # a section of its own
        meaning, absence = words.get(field.name, ""), ""
        if field.default is None:
            meaning, _, absence = meaning.partition(DEFAULT)
        yield Key(
            name=prefix + field.name,
            kind=kind(field.name, type_),
            default=absence.removesuffix(".") or default(field),
            meaning=meaning.strip(),
        )


def _fields(struct: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
    return msgspec.structs.fields(struct)


def _type(field: FieldInfo) -> inspect.Type:
    return without_null(inspect.type_info(field.type))
