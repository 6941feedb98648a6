"""The fleet as a snapshot: what routing may know of instances at one moment.

Rules:

1. A snapshot is never changed, only replaced whole; a request keeps the one it started with.
2. Healthy (seen by probes and legs), enabled (wished by the operator) and draining are
   different things; `is_available` is the only place that joins them.
3. Everything is keyed by base model; adapters and aliases map to it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

from balancer.core.fleet.transfer_facts import NO_FACTS, TransferFacts
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId

NO_CONNECTOR = "none"
"""Connector of an instance that hands over nothing."""


class Role(StrEnum):
    """What an instance may be asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    ENCODE = "encode"

    @property
    def answers_clients(self) -> bool:
        """Decode and mixed instances produce the answer; the others only fill caches."""
        return self in {Role.DECODE, Role.MIXED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One engine address at one moment."""

    id: InstanceId
    alias: str
    """Short name shown to clients and in metric labels; never an address."""
    role: Role = Role.MIXED
    models: ServedModels | None = None
    """None until `/v1/models` was read once."""
    ranks: tuple[int, ...] = (0,)
    """Global data-parallel ranks behind this address."""
    rank_base: int = 0
    """Global number of the first rank: `X-data-parallel-rank` wants `rank - rank_base`."""
    connector: str = NO_CONNECTOR
    """Name of the PD connector, a key of the connectors given to the router; of an encode instance
    its encoder connector."""
    transfer: msgspec.Struct | None = None
    """Its `transfer:` settings, of the connector's own type (`core.settings.transfer`)."""
    ec_zmq_addrs: tuple[str, ...] = ()
    """Where each of its ranks receives what encode instances push; empty: nobody pushes to it."""
    facts: TransferFacts = NO_FACTS
    """What was learned of its side of transfers in its present life."""
    rank_cache_tokens: int | None = None
    """Tokens that fit the KV cache of one rank; None: it doesn't say."""
    healthy: bool = False
    enabled: bool = True
    draining: bool = False
    unhealthy_reason: str | None = None
    hold: str | None = None
    """Why it is kept from new requests whatever its health: drained, asleep, silent, leaving."""
    own_ranks: tuple[RankId, ...] = field(init=False, repr=False, compare=False)
    """Its ranks by their ids, made once: every request looks at them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "own_ranks", tuple(RankId(self.id, rank) for rank in self.ranks))

    @property
    def is_available(self) -> bool:
        """May get new requests."""
        is_wanted = self.enabled and not self.draining and self.hold is None
        return self.healthy and is_wanted and self.models is not None

    def rank_ids(self) -> Iterator[RankId]:
        return iter(self.own_ranks)

    def rank_header(self, rank: int) -> str | None:
        """Value of `X-data-parallel-rank` that pins `rank`; None where there is only one."""
        return str(rank - self.rank_base) if len(self.ranks) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All known instances, available or not."""

    instances: tuple[Instance, ...] = ()

    @cached_property
    def ranks(self) -> frozenset[RankId]:
        """Every rank of every instance."""
        return frozenset(rank for each in self.instances for rank in each.rank_ids())

    @cached_property
    def encoders(self) -> tuple[Instance, ...]:
        """Encode instances, available or not. Few fleets have any, and every chat asks."""
        return tuple(each for each in self.instances if each.role is Role.ENCODE)

    @cached_property
    def found(self) -> dict[tuple[str, str], Any]:
        """What was worked out of this snapshot, by what it is and the model: it can't change."""
        return {}

    def by_id(self, instance: InstanceId) -> Instance | None:
        return next((each for each in self.instances if each.id == instance), None)

    def serving(self, model: str) -> Sequence[Instance]:
        """Instances that list `model` under any name, available or not."""
        return [each for each in self.instances if each.models and each.models.serves(model)]
