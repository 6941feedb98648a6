"""Says a field's type and default in the words of somebody who edits the file.

Rules:

1. A number's noun is its unit, which is the end of its name, a rate's what there is per second; its
   bounds follow.
2. A choice is its words, by the alphabet.
3. Null is no kind of its own: a key that may be left out says so by its default.
"""

from typing import Any

import msgspec
from msgspec import inspect

from balancer.core.settings.errors import Secret

UNITS = ("s", "ms", "bytes", "tokens", "blocks", "batches")
"""What a name can end in; two of them are short for something."""
LONG = {"s": "seconds", "ms": "milliseconds"}
MIB = 1 << 20


def kind(name: str, type_: inspect.Type) -> str:
    """The type of the field `name`. Raises TypeError for one that has no words yet."""
    match without_null(type_):
        case inspect.IntType() | inspect.FloatType() as number:
            return _number(name, number)
        case inspect.LiteralType(values=words):
            return _choice([str(word) for word in words])
        case inspect.EnumType(cls=enum):
            return _choice([str(member.value) for member in enum])
        case inspect.DictType() as mapping:
            return _mapping(mapping)
        case inspect.VarTupleType(item_type=item):
            return f"list: {kind('', item)}"
        case simple:
            return _simple(name, simple)


def default(field: msgspec.structs.FieldInfo) -> str:
    """What holds where the key is left out."""
    value: Any = field.default
    if field.required:
        return "required"
    if value in {None, (), msgspec.NODEFAULT}:  # the last is a mapping, made anew each time
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return _figure(value)
    return f"`{value}`"


def without_null(type_: inspect.Type) -> inspect.Type:
    """The one member of a union that isn't null; any other type is itself."""
    if not isinstance(type_, inspect.UnionType):
        return type_
    (found,) = (each for each in type_.types if not isinstance(each, inspect.NoneType))
    return found


def _number(name: str, type_: inspect.IntType | inspect.FloatType) -> str:
    plain = "whole number" if isinstance(type_, inspect.IntType) else "number"
    noun = _unit(name) or plain
    if type_.ge is not None and type_.le is not None:
        return f"{noun}, {type_.ge:g} to {type_.le:g}"
    if type_.ge is not None:
        return f"{noun} ≥ {type_.ge:g}"
    return noun if type_.gt is None else f"{noun} > {type_.gt:g}"


def _unit(name: str) -> str | None:
    rest, _, unit = name.rpartition("_")
    if rest.endswith("_per") and unit == "s":
        return f"{rest.removesuffix('_per')} per second"
    return LONG.get(unit, unit) if rest and unit in UNITS else None


def _choice(words: list[str]) -> str:
    *rest, last = (f"`{word}`" for word in words)
    return f"{', '.join(rest)} or {last}" if rest else last


def _mapping(type_: inspect.DictType) -> str:
    if isinstance(type_.value_type, inspect.AnyType):
        return "mapping"  # what may stand in it is said elsewhere
    return f"mapping: {kind('', type_.key_type)} → {kind('', type_.value_type)}"


def _figure(value: float) -> str:
    if value and value % MIB == 0:
        return f"{value} ({value // MIB} MiB)"
    return str(value) if isinstance(value, int) else f"{value:g}"


def _simple(name: str, type_: inspect.Type) -> str:
    if isinstance(type_, inspect.BoolType):
        return "`true` or `false`"
    if isinstance(type_, inspect.StrType):
        return "text"
    if isinstance(type_, inspect.StructType):
        return "mapping"  # its keys are named in what the key means
    if isinstance(type_, inspect.CustomType) and type_.cls is Secret:
        return "secret"
    raise TypeError(f"`{name}`: no words for {type_}; add them here")
