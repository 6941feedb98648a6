"""Messages of engines that announce themselves, and who is registered."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.registrations import RegistrationBook, RegistrationRefusedError
from balancer.core.fleet.snapshot import Role
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.registration import RegistrationSettings

MORIIO = {
    "type": "P",
    "http_address": "10.0.0.1:8000",
    "zmq_address": "host:10.0.0.1,handshake:6301,notify:61005",
    "dp_size": 2,
    "tp_size": 4,
    "transfer_mode": "READ",
}
P2P = {"type": "D", "http_address": "10.0.0.2:8000", "zmq_address": "10.0.0.2:21001"}


def book(**settings: Any) -> RegistrationBook:
    return RegistrationBook(RegistrationSettings(**settings))


def packed(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def reason(made: RegistrationBook, message: Any) -> str:
    payload = message if isinstance(message, bytes) else packed(message)
    with pytest.raises(RegistrationRefusedError) as error:
        made.on_message(payload, 0.0)
    return error.value.reason


def test_moriio_engine_is_an_instance() -> None:
    """With its ranks, and what its connector needs."""
    made = book()

    assert made.on_message(packed(MORIIO), 0.0)
    (announced,) = made.announced()
    entry = made.entry(announced, InstanceSettings)
    assert (entry.url, entry.role, entry.connector, entry.ranks) == (
        "http://10.0.0.1:8000",
        Role.PREFILL,
        "moriio",
        2,
    )
    assert announced.facts.zmq_address == MORIIO["zmq_address"]
    assert announced.facts.tp_size == 4
    assert made.transfer_mode == "READ"


def test_p2p_engine_says_less() -> None:
    """One rank, no mode; a configured connector wins."""
    made = book(connector="mine")
    made.on_message(packed(P2P), 0.0)
    (announced,) = made.announced()

    assert made.transfer_mode is None
    assert made.entry(announced, InstanceSettings).connector == "mine"
    plain = book()
    plain.on_message(packed(P2P), 0.0)
    assert plain.entry(announced, InstanceSettings).connector == "p2p_nccl"


def test_hello_and_repetition_change_nothing() -> None:
    """Only what is new has to be told."""
    made = book()

    assert not made.on_message(packed({"type": "HELLO"}), 0.0)
    assert made.on_message(packed(MORIIO), 0.0)
    assert not made.on_message(packed(MORIIO), 3.0)
    assert made.on_message(packed({**MORIIO, "dp_size": 3}), 6.0)
    assert len(made.announced()) == 1


def test_names_of_this_machine_are_one_engine() -> None:
    """It counts once towards the limit, and is known by the name it had first."""
    made = book(max_instances=1)

    for host in ("localhost", "[::1]", "127.1"):
        made.on_message(packed({**MORIIO, "http_address": f"{host}:8000"}), 0.0)
    made.on_time(10.0)

    assert [each.id for each in made.announced()] == ["http://localhost:8000"]
    assert made.announced()[0].facts.http_address == "127.1:8000"
    assert made.silent == {"http://localhost:8000"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(b"\xc1", "not_a_map", id="no-msgpack"),
        pytest.param(b"", "not_a_map", id="empty"),
        pytest.param(b"\x91" * 60_000, "not_a_map", id="deep"),
        pytest.param([1], "not_a_map", id="list"),
        pytest.param(b"x" * 70_000, "too_long", id="too-long"),
        pytest.param({}, "type", id="no-type"),
        pytest.param({"type": "X"}, "type", id="unknown-type"),
        pytest.param({**MORIIO, "type": 3}, "type", id="type-of-wrong-type"),
        pytest.param({"type": "P"}, "http_address", id="no-address"),
        pytest.param({**MORIIO, "http_address": 1}, "http_address", id="address-of-wrong-type"),
        pytest.param({**MORIIO, "http_address": ""}, "http_address", id="address-empty"),
        pytest.param({**MORIIO, "http_address": "h"}, "http_address", id="no-port"),
        pytest.param({**MORIIO, "http_address": "h:0"}, "http_address", id="port-zero"),
        pytest.param({**MORIIO, "http_address": "*:8000"}, "http_address", id="no-host"),
        pytest.param({**MORIIO, "http_address": "u@h:1"}, "http_address", id="credentials"),
        pytest.param({**MORIIO, "http_address": "h\n:1"}, "http_address", id="line-break"),
        pytest.param({**MORIIO, "http_address": "ä:1"}, "http_address", id="no-ascii"),
        pytest.param({**MORIIO, "zmq_address": None}, "zmq_address", id="no-zmq"),
        pytest.param({**MORIIO, "zmq_address": "a b"}, "zmq_address", id="space"),
        pytest.param({**MORIIO, "zmq_address": "z" * 513}, "zmq_address", id="zmq-too-long"),
        pytest.param({**MORIIO, "dp_size": 0}, "dp_size", id="no-rank"),
        pytest.param({**MORIIO, "dp_size": True}, "dp_size", id="rank-true"),
        pytest.param({**MORIIO, "tp_size": "2"}, "tp_size", id="tp-of-wrong-type"),
        pytest.param({**MORIIO, "tp_size": 5000}, "tp_size", id="tp-too-large"),
        pytest.param({**MORIIO, "transfer_mode": "PUSH"}, "transfer_mode", id="unknown-mode"),
        pytest.param({**MORIIO, "transfer_mode": []}, "transfer_mode", id="mode-of-wrong-type"),
    ],
)
def test_message_of_no_use_has_its_reason(message: Any, expected: str) -> None:
    """And changes nothing."""
    made = book()

    assert reason(made, message) == expected
    assert made.announced() == ()


def test_first_mode_counts_until_all_have_left() -> None:
    """Then another may be set; one engine alone may change its own."""
    made = book(silent_s=9, remove_s=60)
    other = {**MORIIO, "http_address": "10.0.0.9:1", "transfer_mode": "WRITE"}
    made.on_message(packed(MORIIO), 0.0)

    assert reason(made, other) == "transfer_mode"
    assert reason(made, P2P) == "transfer_mode"
    assert made.on_message(packed({**MORIIO, "transfer_mode": "WRITE"}), 1.0)
    assert made.on_message(packed(other), 1.0)
    assert made.on_time(61.0)
    assert made.on_message(packed(MORIIO), 62.0)
    assert made.transfer_mode == "READ"


def test_silence_has_two_stages() -> None:
    """Three beats: nothing new. Longer: gone. A beat in between: as before."""
    made = book(silent_s=9, remove_s=60)
    made.on_message(packed(MORIIO), 0.0)

    assert not made.on_time(8.9)
    assert made.on_time(9.0)
    assert made.silent == {"http://10.0.0.1:8000"}
    assert not made.on_time(9.5)
    assert made.on_message(packed(MORIIO), 10.0)
    assert made.silent == frozenset()
    assert not made.on_time(12.0)
    assert made.on_time(70.0)
    assert (made.announced(), made.silent) == ((), frozenset())


def test_number_is_bounded() -> None:
    """Those that are known go on."""
    made = book(max_instances=1)
    made.on_message(packed(MORIIO), 0.0)

    assert reason(made, {**MORIIO, "http_address": "10.0.0.9:1"}) == "too_many"
    assert not made.on_message(packed(MORIIO), 1.0)


@pytest.mark.parametrize(
    ("address", "is_in"),
    [
        pytest.param("10.1.2.3:1", True, id="inside"),
        pytest.param("[fd00::1]:1", True, id="ipv6-inside"),
        pytest.param("11.0.0.1:1", False, id="outside"),
        pytest.param("[fe80::1]:1", False, id="ipv6-outside"),
        pytest.param("engine-1:8000", False, id="host-name"),
    ],
)
def test_addresses_may_be_limited_to_networks(address: str, is_in: bool) -> None:
    """Whoever reaches the port can't send requests just anywhere."""
    made = book(networks=("10.0.0.0/8", "fd00::/8"))
    message = {**MORIIO, "http_address": address}

    if is_in:
        assert made.on_message(packed(message), 0.0)
    else:
        assert reason(made, message) == "network"


messages = st.one_of(
    st.binary(max_size=40),
    st.dictionaries(
        st.sampled_from(["type", "http_address", "zmq_address", "dp_size", "transfer_mode"]),
        st.one_of(
            st.sampled_from(["P", "D", "HELLO", "h:1", "READ", "WRITE"]),
            st.integers(-2, 2**40),
            st.none(),
            st.text(max_size=4),
        ),
    ).map(lambda body: msgspec.msgpack.encode({**P2P, **body})),
)


@given(st.lists(messages, max_size=20))
def test_whatever_comes_is_taken_or_refused(payloads: list[bytes]) -> None:
    """Nothing else is raised, the number is kept, one mode holds for all."""
    made = book(max_instances=3)

    for payload in payloads:
        with suppress(RegistrationRefusedError):
            made.on_message(payload, 0.0)
    assert len(made.announced()) <= 3
    assert len({each.facts.transfer_mode for each in made.announced()}) <= 1
