"""Several processes' membership around one real Redis."""

from typing import Any

import msgspec
import pytest

from balancer.core.fleet.changes import REGISTERED_FOR_S, ChangesUnavailableError
from balancer.core.fleet.registrations import RegistrationBook
from balancer.core.fleet.roster import Hold
from balancer.core.settings.errors import decode_settings
from balancer.core.settings.registration import RegistrationSettings
from balancer.fleet.members import ChangeStore, Members, Membership
from indexer.core.types import InstanceId
from kvlb.settings import KvlbSettings
from kvlb.shared_changes import open_changes

A, B = InstanceId("http://10.0.0.1:8000"), InstanceId("http://10.0.0.2:8000")
MESSAGE = msgspec.msgpack.encode(
    {"type": "P", "http_address": "10.0.0.1:8000", "zmq_address": "z:1", "transfer_mode": "READ"}
)


class Process:
    """One process's membership, its wall clock by hand."""

    def __init__(
        self, store: ChangeStore | None, *urls: str, book: RegistrationBook | None = None
    ) -> None:
        self.now_s = 1000.0
        self.busy: set[InstanceId] = set()
        self.told: list[Membership[KvlbSettings]] = []
        self.settings = self.configured(*urls)
        self.members = Members(
            self.settings,
            wall_clock=lambda: self.now_s,
            store=store,
            book=book,
            in_flight=lambda instance: int(instance in self.busy),
        )
        self.members.on_change = self.told.append

    @staticmethod
    def configured(*urls: str, **more: Any) -> KvlbSettings:
        entries = [{"url": url, **more} for url in urls]
        return decode_settings({"instances": entries}, KvlbSettings, where="")

    @property
    def holds(self) -> dict[str, Hold | None]:
        return {each.id: each.hold for each in self.members.present.members}


async def test_registered_instance_is_known_to_other_balancers(redis_server: Any) -> None:
    """With its facts and its silence, as long as the one it speaks to says so."""
    book = RegistrationBook(RegistrationSettings(silent_s=9, remove_s=60))
    settings = redis_server.settings()
    async with open_changes(settings) as store, open_changes(settings) as other_store:
        own, other = Process(store, book=book), Process(other_store)
        book.on_message(MESSAGE, 0.0)
        own.members.registrations_changed()
        await own.members.refresh()
        await other.members.refresh()
        seen = other.holds, dict(other.members.present.registrations)
        book.on_time(9.0)
        own.members.registrations_changed()
        await own.members.refresh()
        await other.members.refresh()
        silent = other.holds
        other.now_s += REGISTERED_FOR_S
        await other.members.refresh()
        ended = other.holds
        other.now_s += REGISTERED_FOR_S
        await other.members.refresh()

    assert seen[0] == {A: None}
    assert seen[1][A].zmq_address == "z:1"
    assert silent == {A: Hold.SILENT}
    assert ended == {}
    assert redis_server.command("HLEN", f"{settings.prefix}:1:fleet") == "0"


async def test_key_of_another_type_is_removed(redis_server: Any) -> None:
    """Who comes across it says so; the next change is taken down."""
    settings = redis_server.settings()
    name = f"{settings.prefix}:1:fleet"
    redis_server.command("SET", name, "x")
    async with open_changes(settings) as store:
        assert store is not None
        with pytest.raises(ChangesUnavailableError, match="WRONGTYPE"):
            await store.load()

        await store.put("drained http://e", b"1")

        assert await store.load() == {"drained http://e": b"1"}


async def test_change_is_seen_by_the_others_and_the_last_word_counts(redis_server: Any) -> None:
    """A removal of the file's instance too, until somebody's file names it otherwise."""
    settings = redis_server.settings()
    async with open_changes(settings) as store, open_changes(settings) as other_store:
        one, other = Process(store, A), Process(other_store, A)
        (member,) = one.members.present.members
        await one.members.drain(A)
        await other.members.refresh()
        drained = other.holds
        await other.members.undrain(A)
        await one.members.refresh()
        back = one.holds
        await one.members.remove(member)
        await other.members.refresh()
        removed = other.holds
        other.members.set_config(Process.configured(A, role="decode"))
        await other.members.refresh()
        one.members.set_config(Process.configured(A, role="decode"))
        await one.members.refresh()

    assert (drained, back, removed) == ({A: Hold.DRAINED}, {A: None}, {})
    assert one.holds == other.holds == {A: None}
    assert redis_server.command("HLEN", f"{settings.prefix}:1:fleet") == "0"


async def test_fault_keeps_what_is_known(own_redis: Any) -> None:
    """A change is refused, everything else goes on; once Redis answers it is read again."""
    server = own_redis()
    server.start()
    async with open_changes(server.settings(write_timeout_s=0.5)) as store:
        process = Process(store, A)
        await process.members.add(Process.configured(B).instances[0])
        server.stop()
        await process.members.refresh()
        with pytest.raises(ChangesUnavailableError):
            await process.members.drain(A)
        during = process.holds
        server.start()
        await process.members.refresh()

    assert during == {A: None, B: None}
    assert process.holds == {A: None}  # it was all in memory, and is gone with it


async def test_nothing_is_shared_without_redis() -> None:
    """Changes are the process's own."""
    async with open_changes(None) as store:
        process = Process(store, A)
        await process.members.refresh()
        await process.members.drain(A)

    assert not process.members.is_shared
    assert process.holds == {A: Hold.DRAINED}


async def test_hold_ends_with_the_instance() -> None:
    """It begins anew when it is named anew."""
    process = Process(None, A, B)
    await process.members.drain(B)
    process.members.set_config(Process.configured(A))
    process.members.set_config(Process.configured(A, B))

    assert process.holds == {A: None, B: None}


async def test_instance_stays_watched_while_something_runs_on_it() -> None:
    """And is a member again at once if somebody names it meanwhile."""
    process = Process(None, A, B)
    process.busy = {B}
    process.members.set_config(Process.configured(A))
    leaving = process.members.present
    process.members.set_config(Process.configured(A, B))
    again = process.members.present
    process.members.set_config(Process.configured(A))
    process.busy = set()
    process.members.set_config(Process.configured(A, role="decode"))

    assert [each.id for each in leaving.watched] == [A, B]
    assert leaving.holds == {B: Hold.LEAVING}
    assert [each.id for each in leaving.config.instances] == [A]
    assert (again.leaving, again.holds) == ((), {})
    assert process.members.present.leaving == ()


async def test_nothing_is_told_when_nothing_changed() -> None:
    """Whoever follows instances isn't woken for nothing."""
    process = Process(None, A)

    process.members.set_config(process.settings)
    process.members.set_discovered(())
    process.members.registrations_changed()

    assert process.told == []
