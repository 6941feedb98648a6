"""Instances as the operator describes them."""

import msgspec
import pytest

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.control import InstanceSettings, name_instances
from balancer.core.settings.errors import ConfigError, decode_settings

URL = "http://10.0.0.1:8000"


def test_address_is_checked_when_decoded() -> None:
    """A bad address is refused with its key."""
    with pytest.raises(ConfigError, match=r"^`instances\[1\].url`: 'host' has no scheme"):
        decode_settings([{"url": URL}, {"url": "host"}], list[InstanceSettings], where="instances")


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        pytest.param(Role.MIXED, "none", id="mixed"),
        pytest.param(Role.PREFILL, "nixl", id="prefill"),
        pytest.param(Role.DECODE, "nixl", id="decode"),
        pytest.param(Role.ENCODE, "ec_example", id="encode"),
    ],
)
def test_connector_follows_the_role(role: Role, expected: str) -> None:
    """Who splits requests needs a connector."""
    assert InstanceSettings(url=URL, role=role).instance().connector == expected
    assert InstanceSettings(url=URL, role=role, connector="x").instance().connector == "x"


def test_ranks_are_global() -> None:
    """The second half of a data-parallel group begins where the first ends."""
    instance = InstanceSettings(url=URL, ranks=2, rank_base=2).instance()

    assert instance.ranks == (2, 3)
    assert instance.rank_header(3) == "1"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        pytest.param({"ec_zmq_addrs": ["10.0.0.1:14579"]}, "tcp", id="no-scheme"),
        pytest.param({"role": "encode", "ec_zmq_addrs": ["tcp://h:1"]}, "receive", id="encoder"),
        pytest.param({"ranks": 2, "ec_zmq_addrs": ["tcp://h:1"]}, "2 addresses", id="too-few"),
    ],
)
def test_addresses_to_push_to_are_checked(more: dict[str, object], says: str) -> None:
    """One for each rank of a consumer, refused by its key."""
    with pytest.raises(ConfigError, match=f"`ec_zmq_addrs.*{says}"):
        decode_settings({"url": URL, **more}, InstanceSettings, where="")


def test_addresses_to_push_to_reach_the_fleet() -> None:
    """As they were given."""
    settings = InstanceSettings(url=URL, ranks=2, ec_zmq_addrs=("tcp://h:1", "tcp://h:2"))

    assert settings.instance().ec_zmq_addrs == ("tcp://h:1", "tcp://h:2")


def test_unseen_instance_gets_no_requests() -> None:
    """Nothing is healthy before it was probed."""
    instance = InstanceSettings(url=URL).instance()

    assert not instance.is_available
    assert instance.unhealthy_reason == "not_probed"


def test_made_aliases_follow_role_and_order() -> None:
    """Aliases that were given stay, and are not given twice."""
    settings = [
        InstanceSettings(url="http://a:1", role=Role.PREFILL),
        InstanceSettings(url="http://a:2", role=Role.DECODE, alias="d0"),
        InstanceSettings(url="http://a:3", role=Role.DECODE),
        InstanceSettings(url="http://a:4"),
        InstanceSettings(url="http://a:5"),
    ]

    assert [each.alias for each in name_instances(settings)] == ["p0", "d0", "d1", "m0", "m1"]


def test_no_alias_shows_the_address() -> None:
    """Clients see aliases."""
    instance = InstanceSettings(url=URL)

    assert "10.0.0.1" not in instance.name
    assert instance.name == InstanceSettings(url=URL + "/").name


def test_alias_must_be_fit_for_a_header() -> None:
    """It is sent to clients in one."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"url": URL, "alias": "a\nb"}, InstanceSettings)
