"""Which connectors there are, and whether a fleet's instances fit together."""

from collections.abc import Iterable, Sequence

from balancer.connectors.contract import Connector
from balancer.connectors.example import ExampleConnector
from balancer.connectors.nixl import NixlConnector
from balancer.connectors.none import NoConnector
from balancer.core.fleet import Instance, Role


def connectors() -> dict[str, Connector]:
    """Every connector by the name used in the configuration."""
    known: tuple[Connector, ...] = (ExampleConnector(), NixlConnector(), NoConnector())
    return {connector.name: connector for connector in known}


def connector_conflicts(instances: Iterable[Instance]) -> list[str]:
    """One sentence for each prefill instance that can't hand over to its model's decode instances.

    Where models aren't known yet, only a prefill instance that fits nobody is a conflict.
    """
    fleet = list(instances)
    decode = [each for each in fleet if each.role is Role.DECODE]
    conflicts: list[str] = []
    for source in fleet:
        if source.role is not Role.PREFILL:
            continue
        conflicts.extend(_sentence(source, each) for each in _strangers(source, decode))
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
