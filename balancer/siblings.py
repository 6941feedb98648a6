"""The other processes of one balancer: what `/metrics` and `/explain/recent` show of all of them.

Here is the port, what it is without siblings, and the way from a registry to figures and back.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from balancer.core.decision_log import DecisionLog, TimedDecision
from balancer.core.merged_figures import Family, Figures, Series


class Siblings(Protocol):
    """Asks all processes of this balancer, this one among them. None: there is nobody to ask."""

    async def figures(self) -> Figures | None: ...
    async def recent(self, limit: int) -> Sequence[TimedDecision] | None: ...


class Alone:
    """A balancer of one process."""

    async def figures(self) -> None:
        return None

    async def recent(self, limit: int) -> None:  # noqa: ARG002 - as the port has it
        return None


class Views:
    """What this process shows, by itself and together with its siblings."""

    def __init__(
        self, registry: CollectorRegistry, decisions: DecisionLog, siblings: Siblings
    ) -> None:
        self._registry = registry
        self._decisions = decisions
        self._siblings = siblings

    def own_figures(self) -> Figures:
        """Of this process alone."""
        return read_figures(self._registry)

    def own_recent(self, limit: int) -> Sequence[TimedDecision]:
        """Of this process alone, newest first."""
        return self._decisions.timed(limit)

    async def exposition(self) -> bytes:
        """`/metrics`."""
        figures = await self._siblings.figures()
        if figures is None:
            return generate_latest(self._registry)
        return render_figures(figures)

    async def recent(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """The last decisions of all processes, newest first."""
        timed = await self._siblings.recent(limit)
        if timed is None:
            return self._decisions.latest(limit)
        newest = sorted(timed, key=lambda each: each.ended_s, reverse=True)
        return [each.decision for each in newest[:limit]]


class _Rendered(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        for family in self._figures:
            metric = Metric(family.name, family.help, family.kind)
            for each in family.series:
                metric.add_sample(each.name, dict(each.labels), each.value)
            yield metric


def read_figures(registry: CollectorRegistry) -> list[Family]:
    """Everything in `registry` now."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [
                Series(each.name, tuple(each.labels.items()), float(each.value))
                for each in metric.samples
            ],
        )
        for metric in registry.collect()
    ]


def render_figures(figures: Figures) -> bytes:
    """As Prometheus reads it."""
    registry = CollectorRegistry()
    registry.register(_Rendered(figures))
    return generate_latest(registry)
