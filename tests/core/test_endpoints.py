"""ZMQ endpoints: ports per rank, who binds, which host to dial."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.endpoints import (
    EndpointError,
    bindable,
    check_endpoint,
    dialable,
    engine_binds,
    offset_port,
)

URL = "http://10.0.0.7:8000"


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://[::1]:1", "ipc:///tmp/kv"])
def test_usable_endpoints_pass(endpoint: str) -> None:
    """TCP with a port, or a path."""
    assert check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "ipc://",
        "tcp://",
        "tcp://host",
        "tcp://:5557",
        "tcp://host:",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:٣",
        "http://host:80",
        "inproc://kv",
    ],
)
def test_other_endpoints_are_refused(endpoint: str) -> None:
    """The text names the endpoint."""
    with pytest.raises(EndpointError, match=r"write|port"):
        check_endpoint(endpoint)


def test_rank_0_has_the_configured_endpoint() -> None:
    """Even one that has no port."""
    assert offset_port("ipc:///tmp/kv", 0) == "ipc:///tmp/kv"


@given(st.integers(1, 100), st.integers(1, 65_000))
def test_rank_is_added_to_the_last_port(rank: int, port: int) -> None:
    """Whatever colons the host has."""
    assert offset_port(f"tcp://[fd00::1]:{port}", rank) == f"tcp://[fd00::1]:{port + rank}"


def test_port_of_a_rank_may_not_leave_the_range() -> None:
    """The operator learns which rank."""
    assert offset_port("tcp://*:65534", 1) == "tcp://*:65535"
    with pytest.raises(EndpointError, match="rank 1 would have port 65536"):
        offset_port("tcp://*:65535", 1)


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://[fd00::1]:5557", True),
        ("ipc:///tmp/kv", True),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://indexer:5557", False),
    ],
)
def test_engine_binds_what_looks_like_a_wildcard(endpoint: str, binds: bool) -> None:
    """The rule of vLLM, traps and all."""
    assert engine_binds(endpoint) is binds


@pytest.mark.parametrize(
    ("endpoint", "dialled"),
    [
        ("tcp://*:5557", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "tcp://10.0.0.7:5557"),
        ("tcp://[::ffff:127.0.0.1]:5601", "tcp://127.0.0.1:5601"),
        ("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5557"),
        ("tcp://engine:5557", "tcp://engine:5557"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv"),
    ],
)
def test_every_interface_is_dialled_at_the_host_we_know(endpoint: str, dialled: str) -> None:
    """Anything else is dialled as it is."""
    assert dialable(endpoint, URL) == dialled


def test_host_in_brackets_stays_in_brackets() -> None:
    """An instance may be known by its IPv6 address."""
    assert dialable("tcp://*:5557", "http://[fd00::7]:8000") == "tcp://[fd00::7]:5557"


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
        ("tcp://[::1]:5557", "tcp://[::1]:5557"),
        ("tcp://*:5557", "tcp://*:5557"),
        ("tcp://indexer.local:5557", "tcp://*:5557"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv"),
    ],
)
def test_name_is_bound_as_every_interface(endpoint: str, bound: str) -> None:
    """A name says how engines reach us, not which interface that is."""
    assert bindable(endpoint) == bound
