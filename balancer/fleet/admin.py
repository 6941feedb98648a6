"""Carries out what operators ask of the fleet's membership: add, remove, drain, undrain.

An instance is taken in only if it answers `/v1/models` with a model that the fleet serves, or with
the one that the request names. What can't be done is refused before anything has changed.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from balancer.config import BalancerConfig, checked_key
from balancer.core.control_errors import NAME_UNKNOWN, EngineCallError
from balancer.core.errors import (
    BadRequestError,
    ChangesLostError,
    MemberConflictError,
    MemberNotFoundError,
    MemberRefusedError,
)
from balancer.core.fleet.changes import ChangesUnavailableError
from balancer.core.fleet.member_requests import MemberName, amend_filed, read_entry, read_name
from balancer.core.fleet.roster import MAX_RUNTIME_MEMBERS, Member, Origin
from balancer.core.fleet.snapshot import Fleet
from balancer.core.http.own_mark import ANOTHER_BALANCER, OWN_ADDRESS
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import ConfigError
from balancer.core.settings.own_address import is_own_address
from balancer.fleet.members import Members
from indexer.core.addresses import without_loopback_names
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId

REFUSED = {
    "engine_unreachable": "nobody listens at this address",
    NAME_UNKNOWN: "its host name doesn't resolve on this machine",
    "probe_timeout": "it didn't answer in time",
    "unauthorized": "it wants another key: give `api_key`",
    "bad_model_list": "what it answers on /v1/models is no model list",
    OWN_ADDRESS: "this is where this balancer listens itself, not an engine",
    ANOTHER_BALANCER: "a kvlb balancer answers there, not an engine: name the engines behind it",
}


class ModelLister(Protocol):
    """Asks an instance for its models."""

    async def list_models(self, instance: InstanceId) -> ServedModels:
        """Raises EngineCallError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What became of an instance that was to go."""

    member: Member
    running: int
    """Legs on it when it was removed."""
    is_leaving: bool
    """It is waited for until they have ended."""


class FleetAdmin:
    """One per balancer."""

    def __init__(
        self,
        members: Members[BalancerConfig],
        *,
        engines: ModelLister,
        engine_keys: MutableMapping[InstanceId, str],
        fleet: Callable[[], Fleet],
    ) -> None:
        """`engine_keys` are those that `engines` uses."""
        self._members = members
        self._engines = engines
        self._engine_keys = engine_keys
        self._fleet = fleet

    async def add(self, body: Mapping[str, Any]) -> Member:
        """Take an instance in. Raises RequestError or ChangesLostError."""
        entry = read_entry(body, self._members.present.config.entry_type())
        filed = self._members.filed(entry.id)
        if filed is not None:
            entry = amend_filed(filed, entry, body)
        if entry != filed:  # else nothing of it has to be kept
            entry = self._with_key(entry)
        self._refuse_conflicts(entry)
        await self._check_models(entry)
        self._refuse_conflicts(entry)  # somebody else may have been quicker
        try:
            await self._members.add(entry)
        except ChangesUnavailableError as error:
            raise _lost() from error
        return self.member(MemberName(id=entry.id))

    async def remove(self, body: Mapping[str, Any]) -> Removal:
        """Let an instance go. Raises RequestError or ChangesLostError."""
        name = read_name(body)
        member = self.member(name)
        running = self._members.in_flight(member.id)  # who is forced out isn't counted afterwards
        try:
            await self._members.remove(member, force=name.force)
        except ChangesUnavailableError as error:
            raise _lost() from error
        is_leaving = any(each.id == member.id for each in self._members.present.leaving)
        return Removal(member=member, running=running, is_leaving=is_leaving)

    async def hold(self, body: Mapping[str, Any], *, drained: bool) -> Member:
        """Keep new requests from an instance, or let them come again."""
        member = self.member(read_name(body))
        try:
            await (self._members.drain if drained else self._members.undrain)(member.id)
        except ChangesUnavailableError as error:
            raise _lost() from error
        return self.member(MemberName(id=member.id))

    def member(self, name: MemberName) -> Member:
        """The one that is meant. Raises MemberNotFoundError."""
        for member in self._members.present.members:
            is_meant = member.settings.name == name.alias
            if name.id is not None:
                is_meant = without_loopback_names(member.id) == without_loopback_names(name.id)
            if is_meant and name.role in {None, member.settings.role.value}:
                return member
        what = name.id or f"`{name.alias}`"
        role = f" of role {name.role}" if name.role else ""
        raise MemberNotFoundError(f"no instance {what}{role} in the fleet")

    def _with_key(self, entry: InstanceSettings) -> InstanceSettings:
        if entry.api_key is None:
            return entry
        if self._members.is_shared:
            raise BadRequestError(
                "`api_key` would be stored in Redis: set `engine_api_key` in the file instead",
                param="api_key",
            )
        try:
            return msgspec.structs.replace(entry, api_key=checked_key(entry.api_key))
        except ConfigError as error:
            raise BadRequestError(str(error), param="api_key") from error

    def _refuse_conflicts(self, entry: InstanceSettings) -> None:
        present = self._members.present
        place = without_loopback_names(entry.id)
        for member in present.members:
            if without_loopback_names(member.id) == place:
                raise MemberConflictError(f"{entry.id} is in the fleet already")
            if entry.alias is not None and member.settings.name == entry.alias:
                raise MemberConflictError(f"another instance is called `{entry.alias}`")
        if is_own_address(entry.id, present.config.host, present.config.port):
            raise MemberRefusedError(f"{entry.id}: {REFUSED[OWN_ADDRESS]}", code=OWN_ADDRESS)
        at_run_time = sum(each.origin is not Origin.FILE for each in present.members)
        if at_run_time >= MAX_RUNTIME_MEMBERS:
            raise MemberConflictError(f"{MAX_RUNTIME_MEMBERS} instances were added already")
        _refuse_faults(entry, present.config)

    async def _check_models(self, entry: InstanceSettings) -> None:
        common = self._members.present.config.engine_api_key
        key = entry.api_key or common
        known = self._engine_keys.get(entry.id)
        if key is not None:
            self._engine_keys[entry.id] = key.reveal()
        try:
            models = await self._engines.list_models(entry.id)
        except EngineCallError as error:
            why = REFUSED.get(error.reason, error.reason)
            raise MemberRefusedError(f"{entry.id}: {why}", code=error.reason) from error
        finally:
            _restore(self._engine_keys, entry.id, known)
        self._refuse_other_models(entry, models)

    def _refuse_other_models(self, entry: InstanceSettings, models: ServedModels) -> None:
        named: str | None = getattr(entry, "model", None)
        if named is not None:
            if named in models.aliases:
                return
            raise MemberRefusedError(
                f"{entry.id} serves {models.base!r}, not {named!r}", code="wrong_model"
            )
        served = {each.models.base for each in self._fleet().instances if each.models is not None}
        if served and models.base not in served:
            hint = "to have it all the same name the model in `model`"
            raise MemberRefusedError(
                f"{entry.id} serves {models.base!r}, which nobody in this fleet does; {hint}",
                code="wrong_model",
            )


def _refuse_faults(entry: InstanceSettings, config: BalancerConfig) -> None:
    """By itself first: what is wrong with those that are there would hide what is wrong with it."""
    for instances in ((entry,), (*config.instances, entry)):
        number = len(instances) - 1
        try:
            msgspec.structs.replace(config, instances=instances).check_fleet()
        except ConfigError as error:
            if f"instances[{number}]" in str(error):
                raise BadRequestError(_of_the_new(str(error), number)) from error


def _restore(keys: MutableMapping[InstanceId, str], instance: InstanceId, key: str | None) -> None:
    if key is None:
        keys.pop(instance, None)
    else:
        keys[instance] = key


def _of_the_new(message: str, number: int) -> str:
    """The request has no list: its keys stand alone."""
    return message.replace(f"instances[{number}].", "")


def _lost() -> ChangesLostError:
    return ChangesLostError("the Redis that keeps changes of the fleet doesn't answer")
