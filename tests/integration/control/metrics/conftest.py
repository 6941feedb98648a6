"""Metrics of a fleet of two, and the records of requests that they count."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.routing.plan import Candidate, Choice, Reason, RoutePlan
from balancer.fleet.metrics import FleetCollector
from balancer.metrics import BalancerMetrics
from indexer.core.model_cards import parse_model_list
from indexer.core.types import InstanceId, RankId, Trust


def _instance(alias: str, role: Role = Role.DECODE) -> Instance:
    """A healthy instance of `base` with one adapter."""
    cards = [{"id": "base"}, {"id": "alias"}, {"id": "ad", "parent": "base"}]
    return Instance(
        id=InstanceId(f"http://{alias}:1"),
        alias=alias,
        role=role,
        healthy=True,
        models=parse_model_list({"data": cards}),
    )


class Bench:
    """Metrics over a fleet that a test changes."""

    def __init__(self) -> None:
        self.fleet = Fleet(instances=(_instance("a"), _instance("b")))
        self.registry = CollectorRegistry()
        self.ledger = LocalLedger(clock=lambda: 0.0)
        self.metrics = BalancerMetrics(self.registry, lambda: self.fleet)
        self.unknown_ranks = 0
        self.silent_ranks = 0
        collector = FleetCollector(
            fleet=lambda: self.fleet,
            ledger=self.ledger,
            unknown_ranks=lambda: self.unknown_ranks,
            silent_ranks=lambda: self.silent_ranks,
            fleet_bugs=lambda: 0,
            lost_reports=lambda: 4,
            full_reports=lambda: 5,
            trust=lambda _: Trust.DEGRADED,
        )
        self.registry.register(collector)

    def serve(self, *aliases: str, role: Role = Role.DECODE) -> None:
        """These are the fleet from now on."""
        self.fleet = Fleet(instances=tuple(_instance(each, role) for each in aliases))

    @staticmethod
    def leg(kind: str = "decode", alias: str = "a", **fields: Any) -> LegRecord:
        """One finished leg."""
        known: dict[str, Any] = {"overlap_tokens": 0, "started_s": 10.0, "first_byte_s": 10.5}
        return LegRecord(kind=kind, alias=alias, **(known | fields))

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def observe(self, *legs: LegRecord, **fields: Any) -> None:
        plan = RoutePlan(
            decode=Choice(
                candidate=Candidate(
                    rank=RankId(self.fleet.instances[0].id, 0), instance=self.fleet.instances[0]
                ),
                cost_s=0.0,
            ),
            reason=fields.pop("reason", Reason.DECODE_HAS_CACHE),
        )
        known: dict[str, Any] = {
            "request_id": "r",
            "path": "/v1/completions",
            "arrived_s": 10.0,
            "ended_s": 12.0,
            "model": "base",
            "base_model": "base",
            "status": 200,
            "plan": plan,
        }
        self.metrics.observe(RequestRecord(legs=list(legs), **(known | fields)))


@pytest.fixture
def bench() -> Bench:
    """It has the decode instances `a` and `b`."""
    return Bench()
