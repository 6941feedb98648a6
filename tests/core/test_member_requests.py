"""Bodies of `/instances/...`: the examples' words and ours."""

from typing import Any

import msgspec
import pytest

from balancer.core.errors import BadRequestError
from balancer.core.fleet.member_requests import MemberName, amend_filed, read_entry, read_name
from balancer.core.fleet.snapshot import Role
from balancer.core.settings.control import InstanceSettings


@pytest.mark.parametrize(
    ("body", "url", "role"),
    [
        ({"type": "prefill", "instance": "h:1"}, "http://h:1", Role.PREFILL),
        ({"type": "decode", "instance": "localhost:1"}, "http://localhost:1", Role.DECODE),
        ({"role": "mixed", "url": "https://h:1"}, "https://h:1", Role.MIXED),
        ({"role": "prefill_decode", "url": "http://h:1"}, "http://h:1", Role.MIXED),
        ({"instance": "[fd00::1]:8000"}, "http://[fd00::1]:8000", Role.MIXED),
        ({"instance": "http://h:1", "type": "decode"}, "http://h:1", Role.DECODE),
    ],
)
def test_entry_is_read_in_anybodys_words(body: dict[str, Any], url: str, role: Role) -> None:
    """The same instance."""
    entry = read_entry(body, InstanceSettings)

    assert (entry.id, entry.role) == (url, role)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "`url`"),
        ({"url": 3}, "`url` must be text"),
        ({"instance": "h"}, "host:port"),
        ({"url": "http://h:1", "instance": "h:1"}, "say the same"),
        ({"url": "http://h:1", "role": 3}, "role"),
        ({"url": "http://h:1", "rank": 3}, "did you mean `ranks`"),
        ({"url": "http://h:1", "api_key_env": "HOME"}, "api_key_env"),
    ],
)
def test_entry_that_cannot_be_is_refused_by_name(body: dict[str, Any], says: str) -> None:
    """As in the file."""
    with pytest.raises(BadRequestError, match=says):
        read_entry(body, InstanceSettings)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"instance": "H:1", "type": "decode"}, MemberName(id="http://h:1", role="decode")),  # type: ignore[arg-type]
        ({"alias": "m0", "force": True}, MemberName(alias="m0", force=True)),
        ({"alias": "m0", "role": "pd"}, MemberName(alias="m0", role="mixed")),
    ],
)
def test_name_is_an_address_or_an_alias(body: dict[str, Any], name: MemberName) -> None:
    """One of both."""
    assert read_name(body) == name


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"alias": "a", "url": "http://h:1"},
        {"url": "http://"},
        {"alias": 1},
        {"alias": "a", "x": 1},
    ],
)
def test_name_that_cannot_be_is_refused(body: dict[str, Any]) -> None:
    """Before anybody is looked for."""
    with pytest.raises(BadRequestError):
        read_name(body)


def test_force_is_true_or_false() -> None:
    """A word that only looks true would remove at once."""
    with pytest.raises(BadRequestError, match="force"):
        read_name({"alias": "a", "force": "false"})


FILED = InstanceSettings(
    url="http://h:1", alias="p0", role=Role.PREFILL, transfer={"lease_s": 20.0}, ranks=2
)


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        pytest.param({}, {}, id="nothing-said"),
        pytest.param({"type": "prefill"}, {}, id="the-same-role"),
        pytest.param({"alias": "x"}, {"alias": "x"}, id="another-name"),
        pytest.param(
            {"type": "decode"}, {"role": Role.DECODE, "alias": None}, id="another-role-a-new-name"
        ),
        pytest.param({"role": "decode", "alias": "p0"}, {"role": Role.DECODE}, id="name-kept"),
        pytest.param(
            {"role": "pd"}, {"role": Role.MIXED, "alias": None, "transfer": {}}, id="no-connector"
        ),
        pytest.param(
            {"connector": "example"}, {"connector": "example", "transfer": {}}, id="connector"
        ),
        pytest.param({"transfer": {}}, {"transfer": {}}, id="settings-of-the-connector"),
        pytest.param({"dp_size": 4}, {"ranks": 4}, id="the-examples-word"),
    ],
)
def test_what_is_not_said_is_as_the_file_has_it(
    body: dict[str, Any], changed: dict[str, Any]
) -> None:
    """Settings of a connector and a name made of the role go with what they were for."""
    entry = read_entry({"instance": "h:1", **body}, InstanceSettings)

    amended = amend_filed(FILED, entry, {"instance": "h:1", **body})

    assert amended == msgspec.structs.replace(FILED, **changed)


def test_what_does_not_fit_the_file_is_refused() -> None:
    """Two addresses to receive at stand in the file: not for three ranks."""
    addresses = ("tcp://h:2", "tcp://h:3")
    filed = InstanceSettings(url="http://h:1", ranks=2, ec_zmq_addrs=addresses)
    body = {"url": "http://h:1", "ranks": 3}

    with pytest.raises(BadRequestError, match="3 ranks need 3 addresses"):
        amend_filed(filed, read_entry(body, InstanceSettings), body)
