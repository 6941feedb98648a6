"""Reads what the source says of a settings struct and of each of its fields.

A string under a field is thrown away by the interpreter, so the source is parsed. A field that a
subclass declares anew without a string keeps the words of the class it inherits from.

Cost: parses each module once per call; for a page that is printed, not for a running process.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise

import msgspec


def paragraphs(struct: type) -> tuple[str, ...]:
    """The struct's own docstring, each paragraph on one line."""
    text = inspect.cleandoc(struct.__dict__.get("__doc__") or "")
    return tuple(_one_line(each) for each in text.split("\n\n") if each.strip())


def field_docstrings(struct: type) -> Mapping[str, str]:
    """First paragraph of the string under each field, inherited ones included."""
    found: dict[str, str] = {}
    for each in reversed(struct.__mro__):
        if issubclass(each, msgspec.Struct) and each is not msgspec.Struct:
            found.update(_own(each))
    return found


def _own(struct: type) -> Iterator[tuple[str, str]]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    for statement, following in pairwise(body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, _one_line(inspect.cleandoc(text).split("\n\n")[0])
            case _:
                pass


def _one_line(text: str) -> str:
    return " ".join(text.split())
