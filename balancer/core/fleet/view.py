"""The fleet as clients and operators see it: merged model list, readiness, status.

Rules:

1. Clients see models of available instances that answer them, each name once, every engine field
   kept: what only a prefill instance has loaded can't be asked for.
2. Ready means: some base model has an available instance that answers clients.
3. Addresses and settings are for operators; the client-facing views hold aliases at most.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.ledger import LoadLedger
from indexer.core.types import RankId, Trust

RankFacts = Mapping[RankId, Mapping[str, Any]]
"""What the indexer says of each rank: trust, epoch, held blocks; JSON values."""


def merge_models(fleet: Fleet) -> Sequence[Mapping[str, Any]]:
    """Cards of every model that can be asked for now, in the order of the fleet."""
    merged: dict[str, Mapping[str, Any]] = {}
    for instance in fleet.instances:
        if not instance.role.answers_clients:
            continue
        if instance.is_available and instance.models is not None:
            for card in instance.models.cards:
                merged.setdefault(card["id"], card)
    return list(merged.values())


def readiness(fleet: Fleet) -> tuple[bool, Sequence[str]]:
    """Whether requests can be routed, and what keeps instances out."""
    answering = [each for each in fleet.instances if each.role.answers_clients]
    is_ready = any(each.is_available for each in answering)
    if not fleet.instances:
        return False, ["no instance is configured"]
    if not answering:
        return False, ["no instance has the role decode or mixed: none answers clients"]
    out = [each for each in fleet.instances if not each.is_available]
    return is_ready, [f"{each.alias}: {unavailable_reason(each)}" for each in out]


def unavailable_reason(instance: Instance) -> str | None:
    """Why an instance gets no new requests; None if it does."""
    if instance.is_available:
        return None
    if not instance.enabled:
        return "disabled"
    if instance.hold is not None:
        return instance.hold
    if instance.draining:
        return "draining"
    return instance.unhealthy_reason or "models_unknown"


def example_status(fleet: Fleet) -> Mapping[str, Any]:
    """The fields of vLLM's example proxies. A mixed instance answers as a decode instance does."""
    prefill = [each.id for each in fleet.instances if each.role is Role.PREFILL]
    decode = [each.id for each in fleet.instances if each.role.answers_clients]
    return {
        "prefill_node_count": len(prefill),
        "decode_node_count": len(decode),
        "prefill_nodes": [_host_and_port(each) for each in prefill],
        "decode_nodes": [_host_and_port(each) for each in decode],
        "encode_node_count": len(fleet.encoders),
        "encode_nodes": [_host_and_port(each.id) for each in fleet.encoders],
    }


def _host_and_port(instance: str) -> str:
    return instance.partition("://")[2]


def render_instance(
    instance: Instance,
    ledger: LoadLedger,
    facts: RankFacts,
    trust: Callable[[RankId], tuple[Trust, str | None]],
    breaker: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """One instance for `/status`. `trust` is what routing believes of a rank, and why no more."""
    models = instance.models
    return {
        "alias": instance.alias,
        "url": instance.id,
        "role": instance.role.value,
        "connector": instance.connector,
        "rank_cache_tokens": instance.rank_cache_tokens,
        "available": instance.is_available,
        "healthy": instance.healthy,
        "enabled": instance.enabled,
        "draining": instance.draining or instance.hold is not None,
        "reason": unavailable_reason(instance),
        "breaker": breaker,
        "models": None
        if models is None
        else {
            "base": models.base,
            "aliases": sorted(models.aliases - {models.base}),
            "adapters": sorted(models.adapters),
        },
        "ranks": [
            {
                "rank": rank.rank,
                "trust": believed.value,
                "trust_reason": why,
                "load": to_builtins(ledger.load(rank)),
                "index": facts.get(rank),
            }
            for rank, (believed, why) in ((each, trust(each)) for each in instance.rank_ids())
        ],
    }
