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


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConflict:
    """An instance of a prefill/decode fleet that can't hand over, or be handed over to."""

    instance: str
    sentence: str


def connector_conflicts(instances: Iterable[Instance]) -> list[str]:
    """One sentence for each instance that can't hand over to those of its model that it works for.

    Where models aren't known yet, only a prefill instance that fits nobody is a conflict.
    """
    fleet = list(instances)
    told = [each.sentence for each in pair_conflicts(fleet)]
    return told + [each.sentence for each in encoder_conflicts(fleet)]


def pair_conflicts(fleet: Sequence[Instance]) -> list[PairConflict]:
    """Instances of a model that no other has the connector of, and pairs that use one differently.

    Pairs with a connector each may stand side by side: each is whole.
    """
    known = connectors()
    sources = [each for each in fleet if each.role is Role.PREFILL]
    targets = [each for each in fleet if each.role is Role.DECODE]
    conflicts = _unpaired(sources, targets)
    for source in sources:
        if source.connector in known:
            conflicts += _mismatches(source, targets, known[source.connector])
    return conflicts


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


def _unpaired(sources: Sequence[Instance], targets: Sequence[Instance]) -> list[PairConflict]:
    """Whoever has nobody on the other side, once each."""
    conflicts: list[PairConflict] = []
    named: set[str] = set()
    for source in sources:
        stranger = _stranger(source, targets)
        if stranger is not None:
            named.add(stranger.alias)
            conflicts.append(_differ(source.alias, source, stranger))
    for target in targets:
        others = [each for each in sources if _same_model(each, target)]
        is_paired = not others or any(each.connector == target.connector for each in others)
        if not is_paired and target.alias not in named:
            conflicts.append(_differ(target.alias, others[0], target))
    return conflicts


def _stranger(source: Instance, targets: Sequence[Instance]) -> Instance | None:
    """A decode instance to name to a prefill instance that fits none; None: it fits one."""
    same_model = [each for each in targets if _same_model(source, each)]
    unknown = [each for each in targets if source.models is None or each.models is None]
    fits_unknown = any(each.connector == source.connector for each in unknown)
    if any(each.connector == source.connector for each in same_model):
        return None
    if not same_model and fits_unknown:
        return None
    return next(iter(same_model or unknown), None)


def _same_model(left: Instance, right: Instance) -> bool:
    if left.models is None or right.models is None:
        return False
    return left.models.base == right.models.base


def _differ(instance: str, source: Instance, target: Instance) -> PairConflict:
    return PairConflict(
        instance=instance,
        sentence=(
            f"prefill instance {source.alias} uses connector {source.connector!r}, decode instance "
            f"{target.alias} uses {target.connector!r}: give both the same connector"
        ),
    )


def _mismatches(
    source: Instance, decode: Sequence[Instance], connector: Connector
) -> list[PairConflict]:
    """The same connector, but not the same use of it."""
    conflicts = []
    for target in decode:
        are_known = source.models is not None and target.models is not None
        if target.connector != source.connector or (are_known and not _same_model(source, target)):
            continue
        told = connector.mismatch(source, target)
        if told is not None:
            sentence = (
                f"prefill instance {source.alias} and decode instance {target.alias} both use "
                f"connector {source.connector!r}, but {told}"
            )
            conflicts.append(PairConflict(instance=source.alias, sentence=sentence))
    return conflicts
