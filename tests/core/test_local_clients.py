"""Who counts as a client on this machine."""

import pytest

from balancer.core.http.local_clients import is_local_client


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        pytest.param("127.0.0.1", True, id="ipv4"),
        pytest.param("127.8.8.8", True, id="whole-block"),
        pytest.param("::1", True, id="ipv6"),
        pytest.param("::ffff:127.0.0.1", True, id="mapped"),
        pytest.param("::ffff:10.0.0.1", False, id="mapped-elsewhere"),
        pytest.param("10.0.0.1", False, id="elsewhere"),
        pytest.param("socket", False, id="no-address"),
        pytest.param(None, False, id="no-client"),
    ],
)
def test_address_of_the_connection_decides(address: str | None, expected: bool) -> None:
    """Loopback in every spelling, nothing else."""
    assert is_local_client(address, {}, ["localhost"], ()) is expected


@pytest.mark.parametrize("name", ["forwarded", "x-forwarded-for", "x-real-ip"])
def test_client_behind_a_proxy_is_not_local(name: str) -> None:
    """Whatever the header says."""
    assert not is_local_client("127.0.0.1", {name: "127.0.0.1"}, ["localhost"], ())


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        pytest.param([], True, id="none"),
        pytest.param(["localhost"], True, id="localhost"),
        pytest.param(["LocalHost:8080"], True, id="port-and-case"),
        pytest.param(["127.0.0.1:8080"], True, id="ipv4"),
        pytest.param(["[::1]:8080"], True, id="ipv6"),
        pytest.param(["[::1]"], True, id="ipv6-without-port"),
        pytest.param(["box:8080"], True, id="own-name"),
        pytest.param(["rebound.example:8080"], False, id="another-name"),
        pytest.param(["localhost.rebound.example"], False, id="begins-like-localhost"),
        pytest.param(["127.0.0.1.rebound.example"], False, id="begins-like-an-address"),
        pytest.param(["192.168.0.7:8080"], False, id="address-of-a-network"),
        pytest.param([""], False, id="empty"),
        pytest.param(["localhost", "rebound.example"], False, id="two"),
    ],
)
def test_name_that_was_asked_for_has_to_be_this_machines(hosts: list[str], expected: bool) -> None:
    """A page's own name may be made to mean 127.0.0.1."""
    assert is_local_client("127.0.0.1", {}, hosts, ("box",)) is expected
