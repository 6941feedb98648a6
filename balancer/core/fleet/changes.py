"""Run-time changes of the fleet as they are kept and shared: one named value each.

Rules:

1. A name is `kind url`: what is said of one instance can be put and dropped without touching the
   rest, so that several processes may write at once and the last word on each counts.
2. A value that can't be read is skipped: another release may have written it. Nothing else is lost.
3. Keys of engines are part of a value only where it never leaves the process.

Cost: one decode per value when something has changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from balancer.core.fleet.roster import Changes
from balancer.core.fleet.transfer_facts import Registration
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import ConfigError, Secret, decode_settings, encode_custom
from indexer.core.types import InstanceId

ADDED, REMOVED, DRAINED, ASLEEP, REGISTERED = (
    "added",
    "removed",
    "drained",
    "asleep",
    "registered",
)

REGISTERED_FOR_S = 45.0
"""A registration that its balancer hasn't renewed for so long has ended with that balancer."""

Values = Mapping[str, bytes]


class ChangesUnavailableError(Exception):
    """The store doesn't answer. Nothing was changed."""


class _Shared(msgspec.Struct, frozen=True, kw_only=True):
    """A registered instance, for balancers that it doesn't speak to."""

    entry: dict[str, Any]
    facts: Registration
    at_s: float
    is_silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRegistration:
    """One that another balancer hears of."""

    settings: InstanceSettings
    facts: Registration
    is_silent: bool


def name_of(kind: str, instance: InstanceId) -> str:
    """What a change of this kind is kept under."""
    return f"{kind} {instance}"


def encode_entry(entry: InstanceSettings) -> bytes:
    """An added instance, its key in clear."""
    return msgspec.msgpack.encode(_plain(entry))


def encode_registration(
    entry: InstanceSettings, facts: Registration, *, at_s: float, is_silent: bool
) -> bytes:
    """A registered instance. `at_s` is wall-clock time: read by other processes."""
    shared = _Shared(entry=_plain(entry), facts=facts, at_s=at_s, is_silent=is_silent)
    return msgspec.msgpack.encode(shared)


def decode_changes(values: Values, entry_type: type[InstanceSettings]) -> Changes:
    """Everything that operators did."""
    added: dict[InstanceId, InstanceSettings] = {}
    removed: dict[InstanceId, str] = {}
    held: dict[str, set[InstanceId]] = {DRAINED: set(), ASLEEP: set()}
    for name, value in sorted(values.items()):
        kind, _, url = name.partition(" ")
        instance = InstanceId(url)
        if kind == ADDED:
            entry = _decode_entry(value, entry_type)
            if entry is not None:
                added[instance] = entry
        elif kind == REMOVED:
            removed[instance] = value.decode(errors="replace")
        elif kind in held:
            held[kind].add(instance)
    return Changes(
        added=added,
        removed=removed,
        drained=frozenset(held[DRAINED]),
        asleep=frozenset(held[ASLEEP]),
    )


def decode_registrations(
    values: Values, entry_type: type[InstanceSettings], now_s: float
) -> tuple[SharedRegistration, ...]:
    """Registered instances that somebody has renewed lately."""
    found: list[SharedRegistration] = []
    for name, value in sorted(values.items()):
        if name.partition(" ")[0] != REGISTERED:
            continue
        try:
            shared = msgspec.msgpack.decode(value, type=_Shared)
            settings = decode_settings(shared.entry, entry_type, where="")
        except (msgspec.DecodeError, UnicodeDecodeError, ConfigError):
            continue
        if now_s - shared.at_s < REGISTERED_FOR_S:
            found.append(
                SharedRegistration(
                    settings=settings, facts=shared.facts, is_silent=shared.is_silent
                )
            )
    return tuple(found)


def expired_registrations(values: Values, now_s: float) -> list[str]:
    """Names of those that nobody renews, or nobody can read."""
    found: list[str] = []
    for name, value in values.items():
        if name.partition(" ")[0] != REGISTERED:
            continue
        try:
            at_s = msgspec.msgpack.decode(value, type=_Shared).at_s
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # another release's: it tidies up itself
        if now_s - at_s >= 2 * REGISTERED_FOR_S:
            found.append(name)
    return found


def _plain(entry: InstanceSettings) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(entry, enc_hook=_reveal)
    return plain


def _reveal(value: object) -> object:
    """A change is kept to be decoded again, so asterisks would not do."""
    return value.reveal() if isinstance(value, Secret) else encode_custom(value)


def _decode_entry(value: bytes, entry_type: type[InstanceSettings]) -> InstanceSettings | None:
    try:
        return decode_settings(msgspec.msgpack.decode(value), entry_type, where="")
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError):
        return None
