"""Bounds what one rendering of a chat template may do: no thread is lost to a template that loops.

Rules:

1. Every turn of a loop and every call of a macro is a step; a rendering has `MAX_STEPS` of them. That
   is a hundred for each of 3,000 messages, and a fraction of a second.
2. What is rendered has at most `MAX_CHARS`.
3. Steps are counted by a filter that is put into the parsed template, so no template can do without.
4. No sum, product, power, `~`, `%` or padding makes a value that is much larger, and there is no `lipsum`.
   Some filters can still be given a large number: templates of clients are only rendered
   where the operator trusts them.

Cost: a call per step, about 0.1 us; a check per multiplication and call.
"""

import re
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import Environment, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS: Final = 300_000
MAX_CHARS: Final = 32 * 1024 * 1024
BUDGET: Final = "steps left"
"""Under this name a rendering finds its budget. No template can say a name with a blank."""
_SPEND: Final = "kvlb.spend"
_MEASURE: Final = "kvlb.measure"
_MAX_BITS: Final = 1_000_000
"""Of a number."""
_WIDE: Final = re.compile(r"\*|\d{8}")
"""A width in a `%` format that comes from elsewhere, or is over ten million."""


class TemplateEndlessError(Exception):
    """The template does more than any chat needs."""


@dataclass(slots=True)
class StepBudget:
    """What is left of one rendering's steps."""

    steps: int = MAX_STEPS

    def spend(self) -> None:
        """Take one. Raises TemplateEndlessError."""
        self.steps -= 1
        if self.steps < 0:
            raise TemplateEndlessError("too many steps")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, in which no single step makes something huge."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]  # minutes of nonsense; no chat template needs any

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute it. Raises TemplateEndlessError for what would be huge."""
        if type(left) is str and type(right) is str and operator == "+":  # most of all
            return _measured(left + right)
        if _is_huge(operator, left, right):
            raise TemplateEndlessError("too much in one step")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call it. Raises TemplateEndlessError for what would be huge."""
        if isinstance(getattr(obj, "__self__", None), str):  # `ljust` and its like
            numbers = [each for each in (*arguments, *named.values()) if isinstance(each, int)]
            if any(each > MAX_CHARS for each in numbers):
                raise TemplateEndlessError("too much in one step")
        return super().call(context, obj, *arguments, **named)


def _is_huge(operator: str, left: Any, right: Any) -> bool:
    if operator == "+":
        return _is_sized(left, right) and len(left) + len(right) > MAX_CHARS
    if operator == "%":
        return isinstance(left, str) and _WIDE.search(left) is not None
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return (bits * right if operator == "**" else bits + right.bit_length()) > _MAX_BITS
    for sized, times in ((left, right), (right, left)):
        if isinstance(sized, Sized) and isinstance(times, int):
            return len(sized) * times > MAX_CHARS
    return False


def _is_sized(left: Any, right: Any) -> bool:
    return isinstance(left, Sized) and isinstance(right, Sized)


class _Measuring(NodeTransformer):
    """Has the result of every `~` measured: no operator of the sandbox, but as good at doubling."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - jinja2's name
        """With its parts' own measured first."""
        self.generic_visit(node)
        measured = nodes.Filter(node, _MEASURE, [], [], None, None, lineno=node.lineno)
        return measured.set_environment(self._environment)


def _measured(text: str) -> str:
    if len(text) > MAX_CHARS:
        raise TemplateEndlessError("too much text")
    return text


def count_steps(environment: Environment, tree: nodes.Template) -> None:
    """Have every loop and macro of `tree` take its steps from the budget of its rendering."""
    environment.filters[_SPEND] = _spend
    environment.filters[_MEASURE] = _measured
    _Measuring(environment).visit(tree)
    repeated: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For)]
    repeated += tree.find_all(nodes.Macro)
    for each in repeated:
        spend = nodes.Filter(nodes.Const(None), _SPEND, [], [], None, None)
        each.body.insert(0, nodes.ExprStmt(spend).set_environment(environment))


def joined(pieces: Iterable[str]) -> str:
    """Put a rendering together. Raises TemplateEndlessError."""
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARS:
            raise TemplateEndlessError("too much text")
        kept.append(piece)
    return "".join(kept)


@pass_context
def _spend(context: Context, _: object) -> str:
    budget: StepBudget = context.parent[BUDGET]
    budget.spend()
    return ""
