"""Who of those that could serve a request isn't asked for now: what routing needs to know of it."""

from collections.abc import Sequence
from typing import Protocol

from balancer.core.fleet.snapshot import Instance
from indexer.core.types import InstanceId, RankId


class Vetting(Protocol):
    """Leaves out instances that are held back."""

    def usable(
        self, instances: Sequence[Instance], exclude: frozenset[RankId]
    ) -> Sequence[Instance]:
        """Those that aren't held back; all, if that left none that isn't excluded."""
        ...

    def reason(self, instance: InstanceId) -> str | None:
        """Why an instance is held back; None: it isn't."""
        ...


class NoVetting:
    """Everybody is asked."""

    def usable(
        self,
        instances: Sequence[Instance],
        exclude: frozenset[RankId],  # noqa: ARG002 - the contract's signature
    ) -> Sequence[Instance]:
        return instances

    def reason(self, instance: InstanceId) -> str | None:  # noqa: ARG002 - likewise
        return None
