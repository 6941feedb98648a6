"""Engines that announce themselves: reads their messages, remembers who spoke when.

Rules (vLLM's MoRIIO and P2P-NCCL connectors, docs/connectors.md):

1. A message is one msgpack map. `HELLO` means nothing; `P` and `D` announce a prefill or decode
   instance, over and over. Nobody ever says goodbye, so silence is what tells.
2. All that are registered move blocks the same way (`transfer_mode`); the first one sets it. Once
   nobody is registered the next one may set another.
3. The same HTTP address announced anew replaces what was known of it. The usual names of this machine
   (`localhost`, 127.0.0.1, [::1]) are one address; it is known by the first of them that was announced.
4. What can't be used is refused with a constant reason, and changes nothing.

Invariant: at most `max_instances` entries. Cost: constant per message that changes nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address, ip_network
from typing import Any, Literal

import msgspec

from balancer.core.fleet.snapshot import Role
from balancer.core.fleet.transfer_facts import Registration, TransferMode
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.registration import RegistrationSettings
from indexer.core.addresses import parse_instance_id, without_loopback_names
from indexer.core.types import InstanceId

MAX_MESSAGE_BYTES = 64 * 1024
MAX_RANKS = 4096
ROLES = {"P": Role.PREFILL, "D": Role.DECODE}
_WITH_PORT = re.compile(r":[0-9]+\Z")
MODES: tuple[TransferMode, ...] = ("READ", "WRITE")


class RegistrationRefusedError(Exception):
    """A message that can't be used. `reason` is constant, fit for a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """One engine as it describes itself."""

    id: InstanceId
    role: Role
    facts: Registration


class RegistrationBook:
    """Who is registered."""

    def __init__(self, settings: RegistrationSettings) -> None:
        self._settings = settings
        self._networks = [ip_network(each) for each in settings.networks]
        self._announced: dict[InstanceId, Announced] = {}
        """By the address without names of this machine, as the next."""
        self._heard_s: dict[InstanceId, float] = {}
        self._silent: frozenset[InstanceId] = frozenset()

    @property
    def transfer_mode(self) -> TransferMode | None:
        """How blocks move, as the first of them said."""
        modes = (each.facts.transfer_mode for each in self._announced.values())
        return next((mode for mode in modes if mode is not None), None)

    @property
    def silent(self) -> frozenset[InstanceId]:
        """Registered, and not heard of for some beats."""
        return self._silent

    def announced(self) -> tuple[Announced, ...]:
        """Everybody, the silent ones too."""
        return tuple(self._announced.values())

    def entry(self, announced: Announced, entry_type: type[InstanceSettings]) -> InstanceSettings:
        """The engine as an instance of the fleet."""
        usual = "p2p_nccl" if announced.facts.transfer_mode is None else "moriio"
        return entry_type(
            url=announced.id,
            role=announced.role,
            connector=self._settings.connector or usual,
            ranks=announced.facts.dp_size,
        )

    def on_message(self, payload: bytes, now_s: float) -> bool:
        """Take a message; True if it changed who is registered, and how.

        Raises RegistrationRefusedError.
        """
        announced = self._read(payload)
        if announced is None:
            return False
        place = without_loopback_names(announced.id)
        known = self._announced.get(place)
        if known is not None:
            announced = replace(announced, id=known.id)
        self._check(announced, is_new=known is None)
        self._announced[place] = announced
        self._heard_s[place] = now_s
        was_silent = announced.id in self._silent
        self._silent -= {announced.id}
        return was_silent or known != announced

    def on_time(self, now_s: float) -> bool:
        """Let time pass; True if somebody fell silent or left."""
        before = self._silent, len(self._announced)
        for each, heard_s in list(self._heard_s.items()):
            if now_s - heard_s >= self._settings.remove_s:
                del self._announced[each], self._heard_s[each]
        self._silent = frozenset(
            self._announced[each].id
            for each, heard_s in self._heard_s.items()
            if now_s - heard_s >= self._settings.silent_s
        )
        return before != (self._silent, len(self._announced))

    def _check(self, announced: Announced, *, is_new: bool) -> None:
        if is_new and len(self._announced) >= self._settings.max_instances:
            raise RegistrationRefusedError("too_many")
        others = (each for each in self._announced.values() if each.id != announced.id)
        if any(each.facts.transfer_mode != announced.facts.transfer_mode for each in others):
            raise RegistrationRefusedError("transfer_mode")

    def _read(self, payload: bytes) -> Announced | None:
        """None for what means nothing."""
        body = _decode(payload)
        match body.get("type"):
            case "HELLO":
                return None
            case "P" | "D" as kind:
                role = ROLES[kind]
            case _:
                raise RegistrationRefusedError("type")
        http_address = _text(body, "http_address")
        facts = Registration(
            http_address=http_address,
            zmq_address=_text(body, "zmq_address"),
            dp_size=_size(body, "dp_size"),
            tp_size=_size(body, "tp_size"),
            transfer_mode=_mode(body),
        )
        return Announced(id=self._address(http_address), role=role, facts=facts)

    def _address(self, http_address: str) -> InstanceId:
        try:
            if not _WITH_PORT.search(http_address):
                raise ValueError("no port")  # noqa: TRY301
            instance = parse_instance_id(f"http://{http_address}")
        except ValueError as error:
            raise RegistrationRefusedError("http_address") from error
        if self._networks:
            host = instance.removeprefix("http://").rpartition(":")[0].strip("[]")
            try:
                address = ip_address(host)
            except ValueError as error:
                raise RegistrationRefusedError("network") from error
            if not any(address in network for network in self._networks):
                raise RegistrationRefusedError("network")
        return instance


def _decode(payload: bytes) -> Mapping[str, Any]:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise RegistrationRefusedError("too_long")
    try:
        body = msgspec.msgpack.decode(payload, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RegistrationRefusedError("not_a_map") from error
    return body


def _text(body: Mapping[str, Any], key: Literal["http_address", "zmq_address"]) -> str:
    value = body.get(key)
    # It becomes a part of request ids, which are headers.
    if not isinstance(value, str) or not 0 < len(value) <= 512:
        raise RegistrationRefusedError(key)
    if not value.isascii() or not value.isprintable() or " " in value:
        raise RegistrationRefusedError(key)
    return value


def _size(body: Mapping[str, Any], key: Literal["dp_size", "tp_size"]) -> int:
    value = body.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_RANKS:
        raise RegistrationRefusedError(key)
    return value


def _mode(body: Mapping[str, Any]) -> TransferMode | None:
    value = body.get("transfer_mode")
    if value is None:
        return None
    mode = next((each for each in MODES if each == value), None)
    if mode is None:
        raise RegistrationRefusedError("transfer_mode")
    return mode
