"""`kvlb bench decisions`: recorded decisions made again with other weights.

Rules:

1. A log is what `/explain/recent` answers, or one such decision a line. Only decisions with the terms of
   two candidates or more say anything.
2. A candidate's cost is the sum of its recorded terms, each times its weight; the least one wins, of
   equals the one that was chosen.
3. Every decision is made again for itself, with what was known then: what later requests would have
   found, had earlier ones gone elsewhere, no log tells. `kvlb bench routing` does.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvlb.errors import SettingsError

HALF, DOUBLE = 0.5, 2.0
SHOWN_CHANGES = 20


class Candidate(msgspec.Struct, frozen=True):
    """One rank, and what it was expected to cost."""

    instance: str
    rank: int
    terms: dict[str, float | None]
    """Seconds; None isn't a number in JSON, and counts as endless."""

    def cost_s(self, weights: Mapping[str, float]) -> float:
        """Its terms, weighed."""
        return sum(
            weights.get(name, 1.0) * (float("inf") if value is None else value)
            for name, value in self.terms.items()
            if weights.get(name, 1.0)
        )

    @property
    def name(self) -> str:
        return f"{self.instance}/{self.rank}"


class _Leg(msgspec.Struct, frozen=True):
    chosen: Candidate
    considered: list[Candidate]


class _Plan(msgspec.Struct, frozen=True):
    decode: _Leg


class Decision(msgspec.Struct, frozen=True):
    """One finished request."""

    request_id: str
    plan: _Plan | None = None

    def winner(self, weights: Mapping[str, float]) -> Candidate:
        """Who is chosen with these weights. Only of one that is `told`."""
        assert self.plan is not None  # noqa: S101 - told
        leg = self.plan.decode
        # The chosen one comes first, so that it stays the choice among equals.
        return min((leg.chosen, *leg.considered), key=lambda each: each.cost_s(weights))

    @property
    def is_told(self) -> bool:
        """Whether it says what else there was."""
        return self.plan is not None and len(self.plan.decode.considered) > 1

    def changes(self, weights: Mapping[str, float]) -> bool:
        """Whether it goes elsewhere than without weights."""
        return self.winner(weights).name != self.winner({}).name


class _Page(msgspec.Struct, frozen=True):
    decisions: list[Decision] | None = None
    """None: the page is one decision."""


def read_decisions(text: str) -> list[Decision]:
    """Decisions that say anything. Raises SettingsError."""
    try:
        decisions = list(_decode(text))
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise SettingsError(f"no log of decisions: {error}") from error
    told = [each for each in decisions if each.is_told]
    if not told:
        raise SettingsError(
            f"none of {len(decisions)} decisions has the terms of several candidates; ask "
            "`/explain/recent?limit=100` of a balancer with more than one instance"
        )
    return told


def _decode(text: str) -> Iterator[Decision]:
    first, _, rest = text.strip().partition("\n")
    if rest and first.strip() != "{" and '"decisions"' not in first:
        for line in text.splitlines():
            if line.strip():
                yield msgspec.json.decode(line, type=Decision)
        return
    told = msgspec.json.decode(text, type=_Page).decisions
    yield from [msgspec.json.decode(text, type=Decision)] if told is None else told


def read_weights(options: Iterable[str]) -> dict[str, float]:
    """`TERM=FACTOR`, each. Raises SettingsError."""
    weights = {}
    for option in options:
        name, _, value = option.partition("=")
        try:
            weights[name] = float(value)
        except ValueError as error:
            raise SettingsError(f"--weight: write TERM=FACTOR, not {option!r}") from error
        if not 0 <= weights[name] < inf:
            raise SettingsError(f"--weight: a factor is a number of 0 or more, not {value!r}")
    return weights


def decide_again(source: str, options: Sequence[str], *, as_json: bool, console: Console) -> None:
    """Print what the log `source` (`-`: standard input) says with other weights."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    except OSError as error:
        raise SettingsError(f"{source}: {error.strerror}") from error
    decisions, weights = read_decisions(text), read_weights(options)
    names = list(dict.fromkeys(name for each in decisions for name in _terms(each)))
    unknown = sorted(set(weights) - set(names))
    if unknown:
        raise SettingsError(f"--weight: no term {unknown[0]!r}; there are {', '.join(names)}")
    rows = [_row(name, decisions) for name in names]
    changed = [each for each in decisions if each.changes(weights)]
    if as_json:
        whole = {
            "decisions": len(decisions),
            "changed": [
                {
                    "request_id": each.request_id,
                    "without": each.winner({}).name,
                    "with": each.winner(weights).name,
                }
                for each in changed
            ],
            "terms": rows,
        }
        console.print_json(json.dumps(whole))
        return
    _show_terms(rows, len(decisions), console)
    if weights:
        _show_changes(changed, weights, len(decisions), console)


def _terms(decision: Decision) -> Iterable[str]:
    return decision.winner({}).terms


def _row(name: str, decisions: Sequence[Decision]) -> dict[str, Any]:
    """What one term decides."""
    chosen = [each.winner({}) for each in decisions]
    whole_s = sum(each.cost_s({}) for each in chosen)
    return {
        "term": name,
        "share": sum(each.terms.get(name) or 0.0 for each in chosen) / (whole_s or 1.0),
        "without": sum(each.changes({name: 0.0}) for each in decisions),
        "half": sum(each.changes({name: HALF}) for each in decisions),
        "double": sum(each.changes({name: DOUBLE}) for each in decisions),
    }


def _show_terms(rows: Sequence[Mapping[str, Any]], decisions: int, console: Console) -> None:
    table = Table(
        title=f"\nOf {decisions} decisions, so many go elsewhere",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for title in ("term", "share of the cost", "without it", "at half", "doubled"):
        table.add_column(title, justify="left" if title == "term" else "right")
    for row in rows:
        counts = (str(row[name]) for name in ("without", "half", "double"))
        table.add_row(row["term"], f"{row['share']:.1%}", *counts)
    console.print(table)


def _show_changes(
    changed: Sequence[Decision], weights: Mapping[str, float], decisions: int, console: Console
) -> None:
    told = ", ".join(f"{name} x {factor:g}" for name, factor in weights.items())
    console.print(f"With {told}: {len(changed)} of {decisions} go elsewhere.")
    for each in changed[:SHOWN_CHANGES]:
        before, after = each.winner({}).name, each.winner(weights).name
        console.print(f"  {each.request_id}: {before} -> {after}", highlight=False, markup=False)
    if len(changed) > SHOWN_CHANGES:
        console.print(f"  and {len(changed) - SHOWN_CHANGES} more")
