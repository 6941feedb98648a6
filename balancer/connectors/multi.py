"""MultiConnector: several connectors in one engine, named in `transfer.children`.

Each child writes its own legs of the same request; their `kv_transfer_params`, headers and request
id are merged. Two children that use the same key can't be told apart by an engine (it fails such
requests), so they are refused at start (`children_conflicts`). Where one child wants both legs at
once, children that look for what has been stored (lmcache, offloading, example) are told of no
answer; what they don't find yet comes from the other child.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from balancer.connectors.contract import (
    Connector,
    HandOver,
    LegContext,
    LegRequest,
    PullContext,
    Style,
    settings_of,
    with_params,
)
from balancer.core.fleet.snapshot import Instance
from balancer.core.fleet.transfer_facts import Inquiry
from balancer.core.settings.transfer import ChildSettings

PARAMS = "kv_transfer_params"


class MultiConnector(Connector):
    """As its children are."""

    name = "multi"
    pairs_ranks = True
    """As one of them may want it; nobody is worse off."""
    pulls = True

    def __init__(self, known: Mapping[str, Connector]) -> None:
        """`known` are the connectors that can be children."""
        self._known = known

    def style(self, context: LegContext) -> Style:
        """Both at once if one of them needs it."""
        styles = {child.style(each) for child, each in self._each(context)}
        return "concurrent" if "concurrent" in styles else "serial"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """What all children send, in one body."""
        return _merged([child.prefill_leg(each) for child, each in self._each(context)])

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        """What all children send, in one body."""
        stored = prefill_answer
        if prefill_answer is None and self.style(context) == "concurrent":
            stored = {}
        return _merged([child.decode_leg(each, stored) for child, each in self._each(context)])

    def carries(self, request: HandOver, instance: Instance) -> bool:
        """Only what none of them would spoil."""
        return all(child.carries(request, each) for child, each in self._children(instance))

    def needs_prefill(self, instance: Instance) -> bool:
        """If one of them does."""
        return any(child.needs_prefill(each) for child, each in self._children(instance))

    def lease_s(self, context: LegContext) -> float | None:
        """The shortest."""
        leases = [child.lease_s(each) for child, each in self._each(context)]
        return min((each for each in leases if each is not None), default=None)

    def inquiry(self, instance: Instance) -> Inquiry | None:
        """The first that one of them has; two would have had to share their keys."""
        asked = (child.inquiry(each) for child, each in self._children(instance))
        return next((each for each in asked if each is not None), None)

    def mismatch(self, source: Instance, target: Instance) -> str | None:
        """Other children, or children that don't fit each other."""
        ours, theirs = (settings_of(each, ChildSettings).children for each in (source, target))
        if ours.keys() != theirs.keys():
            return f"their children are {_listed(ours)} and {_listed(theirs)}"
        pairs = zip(self._children(source), self._children(target), strict=True)
        told = (child.mismatch(left, right) for (child, left), (_, right) in pairs)
        return next((each for each in told if each is not None), None)

    def pull(self, context: PullContext) -> Mapping[str, Any] | None:
        """As the first that can."""
        targets = self._children(context.target)
        sources = {child.name: each for child, each in self._children(context.source)}
        for child, target in targets:
            if child.name in sources:
                asked = replace(context, target=target, source=sources[child.name])
                body = child.pull(asked)
                if body is not None:
                    return body
        return None

    def _each(self, context: LegContext) -> Iterator[tuple[Connector, LegContext]]:
        """Each child of the prefill instance, with the context as it is to see it."""
        targets = {child.name: each for child, each in self._children(context.decode)}
        for child, source in self._children(context.prefill):
            target = targets.get(child.name, context.decode)
            yield child, replace(context, prefill=source, decode=target)

    def _children(self, instance: Instance) -> Iterator[tuple[Connector, Instance]]:
        """In the order of their names, each with the instance as if it had no other."""
        for name, transfer in sorted(settings_of(instance, ChildSettings).children.items()):
            yield self._known[name], replace(instance, connector=name, transfer=transfer)


def children_conflicts(children: Iterable[Connector]) -> list[str]:
    """One sentence for each pair of children that can't be in one engine."""
    return [
        f"{left.name!r} and {right.name!r} both use {_listed(left.params() & right.params())}"
        for left, right in combinations(children, 2)
        if left.params() & right.params()
    ]


def _merged(legs: list[LegRequest]) -> LegRequest:
    body = legs[0].body
    params: dict[str, Any] = {}
    for leg in legs:
        params |= leg.body.get(PARAMS) or {}
    return LegRequest(
        body=with_params(body, params) if params else body,
        headers=tuple(header for leg in legs for header in leg.headers),
        request_id=next((leg.request_id for leg in legs if leg.request_id is not None), None),
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"
