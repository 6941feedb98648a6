"""Run-time changes as named values."""

from typing import Any

import msgspec
import pytest

from balancer.core.fleet.changes import (
    ADDED,
    ASLEEP,
    DRAINED,
    REGISTERED,
    REGISTERED_FOR_S,
    REMOVED,
    decode_changes,
    decode_registrations,
    encode_entry,
    encode_registration,
    expired_registrations,
    name_of,
)
from balancer.core.fleet.snapshot import Role
from balancer.core.fleet.transfer_facts import Registration
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import Secret
from indexer.core.types import InstanceId

A = InstanceId("http://a:1")
FACTS = Registration(http_address="a:1", zmq_address="z:1", transfer_mode="READ", dp_size=2)
NAME = name_of(REGISTERED, A)


def registration(at_s: float, **fields: Any) -> bytes:
    entry = InstanceSettings(url=A, role=Role.DECODE, **fields)
    return encode_registration(entry, FACTS, at_s=at_s, is_silent=True)


def test_changes_come_back_as_they_went() -> None:
    """Of an added instance everything, its key too."""
    entry = InstanceSettings(url=A, role=Role.PREFILL, alias="x", api_key=Secret("k"), ranks=3)
    values = {
        name_of(ADDED, A): encode_entry(entry),
        name_of(REMOVED, InstanceId("http://b:1")): b"abc",
        name_of(DRAINED, A): b"",
        name_of(ASLEEP, InstanceId("http://c:1")): b"",
        "of-a-later-release http://d:1": b"?",
    }

    changes = decode_changes(values, InstanceSettings)

    assert changes.added == {A: entry}
    assert changes.removed == {"http://b:1": "abc"}
    assert changes.drained == {A}
    assert changes.asleep == {"http://c:1"}


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"\xc1", id="no-msgpack"),
        pytest.param(msgspec.msgpack.encode({"url": "nowhere"}), id="no-address"),
        pytest.param(msgspec.msgpack.encode({"url": A, "new_key": 1}), id="key-of-a-later-release"),
        pytest.param(msgspec.msgpack.encode([1]), id="no-map"),
    ],
)
def test_what_cannot_be_read_is_skipped(value: bytes) -> None:
    """The rest still counts."""
    good = InstanceSettings(url="http://b:1")
    values = {name_of(ADDED, A): value, name_of(ADDED, good.id): encode_entry(good), NAME: value}

    assert decode_changes(values, InstanceSettings).added == {good.id: good}
    assert decode_registrations(values, InstanceSettings, 0.0) == ()
    assert expired_registrations(values, 1e9) == []


def test_registration_counts_while_it_is_renewed() -> None:
    """Then it is passed over, and after as long again it may be dropped."""
    values = {NAME: registration(100.0), name_of(DRAINED, A): b""}

    (fresh,) = decode_registrations(values, InstanceSettings, 100.0 + REGISTERED_FOR_S - 0.1)
    late = decode_registrations(values, InstanceSettings, 100.0 + REGISTERED_FOR_S)

    assert (fresh.settings.role, fresh.facts, fresh.is_silent) == (Role.DECODE, FACTS, True)
    assert late == ()
    assert expired_registrations(values, 100.0 + 2 * REGISTERED_FOR_S - 0.1) == []
    assert expired_registrations(values, 100.0 + 2 * REGISTERED_FOR_S) == [NAME]


def test_other_values_of_an_entry_are_no_secret_in_disguise() -> None:
    """Only secrets have a way of their own into a value."""
    with pytest.raises(NotImplementedError):
        encode_entry(InstanceSettings(url=A, alias=object()))  # type: ignore[arg-type]
