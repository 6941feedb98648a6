"""Which connectors there are, and whether a fleet's instances fit together."""

from collections.abc import Iterable, Sequence

from balancer.connectors.contract import Connector
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
from balancer.core.fleet import Instance, Role
from balancer.core.settings_errors import nearest
from balancer.core.transfer_settings import ChildSettings


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


def connector_fault(instance: Instance) -> str | None:
    """Say why the instance's connector can't be, beginning with the key; None if it can."""
    known = connectors()
    if instance.connector not in known:
        near = nearest(instance.connector, list(known))
        return f"connector`: no connector `{instance.connector}`{near}"
    if not isinstance(instance.transfer, ChildSettings):
        return None
    unknown = [name for name in instance.transfer.children if name not in known]
    if unknown:
        near = nearest(unknown[0], list(known))
        return f"transfer.children`: no connector `{unknown[0]}`{near}"
    conflicts = children_conflicts(known[name] for name in sorted(instance.transfer.children))
    return f"transfer.children`: {conflicts[0]}" if conflicts else None


def connector_conflicts(instances: Iterable[Instance]) -> list[str]:
    """One sentence for each prefill instance that can't hand over to its model's decode instances.

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
    return conflicts


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
