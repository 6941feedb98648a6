"""How an engine hands message content to a chat template: as text, or as the list of its parts.

Rules:

1. `openai` (parts) if the template loops over the content of something that a loop took from
   `messages`, directly, through a macro's argument, or outside of macros through a variable named
   `content`; else `string`.
2. This is how vLLM looks at a template, oversights included: it is about being handed the same.
   Where it gives up (a loop with several targets, an attribute that is assigned to), so do we.

Cost: once per template.
"""

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]


class _GivenUpError(Exception):
    """The template does something that vLLM doesn't expect here."""


def find_content_format(tree: nodes.Template) -> ContentFormat:
    """Return what the engine would choose for this template."""
    try:
        return "openai" if any(_content_loops(tree)) else "string"
    except _GivenUpError:
        return "string"


def _content_loops(tree: nodes.Template) -> Iterator[bool]:
    messages = _message_names(tree)
    within, handed = _macro_loops(tree, messages)
    for loop in tree.find_all(nodes.For):
        if _loops_over(loop, messages) or _loops_over_name(loop, within, handed):
            _target(loop.target)
            yield True


def _loops_over(loop: nodes.For, messages: list[str]) -> bool:
    return any(_is_access(loop.iter, name, "content") for name in messages)


def _loops_over_name(loop: nodes.For, within: set[int], handed: dict[int, set[str]]) -> bool:
    if not isinstance(loop.iter, nodes.Name):
        return False
    if loop.iter.name in handed.get(id(loop), ()):
        return True
    return id(loop) not in within and loop.iter.name == "content"


def _message_names(tree: nodes.Template) -> list[str]:
    """Names that loops give to one message."""
    lists = _names_of_messages(tree)
    return [
        _target(loop.target)
        for loop in tree.find_all(nodes.For)
        if any(_is_access(loop.iter, name) for name in lists)
    ]


def _names_of_messages(tree: nodes.Template) -> list[str]:
    """`messages`, and whatever it is assigned to, directly or through others."""
    names = ["messages"]
    for name in names:  # grows on the way
        for each in tree.find_all(nodes.Assign):
            if _is_access(each.node, name) and _target(each.target) not in names:
                names.append(_target(each.target))
    return names


def _macro_loops(tree: nodes.Template, messages: list[str]) -> tuple[set[int], dict[int, set[str]]]:
    """Loops within macros, and by what names those macros are handed a message's content."""
    within: set[int] = set()
    handed: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        names = set(_content_arguments(tree, macro, messages))
        for loop in macro.find_all(nodes.For):
            within.add(id(loop))
            if names:
                handed[id(loop)] = names
    return within, handed


def _content_arguments(
    tree: nodes.Template, macro: nodes.Macro, messages: list[str]
) -> Iterator[str]:
    arguments = [each.name for each in macro.args]
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = list(zip(arguments, call.args, strict=False))
        given += [(each.key, each.value) for each in call.kwargs if each.key in arguments]
        for name, value in given:
            if any(_is_access(value, message, "content") for message in messages):
                yield name


def _target(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _GivenUpError
    return target.name


def _is_access(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Tell if `node` is the variable `name` (or its `key`), perhaps filtered, tested or sliced."""
    match node:
        case nodes.Filter() | nodes.Test() | nodes.Getitem(arg=nodes.Slice()):
            return _is_access(node.node, name, key)
        case nodes.Getitem(node=inner, arg=nodes.Const(value=value)) if key is not None:
            return value == key and _is_access(inner, name) and isinstance(inner, nodes.Name)
        case nodes.Getattr(node=inner, attr=attr) if key is not None:
            return attr == key and _is_access(inner, name) and isinstance(inner, nodes.Name)
        case nodes.Name():
            return key is None and node.name == name and node.ctx == "load"
        case _:
            return False
