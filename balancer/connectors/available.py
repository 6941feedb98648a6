"""Which connectors there are, and whether a fleet's instances fit together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from balancer.connectors.contract import Connector
from balancer.connectors.encoders import EcMooncakeConnector, encoder_connectors
from balancer.connectors.example import ExampleConnector
from balancer.connectors.lmcache import LmcacheConnector
from balancer.connectors.mooncake import MooncakeConnector
from balancer.connectors.moriio import MoriioConnector
from balancer.connectors.multi import MultiConnector, children_conflicts
from balancer.connectors.nixl import NixlConnector
from balancer.connectors.nixl_push import NixlPushConnector
from balancer.connectors.none import NoConnector
from balancer.connectors.offloading import OffloadingConnector
from balancer.connectors.p2p_nccl import P2pNcclConnector
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.settings.errors import nearest
from balancer.core.settings.transfer import ChildSettings


def connectors() -> dict[str, Connector]:
    """Every connector by the name used in the configuration."""
    single: tuple[Connector, ...] = (
        ExampleConnector(),
        LmcacheConnector(),
        MooncakeConnector(),
        MoriioConnector(),
        NixlConnector(),
        NixlPushConnector(),
        OffloadingConnector(),
        P2pNcclConnector(),
    )
    known = {connector.name: connector for connector in single}
    return known | {each.name: each for each in (MultiConnector(known), NoConnector())}


def known_connectors(role: Role) -> frozenset[str]:
    """Names that an instance of `role` may have."""
    return frozenset(encoder_connectors() if role is Role.ENCODE else connectors())


def connector_fault(instance: Instance) -> str | None:
    """Say why the instance's connector can't be, beginning with the key; None if it can."""
    names = known_connectors(instance.role)
    if instance.connector not in names:
        near = nearest(instance.connector, list(names))
        return f"connector`: no connector `{instance.connector}`{near}"
    known = connectors()
    connector = known.get(instance.connector)  # None: an encode instance's
    if connector is not None and connector.has_one_address and len(instance.ranks) > 1:
        return (
            f"ranks`: connector `{instance.connector}` names an instance by one address: give each "
            "rank an engine, and an entry, of its own"
        )
    if not isinstance(instance.transfer, ChildSettings):
        return None
    unknown = [name for name in instance.transfer.children if name not in known]
    if unknown:
        near = nearest(unknown[0], list(known))
        return f"transfer.children`: no connector `{unknown[0]}`{near}"
    conflicts = children_conflicts(known[name] for name in sorted(instance.transfer.children))
    return f"transfer.children`: {conflicts[0]}" if conflicts else None


def connector_conflicts(instances: Iterable[Instance]) -> list[str]:
    """One sentence for each instance that can't hand over to those of its model that it works for.

    Where models aren't known yet, only a prefill instance that fits nobody is a conflict.
    """
    fleet = list(instances)
    known = connectors()
    decode = [each for each in fleet if each.role is Role.DECODE]
    conflicts: list[str] = []
    for source in fleet:
        if source.role is not Role.PREFILL:
            continue
        conflicts.extend(_sentence(source, each) for each in _strangers(source, decode))
        if source.connector in known:
            conflicts.extend(_mismatches(source, decode, known[source.connector]))
    return conflicts + [each.sentence for each in encoder_conflicts(fleet)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConflict:
    """An encode instance, what is wrong with it and what to change."""

    instance: str
    seen: str
    change: str

    @property
    def sentence(self) -> str:
        return f"{self.seen}: {self.change}"


def encoder_conflicts(fleet: Sequence[Instance]) -> list[EncoderConflict]:
    """Encode instances of one model with different connectors, or with nobody to push to."""
    encoders = [each for each in fleet if each.role is Role.ENCODE]
    conflicts = [
        EncoderConflict(
            instance=other.alias,
            seen=f"encode instances {first.alias} and {other.alias} use connectors "
            f"{first.connector!r} and {other.connector!r}",
            change="give all of one model the same",
        )
        for first, other in pairwise(encoders)
        if _same_model(first, other) and first.connector != other.connector
    ]
    pushing = [each for each in encoders if each.connector == EcMooncakeConnector.name]
    for consumer in _consumers(fleet):
        source = next((each for each in pushing if _same_model(each, consumer)), None)
        ranks, given = len(consumer.ranks), len(consumer.ec_zmq_addrs)
        if source is not None and ranks != given:
            conflicts.append(
                EncoderConflict(
                    instance=consumer.alias,
                    seen=f"encode instance {source.alias} pushes to {consumer.alias}, which has "
                    f"{given} `ec_zmq_addrs` for {ranks} ranks",
                    change="name one for each, its engine's `ec_ip` and `ec_port`",
                )
            )
    return conflicts


def _consumers(fleet: Sequence[Instance]) -> list[Instance]:
    """Who computes prompts that encode instances have a part in."""
    return [each for each in fleet if each.role in {Role.PREFILL, Role.MIXED}]


def _strangers(source: Instance, decode: Sequence[Instance]) -> list[Instance]:
    same_model = [each for each in decode if _same_model(source, each)]
    unknown = [each for each in decode if source.models is None or each.models is None]
    if not same_model and any(each.connector == source.connector for each in unknown):
        return []
    return [each for each in same_model or unknown if each.connector != source.connector]


def _same_model(left: Instance, right: Instance) -> bool:
    if left.models is None or right.models is None:
        return False
    return left.models.base == right.models.base


def _sentence(source: Instance, target: Instance) -> str:
    return (
        f"prefill instance {source.alias} uses connector {source.connector!r}, decode instance "
        f"{target.alias} uses {target.connector!r}: give both the same connector"
    )


def _mismatches(source: Instance, decode: Sequence[Instance], connector: Connector) -> list[str]:
    """The same connector, but not the same use of it."""
    sentences = []
    for target in decode:
        are_known = source.models is not None and target.models is not None
        if target.connector != source.connector or (are_known and not _same_model(source, target)):
            continue
        told = connector.mismatch(source, target)
        if told is not None:
            sentences.append(
                f"prefill instance {source.alias} and decode instance {target.alias} both use "
                f"connector {source.connector!r}, but {told}"
            )
    return sentences
