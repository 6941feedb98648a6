"""Bounds what one rendering of a chat template may do: no thread is lost to a template that loops.

Rules:

1. Every turn of a loop and every call of a macro is a step; a rendering has `MAX_STEPS` of them. That
   is a hundred for each of 3,000 messages, and a fraction of a second.
2. What is rendered has at most `MAX_CHARS`.
3. Steps are counted by a filter that is put into the parsed template, so no template can do without.
   A single expression can still be made to take long (`"x" * 10**9`): templates of clients are only
   rendered where the operator trusts them.

Cost: a call per step, about 0.1 us.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from jinja2 import Environment, nodes, pass_context
from jinja2.runtime import Context

MAX_STEPS: Final = 300_000
MAX_CHARS: Final = 32 * 1024 * 1024
BUDGET: Final = "steps left"
"""Under this name a rendering finds its budget. No template can say a name with a blank."""
_SPEND: Final = "kvlb.spend"


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


def count_steps(environment: Environment, tree: nodes.Template) -> None:
    """Have every loop and macro of `tree` take its steps from the budget of its rendering."""
    environment.filters[_SPEND] = _spend
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
