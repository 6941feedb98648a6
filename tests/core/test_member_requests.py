"""Bodies of `/instances/...`: the examples' words and ours."""

from typing import Any

import pytest

from balancer.core.errors import BadRequestError
from balancer.core.fleet.member_requests import MemberName, read_entry, read_name
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
