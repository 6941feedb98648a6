"""Instance addresses have one spelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.addresses import parse_instance_id, split_address, without_loopback_names
from indexer.core.types import InstanceId


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        pytest.param("http://10.0.0.1:8000/", "http://10.0.0.1:8000", id="trailing-slash"),
        pytest.param("HTTP://Host:8000", "http://host:8000", id="upper-case"),
        pytest.param("http://host", "http://host:80", id="default-http-port"),
        pytest.param("https://host", "https://host:443", id="default-https-port"),
        pytest.param("http://[::1]:8000", "http://[::1]:8000", id="ipv6"),
        pytest.param(" http://host:1 ", "http://host:1", id="blanks"),
    ],
)
def test_one_spelling_per_address(url: str, expected: str) -> None:
    """Different spellings of one address are one instance."""
    assert parse_instance_id(url) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        pytest.param("host:8000", "write `http://host:8000`", id="no-scheme"),
        pytest.param("tcp://host:8000", "http or https", id="other-scheme"),
        pytest.param("http://me:pw@host", "no credentials", id="credentials"),
        pytest.param("http://host/v1", "no path", id="path"),
        pytest.param("http://host?x=1", "no path", id="query"),
        pytest.param("http://host:99999", "port", id="port-too-large"),
        pytest.param("http://host:0", "port", id="port-zero"),
        pytest.param("http://", "no host", id="no-host"),
    ],
)
def test_what_is_no_address_is_refused(url: str, message: str) -> None:
    """The message says what to change."""
    with pytest.raises(ValueError, match=message):
        parse_instance_id(url)


@pytest.mark.parametrize(
    "url",
    ["http://me:hunter2@host", "me:hunter2@host", "ftp://me:hunter2@host", "http://me:hunter2@"],
)
def test_credentials_are_not_repeated(url: str) -> None:
    """A password in a refused address stays out of the message."""
    with pytest.raises(ValueError, match="credentials") as raised:
        parse_instance_id(url)

    assert "hunter2" not in str(raised.value)


@given(st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True), st.integers(1, 65535))
def test_normalising_twice_changes_nothing(host: str, port: int) -> None:
    """Law: an instance id is its own normal form."""
    once = parse_instance_id(f"http://{host}:{port}")

    assert parse_instance_id(once) == once


def test_credentials_are_no_part_of_any_address() -> None:
    """Callers that have nothing better to say leave it to this."""
    with pytest.raises(ValueError, match="no credentials"):
        split_address("redis://:hunter2@host")


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:8000",
        "http://localhost.:8000",
        "http://127.0.0.1:8000",
        "http://127.1:8000",
        "http://0.0.0.0:8000",
        "http://[::1]:8000",
        "http://[::]:8000",
        "http://[::ffff:127.0.0.1]:8000",
    ],
)
def test_usual_names_of_this_machine_are_one(url: str) -> None:
    """They can be told without asking a name server."""
    assert without_loopback_names(InstanceId(url)) == "http://localhost:8000"


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.11:80", "http://127.0.0.2:80", "http://localhost.lan:80", "http://[::11]:80"],
)
def test_other_names_stay(url: str) -> None:
    """Only whole names are replaced."""
    assert without_loopback_names(InstanceId(url)) == url
