"""Owns the fleet's membership: joins its sources, keeps run-time changes, lets instances finish.

`core.fleet.roster` says who is a member; here that is done whenever a source says something else, and
whoever watches and follows instances is told. An instance that leaves gets no new requests and goes
when nothing runs on it any more.

Run-time changes live in this process's memory, or in a `ChangeStore` that several processes share. A
store that fails costs a change its success (503), never a request anything.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog

from balancer.config import BalancerConfig
from balancer.core.fleet.changes import (
    ADDED,
    ASLEEP,
    DRAINED,
    REGISTERED,
    REMOVED,
    ChangesUnavailableError,
    Values,
    decode_changes,
    decode_registrations,
    encode_entry,
    encode_registration,
    expired_registrations,
    name_of,
)
from balancer.core.fleet.registrations import RegistrationBook
from balancer.core.fleet.roster import (
    Changes,
    Hold,
    Member,
    Origin,
    fingerprint,
    join_members,
    named_otherwise,
)
from balancer.core.fleet.transfer_facts import Registration
from balancer.core.settings.control import InstanceSettings
from indexer.core.addresses import without_loopback_names
from indexer.core.types import InstanceId

POLL_S = 1.0
"""How soon a change made in another process is seen here."""
SHARE_S = 10.0
"""How often the others are told again who is registered here."""
LEAVING_POLL_S = 0.1
_WITH_ADDITION = (REMOVED, DRAINED, ASLEEP)
"""Changes that end when an instance is added."""

_logger = structlog.stdlib.get_logger(__name__)

Config = TypeVar("Config", bound=BalancerConfig)


class ChangeStore(Protocol):
    """Named values, shared by processes. Every method may raise ChangesUnavailableError."""

    async def load(self) -> Values: ...
    async def put(self, name: str, value: bytes) -> None: ...
    async def drop(self, names: Iterable[str]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership(Generic[Config]):
    """The fleet's members at one moment."""

    config: Config
    """Settings with every member under `instances`."""
    members: tuple[Member, ...]
    leaving: tuple[InstanceSettings, ...] = ()
    """No members any more, but something still runs on them."""
    registrations: Mapping[InstanceId, Registration] = field(default_factory=dict)

    @property
    def watched(self) -> tuple[InstanceSettings, ...]:
        return (*(member.settings for member in self.members), *self.leaving)

    @property
    def holds(self) -> Mapping[InstanceId, Hold]:
        """Who gets no new requests, and why."""
        held = {each.id: each.hold for each in self.members if each.hold is not None}
        return held | {each.id: Hold.LEAVING for each in self.leaving}


class Members(Generic[Config]):
    """One per process. Lives on one event loop."""

    def __init__(
        self,
        config: Config,
        *,
        wall_clock: Callable[[], float],
        store: ChangeStore | None = None,
        book: RegistrationBook | None = None,
        in_flight: Callable[[InstanceId], int] = lambda _: 0,
    ) -> None:
        """Without `in_flight` nobody is waited for."""
        self.on_change: Callable[[Membership[Config]], None] = lambda _: None
        """Called with each new membership, on the loop; it must not block."""
        self._config = config
        self._entry_type = config.entry_type()
        self._store = store
        self._book = book
        self.in_flight = in_flight
        """How many legs run on an instance."""
        self._wall_clock = wall_clock
        self._named: dict[Origin, tuple[InstanceSettings, ...]] = {
            Origin.FILE: config.instances,
            Origin.REGISTERED: (),
            Origin.DISCOVERED: (),
        }
        self._values: Values = {}
        self._void: set[str] = set()
        """Names that have lost their meaning and are still in the store."""
        self._changing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._store_answers = True
        self._shared_s = float("-inf")
        members = join_members(self._named, Changes())
        self._present = Membership(config=config, members=members)

    # What is so.

    @property
    def present(self) -> Membership[Config]:
        return self._present

    @property
    def is_shared(self) -> bool:
        """Other processes see run-time changes, too."""
        return self._store is not None

    def filed(self, instance: InstanceId) -> InstanceSettings | None:
        """What the file says of an address, under any name of this machine; also if it was removed."""
        place = without_loopback_names(instance)
        filed = self._named[Origin.FILE]
        return next((each for each in filed if without_loopback_names(each.id) == place), None)

    # What sources say.

    def set_config(self, config: Config) -> None:
        """The file has changed; what was done at run time stays."""
        self._config = config
        self._set_named(Origin.FILE, config.instances)
        self._update()

    def set_discovered(self, entries: Sequence[InstanceSettings]) -> None:
        """Who is found now; all of them."""
        self._set_named(Origin.DISCOVERED, tuple(entries))
        self._update()

    def registrations_changed(self) -> None:
        """Somebody registered, fell silent or left."""
        self._shared_s = float("-inf")
        self._wake.set()
        self._update()

    # What operators do. Each raises ChangesUnavailableError, and then nothing is taken for changed.

    async def add(self, entry: InstanceSettings) -> None:
        """Take an instance in, also one that was removed: as the file has it, or otherwise."""
        filed = self.filed(entry.id)
        is_back = filed == entry
        dropped = (DRAINED, ASLEEP) if filed is not None and not is_back else _WITH_ADDITION
        await self._change(
            put={} if is_back else {name_of(ADDED, entry.id): encode_entry(entry)},
            drop=[name_of(kind, entry.id) for kind in dropped],
        )

    async def remove(self, member: Member, *, force: bool = False) -> None:
        """No new requests; gone when nothing runs on it any more. With `force` at once."""
        put: dict[str, bytes] = {}
        named = self._first_named(member.id)
        if named is not None:
            put[name_of(REMOVED, member.id)] = fingerprint(named).encode()
        drop = [name_of(kind, member.id) for kind in (ADDED, DRAINED, ASLEEP)]
        await self._change(put=put, drop=drop)
        if force:
            self._let_go(member.id)

    async def drain(self, instance: InstanceId) -> None:
        """No new requests until `undrain`."""
        await self._change(put={name_of(DRAINED, instance): b""})

    async def undrain(self, instance: InstanceId) -> None:
        """Requests again, also for one that was put to sleep."""
        await self._change(drop=[name_of(kind, instance) for kind in (DRAINED, ASLEEP)])

    async def put_to_sleep(self, instances: Iterable[InstanceId]) -> None:
        """No new requests until `wake_up`."""
        await self._change(put={name_of(ASLEEP, each): b"" for each in instances})

    async def wake_up(self, instances: Iterable[InstanceId]) -> None:
        """Requests again."""
        await self._change(drop=[name_of(ASLEEP, each) for each in instances])

    def found_awake(self, instances: Iterable[InstanceId]) -> None:
        """Nobody woke these up through us, and they are: restarted, or by their own route."""
        self._forget(name_of(ASLEEP, each) for each in instances)
        self._update()

    # How it is done.

    async def run(self) -> None:
        """See what other processes change, let go of who has finished, until cancelled."""
        while True:
            self._wake.clear()
            await self.refresh()
            for each in self._present.leaving:
                if not self.in_flight(each.id):
                    self._let_go(each.id)
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def refresh(self) -> None:
        """Read what other processes changed, and tell them who is registered here."""
        if self._store is None:
            return
        try:
            async with self._changing:  # an older load must not undo what is put meanwhile
                await self._share_registrations(self._store)
                values = await self._store.load()
                self._void.update(expired_registrations(values, self._wall_clock()))
                await self._store.drop(self._void & values.keys())
                self._values = {name: values[name] for name in values if name not in self._void}
                self._void.clear()
        except ChangesUnavailableError as error:
            if self._store_answers:  # once per outage
                _logger.warning("fleet_changes_unavailable", error=str(error))
            self._store_answers = False
            return
        self._store_answers = True
        self._update()

    async def _change(
        self, *, put: Mapping[str, bytes] | None = None, drop: Iterable[str] = ()
    ) -> None:
        put, drop = put or {}, set(drop)
        async with self._changing:
            if self._store is not None:
                for name, value in put.items():
                    await self._store.put(name, value)
                await self._store.drop(drop)
            kept = {name: value for name, value in self._values.items() if name not in drop}
            self._values = {**kept, **put}
            self._void -= put.keys()
        self._update()

    async def _share_registrations(self, store: ChangeStore) -> None:
        now_s = self._wall_clock()
        if self._book is None or now_s - self._shared_s < SHARE_S:
            return
        for each in self._book.announced():
            value = encode_registration(
                self._book.entry(each, self._entry_type),
                each.facts,
                at_s=now_s,
                is_silent=each.id in self._book.silent,
            )
            await store.put(name_of(REGISTERED, each.id), value)
        self._shared_s = now_s

    def _pause_s(self) -> float | None:
        if self._present.leaving:
            return LEAVING_POLL_S
        return None if self._store is None else POLL_S

    def _set_named(self, origin: Origin, entries: tuple[InstanceSettings, ...]) -> None:
        before, self._named[origin] = self._named[origin], entries
        if before == entries:
            return
        self._forget(name_of(REMOVED, each) for each in named_otherwise(before, entries))

    def _first_named(self, instance: InstanceId) -> InstanceSettings | None:
        """What a source other than the operator says of it."""
        named = (entry for entries in self._named.values() for entry in entries)
        return next((entry for entry in named if entry.id == instance), None)

    def _forget(self, names: Iterable[str]) -> None:
        """Drop changes that have lost their meaning; from the store with the next turn."""
        gone = self._values.keys() & set(names)
        if gone:
            self._values = {name: self._values[name] for name in self._values if name not in gone}
            self._void |= gone
            self._wake.set()

    def _update(self) -> None:
        """Join anew, and tell if something is different."""
        facts, silent = self._join_registered()
        members = join_members(self._named, decode_changes(self._values, self._entry_type), silent)
        ids = {member.id for member in members}
        gone = [each.settings for each in self._present.members if each.id not in ids]
        # A hold ends with the instance.
        self._forget(name_of(kind, each.id) for each in gone for kind in (DRAINED, ASLEEP))
        leaving = [
            each
            for each in (*self._present.leaving, *gone)
            if each.id not in ids and self.in_flight(each.id)
        ]
        instances = tuple(member.settings for member in members)
        self._tell(
            Membership(
                config=msgspec.structs.replace(self._config, instances=instances),
                members=members,
                leaving=tuple(leaving),
                registrations={each: facts[each] for each in facts.keys() & ids},
            )
        )

    def _join_registered(self) -> tuple[Mapping[InstanceId, Registration], frozenset[InstanceId]]:
        """Name who is registered, here or with another balancer; their facts, and who is silent."""
        entries: dict[InstanceId, InstanceSettings] = {}
        facts: dict[InstanceId, Registration] = {}
        silent: set[InstanceId] = set()
        for shared in decode_registrations(self._values, self._entry_type, self._wall_clock()):
            instance = shared.settings.id
            entries[instance], facts[instance] = shared.settings, shared.facts
            silent |= {instance} if shared.is_silent else set()
        if self._book is not None:
            for each in self._book.announced():
                entries[each.id] = self._book.entry(each, self._entry_type)
                facts[each.id] = each.facts
                silent.discard(each.id)
            silent |= self._book.silent
        self._set_named(Origin.REGISTERED, tuple(entries.values()))
        return facts, frozenset(silent)

    def _let_go(self, instance: InstanceId) -> None:
        leaving = tuple(each for each in self._present.leaving if each.id != instance)
        self._tell(replace(self._present, leaving=leaving))

    def _tell(self, now: Membership[Config]) -> None:
        before, self._present = self._present, now
        if now == before:
            return
        _log_difference(before, now)
        self._wake.set()
        self.on_change(now)


def _log_difference(before: Membership[Config], now: Membership[Config]) -> None:
    old = {each.id: each for each in before.members}
    new = {each.id: each for each in now.members}
    for instance in new.keys() - old.keys():
        member = new[instance]
        facts = {"origin": member.origin.value, "role": member.settings.role.value}
        _logger.info("instance_joined", instance=member.settings.name, **facts)
    for instance in old.keys() - new.keys():
        _logger.info("instance_left", instance=old[instance].settings.name)
