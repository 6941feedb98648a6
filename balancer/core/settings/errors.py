"""Decodes settings into frozen structs, and refuses what it doesn't know by the key's own name.

Rules:

1. A key that no struct has is refused with its full path and the nearest key that exists.
2. A value of the wrong type or out of range is refused with its full path; infinity and NaN are
   out of every range, and of a choice the valid ones are listed. A struct's own check says
   `field: what is wrong` in its ValueError.
3. Nothing is guessed: no key is ignored, renamed or completed.

Cost: one walk over the data before msgspec decodes it; done once at start or reload.
"""

import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

SECRET_HINT = "***"  # noqa: S105 - what is shown instead of a secret


class ConfigError(Exception):
    """The configuration can't be used. The message names the key to change."""


class Secret:
    """A string that never shows in `repr`, logs or the configuration summary."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the string itself, for the one place that sends or compares it."""
        return self._value

    def __repr__(self) -> str:
        return f"Secret({SECRET_HINT!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


def decode_settings(data: object, type_: type[T], *, where: str) -> T:
    """Decode `data` (plain YAML or JSON values) as `type_`, or raise ConfigError naming the key.

    `where` is the path of `data` in the file, for example `balancer`; empty for the whole file.
    """
    _refuse_unknown_keys(data, type_, where)
    try:
        return msgspec.convert(data, type_, dec_hook=_decode_custom)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), where)) from error


def encode_custom(value: object) -> object:
    """For `msgspec.to_builtins(..., enc_hook=encode_custom)`: secrets leave as asterisks.

    Raises NotImplementedError for other types: msgspec's word for a value it can't encode.
    """
    if isinstance(value, Secret):
        return SECRET_HINT
    raise NotImplementedError(f"can't encode {type(value).__name__}")


def nearest(word: str, valid: Sequence[str]) -> str:
    """`; did you mean `x`?`, or the list of what is valid if nothing is near."""
    close = get_close_matches(word, valid, n=1)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; valid here: {', '.join(f'`{name}`' for name in sorted(valid))}" if valid else ""


def _decode_custom(type_: type, value: object) -> object:
    if type_ is Secret and isinstance(value, str):
        return Secret(value)
    raise ValueError(f"Expected `str`, got `{type(value).__name__}`")


def _explain(message: str, where: str) -> str:
    """Turn msgspec's `... - at `$.a[0].b`` into a sentence that begins with the key."""
    found = re.fullmatch(r"(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?", message, re.DOTALL)
    what = found["what"] if found else message
    path = (found["path"] or "") if found else ""
    key = _join(where, path.removeprefix("key in ").removeprefix("$").removeprefix("."))
    # A struct's own check is told with the path of the struct, and begins with the field's name.
    if named := re.fullmatch(r"(?P<field>[a-z_]+): (?P<what>.*)", what, re.DOTALL):
        key, what = _join(key, named["field"]), named["what"]
    return f"`{key}`: {what}" if key else what


def _join(where: str, key: str) -> str:
    if not where or not key:
        return where or key
    return f"{where}{key}" if key.startswith("[") else f"{where}.{key}"


def _refuse_unknown_keys(data: object, type_: object, where: str) -> None:
    """Walk `data` beside its type; msgspec would name the key but not the nearest valid one."""
    if isinstance(data, float) and not math.isfinite(data):
        raise ConfigError(f"`{where}`: Expected a finite number, got `{data}`")
    for walk in (_walk_struct, _walk_items, _walk_values, _check_choice):
        walk(data, type_, where)


def _check_choice(data: object, type_: object, where: str) -> None:
    choice = _option(type_, lambda each: bool(_choices(each)))
    if choice is None or not isinstance(data, str) or data in _choices(choice):
        return
    valid = ", ".join(f"`{each}`" for each in _choices(choice))
    raise ConfigError(f"`{where}`: Invalid enum value {data!r}; valid here: {valid}")


def _choices(type_: object) -> Sequence[str]:
    """The strings that an enumeration or a literal type allows; none for any other type."""
    if typing.get_origin(type_) is typing.Literal:
        return typing.get_args(type_)
    if isinstance(type_, type) and issubclass(type_, StrEnum):
        return list(type_)
    return ()


def _walk_struct(data: object, type_: object, where: str) -> None:
    struct = _option(
        type_, lambda each: isinstance(each, type) and issubclass(each, msgspec.Struct)
    )
    if struct is None or not isinstance(data, Mapping):
        return
    hints = typing.get_type_hints(struct, include_extras=False)
    keys = dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))
    for key, value in data.items():
        path = _join(where, str(key))
        if key not in keys:
            raise ConfigError(f"unknown key `{path}`{nearest(str(key), list(keys))}")
        _refuse_unknown_keys(value, hints[keys[key]], path)


def _walk_items(data: object, type_: object, where: str) -> None:
    sequence = _option(type_, lambda each: typing.get_origin(each) in {list, tuple, Sequence_})
    if sequence is None or not isinstance(data, list | tuple):
        return
    item = typing.get_args(sequence)[0]
    for number, value in enumerate(data):
        _refuse_unknown_keys(value, item, f"{where}[{number}]")


def _walk_values(data: object, type_: object, where: str) -> None:
    mapping = _option(type_, lambda each: typing.get_origin(each) in {dict, Mapping_})
    if mapping is None or not isinstance(data, Mapping):
        return
    item = typing.get_args(mapping)[1]
    for key, value in data.items():
        _refuse_unknown_keys(value, item, _join(where, str(key)))


Sequence_ = typing.get_origin(Sequence[int])
Mapping_ = typing.get_origin(Mapping[str, int])


def _option(type_: object, fits: Callable[[Any], bool]) -> Any:
    """`type_` itself or the first member of a union that fits; None if nothing does."""
    is_union = typing.get_origin(type_) in {typing.Union, types.UnionType}
    options = typing.get_args(type_) if is_union else (type_,)
    return next((each for each in options if fits(each)), None)
