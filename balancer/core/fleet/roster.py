"""Who is in the fleet: joins what file, operator, registrations and DNS say at one moment.

Rules:

1. An address is one instance. If several name it, the first counts: file, operator (added),
   registered, discovered. The others wait behind it.
2. A removal holds as long as its instance goes on being named just as it was when it was removed.
   Who changes or drops its entry in the file and names it anew has it back; so has an engine that
   stopped registering, or left DNS, and came back. What an operator has added since is a member all
   the same: removed is what the others say of it.
3. A hold (`drained`, `asleep`, `silent`, ...) keeps new requests away, nothing else. It ends with
   the instance.
4. An alias belongs to the first that has it; another gets one made of its role and address.

Pure: `Changes` is everything that isn't said by somebody else, so a store can keep and share it.

Cost: linear in instances.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
from xxhash import xxh3_64_hexdigest

from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import encode_custom
from indexer.core.addresses import without_loopback_names
from indexer.core.types import InstanceId

MAX_RUNTIME_MEMBERS = 512
"""Instances that aren't in the file. More are a fault of whoever adds them."""


class Origin(StrEnum):
    """Who named an instance; the earlier one wins."""

    FILE = "file"
    ADDED = "added"
    REGISTERED = "registered"
    DISCOVERED = "discovered"


class Hold(StrEnum):
    """Why an instance that may be well gets no new requests."""

    DRAINED = "drained"
    ASLEEP = "asleep"
    SILENT = "silent"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What operators did to the fleet while it ran."""

    added: Mapping[InstanceId, InstanceSettings] = field(default_factory=dict)
    removed: Mapping[InstanceId, str] = field(default_factory=dict)
    """With the fingerprint of the entry that was removed."""
    drained: frozenset[InstanceId] = frozenset()
    asleep: frozenset[InstanceId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One instance of the fleet."""

    settings: InstanceSettings
    origin: Origin
    hold: Hold | None = None

    @property
    def id(self) -> InstanceId:
        return self.settings.id


Named = Mapping[Origin, Sequence[InstanceSettings]]
"""What each source but the operator says now."""


def join_members(
    named: Named, changes: Changes, silent: frozenset[InstanceId] = frozenset()
) -> tuple[Member, ...]:
    """Return the fleet, in the order of its sources. `silent` are registered and not heard of."""
    members: list[Member] = []
    places: set[InstanceId] = set()
    out: set[InstanceId] = set()
    aliases: set[str] = set()
    for origin, entry in in_order(named, changes):
        place = without_loopback_names(entry.id)
        removed = changes.removed.get(entry.id)
        if removed is not None and origin is not Origin.ADDED and removed == fingerprint(entry):
            out.add(place)
        if place in places or (place in out and origin is not Origin.ADDED):
            continue
        places.add(place)
        if origin is not Origin.FILE and _is_over_limit(members):
            break
        settings = msgspec.structs.replace(entry, alias=None) if entry.name in aliases else entry
        aliases.add(settings.name)
        hold = _hold(entry.id, changes, silent if origin is Origin.REGISTERED else frozenset())
        members.append(Member(settings=settings, origin=origin, hold=hold))
    return tuple(members)


def in_order(named: Named, changes: Changes) -> Iterable[tuple[Origin, InstanceSettings]]:
    """Every entry, those that win first."""
    for origin in Origin:
        is_added = origin is Origin.ADDED
        for entry in changes.added.values() if is_added else named.get(origin, ()):
            yield origin, entry


def fingerprint(entry: InstanceSettings) -> str:
    """Another one for other settings. Names and keys don't make another instance."""
    plain = msgspec.structs.replace(entry, alias=None, api_key=None, api_key_env=None)
    shown: dict[str, Any] = msgspec.to_builtins(plain, enc_hook=encode_custom)
    return xxh3_64_hexdigest(msgspec.json.encode(shown, order="sorted"))


def named_otherwise(
    before: Iterable[InstanceSettings], now: Iterable[InstanceSettings]
) -> frozenset[InstanceId]:
    """Instances that a source has stopped naming, or names with other settings: removals end."""
    new = {entry.id: fingerprint(entry) for entry in now}
    return frozenset(entry.id for entry in before if new.get(entry.id) != fingerprint(entry))


def _is_over_limit(members: Sequence[Member]) -> bool:
    at_run_time = sum(member.origin is not Origin.FILE for member in members)
    return at_run_time >= MAX_RUNTIME_MEMBERS


def _hold(instance: InstanceId, changes: Changes, silent: frozenset[InstanceId]) -> Hold | None:
    if instance in changes.drained:
        return Hold.DRAINED
    if instance in changes.asleep:
        return Hold.ASLEEP
    return Hold.SILENT if instance in silent else None
