"""Which addresses are a balancer's own by their spelling, and which may be somebody else's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.settings.own_address import is_own_address
from indexer.core.addresses import parse_instance_id

EVERYWHERE = "0.0.0.0"  # noqa: S104 - compared, not bound

OWN = [
    ("127.0.0.1", "http://127.0.0.1:8080"),
    ("127.0.0.1", "http://localhost:8080"),
    ("127.0.0.1", "https://127.0.0.1:8080"),
    ("127.0.0.1", "http://0.0.0.0:8080"),
    ("127.0.0.1", "http://[::ffff:127.0.0.1]:8080"),
    ("localhost", "http://[::1]:8080"),
    ("::1", "http://[0:0:0:0:0:0:0:1]:8080"),
    (EVERYWHERE, "http://127.0.0.1:8080"),
    (EVERYWHERE, "http://127.0.0.2:8080"),
    (EVERYWHERE, "http://kvlb.localhost:8080"),
    (EVERYWHERE, "http://[::]:8080"),
    ("::", "http://[::1]:8080"),
    ("10.0.0.1", "http://10.0.0.1:8080"),
    ("kvlb.example", "http://KVLB.example.:8080"),
]

OTHERS = [
    pytest.param("127.0.0.1", "http://127.0.0.1:8081", id="another-port"),
    pytest.param("127.0.0.1", "http://127.0.0.2:8080", id="another-loopback-address"),
    pytest.param("127.0.0.1", "http://10.0.0.1:8080", id="another-machine"),
    pytest.param(EVERYWHERE, "http://10.0.0.1:8080", id="perhaps-another-machine"),
    pytest.param(EVERYWHERE, "http://vllm.example:8080", id="a-name-of-somebody"),
    pytest.param("10.0.0.1", "http://127.0.0.1:8080", id="another-interface"),
    pytest.param("10.0.0.1", "http://0.0.0.0:8080", id="every-interface-of-this-machine"),
    pytest.param("kvlb.example", "http://0.0.0.0:8080", id="where-a-name-leads-is-not-known"),
]


@pytest.mark.parametrize(("host", "url"), OWN)
def test_own_address_is_known_by_any_usual_spelling(host: str, url: str) -> None:
    """Whoever connects there reaches this balancer."""
    assert is_own_address(parse_instance_id(url), host, 8080)


@pytest.mark.parametrize(("host", "url"), OTHERS)
def test_what_may_be_an_engine_is_not_refused(host: str, url: str) -> None:
    """The first probe will tell."""
    assert not is_own_address(parse_instance_id(url), host, 8080)


@given(st.integers(1, 65535))
def test_nobody_can_have_named_a_port_that_is_free_to_be_any(port: int) -> None:
    """Port 0 is chosen at start."""
    assert not is_own_address(parse_instance_id(f"http://127.0.0.1:{port}"), "127.0.0.1", 0)
