"""`transfer:` of an instance: the connector chooses the keys, and each is refused by its name."""

from typing import Any

import msgspec
import pytest

from balancer.connectors.available import connectors
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import ConfigError, decode_settings
from balancer.core.settings.transfer import (
    STRUCTS,
    ChildSettings,
    MooncakeSettings,
    NixlSettings,
    read_transfer,
)

URL = "http://10.0.0.1:8000"


def decode(**entry: Any) -> InstanceSettings:
    return decode_settings({"url": URL, **entry}, InstanceSettings, where="instances[0]")


def test_the_connector_chooses_the_settings() -> None:
    """As they are given, of the connector's own type."""
    settings = decode(role="prefill", connector="mooncake", transfer={"bootstrap_port": 9000})

    assert settings.instance().transfer == MooncakeSettings(bootstrap_port=9000)


def test_the_roles_usual_connector_chooses_them_too() -> None:
    """`nixl` for prefill and decode, none for mixed."""
    assert decode(role="decode", transfer={"lease_s": 10}).instance().transfer == NixlSettings(
        lease_s=10
    )
    assert decode(role="decode").instance().transfer == NixlSettings()
    assert decode().instance().transfer is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        pytest.param(
            {"connector": "mooncake", "transfer": {"bootstrap_prt": 1}},
            "`instances[0].transfer`: unknown key `bootstrap_prt`; did you mean `bootstrap_port`?",
            id="unknown-key",
        ),
        pytest.param(
            {"connector": "mooncake", "transfer": {"bootstrap_port": 0}},
            "`instances[0].transfer`: `bootstrap_port`: Expected `int` >= 1",
            id="out-of-range",
        ),
        pytest.param(
            {"connector": "example", "transfer": {"x": 1}},
            "`instances[0].transfer`: connector `example` has no settings",
            id="no-settings",
        ),
        pytest.param(
            {"connector": "moriio", "transfer": {"mode": "PULL"}},
            "`instances[0].transfer`: `mode`: Invalid enum value 'PULL'; valid here: `READ`, "
            "`WRITE`",
            id="choice",
        ),
        pytest.param(
            {"connector": "lmcache", "transfer": {"receiver_host": "h"}},
            "`instances[0].transfer`: `receiver_host`: goes with receiver_init_ports and "
            "receiver_alloc_ports",
            id="half-a-receiver",
        ),
        pytest.param(
            {"connector": "offloading", "transfer": {"decoder_first": True}},
            "`instances[0].transfer`: `decoder_first`: goes with p2p_host",
            id="decoder-first-without-a-peer",
        ),
        pytest.param(
            {
                "connector": "multi",
                "transfer": {
                    "children": {"offloading": {"p2p_host": "h", "decoder_first": True}, "nixl": {}}
                },
            },
            "`instances[0].transfer`: `children`: of `offloading`, decoder_first: not beside "
            "others",
            id="decoder-first-in-a-child",
        ),
        pytest.param(
            {"connector": "multi"},
            "`instances[0].transfer`: `children`: at least one connector",
            id="no-child",
        ),
        pytest.param(
            {"connector": "multi", "transfer": {"children": {"multi": {}}}},
            "`instances[0].transfer`: `children`: `multi` can't be a child",
            id="multi-in-multi",
        ),
        pytest.param(
            {"connector": "multi", "transfer": {"children": {"nixl": {"leese_s": 1}}}},
            "`instances[0].transfer`: `children`: of `nixl`, unknown key `leese_s`; did you mean "
            "`lease_s`?",
            id="in-a-child",
        ),
    ],
)
def test_what_cant_be_is_refused_by_its_name(entry: dict[str, Any], message: str) -> None:
    """With the nearest key that exists, or what is valid."""
    with pytest.raises(ConfigError) as caught:
        decode(**entry)

    assert str(caught.value) == message


def test_children_have_settings_of_their_own_types() -> None:
    """Decoded once, not for every request."""
    children = {"nixl": {"lease_s": 5}, "example": {}}

    assert read_transfer("multi", {"children": children}) == ChildSettings(
        children={"nixl": NixlSettings(lease_s=5), "example": None}
    )


def test_settings_belong_to_connectors_that_exist() -> None:
    """And each but `multi` can be left out altogether."""
    assert set(STRUCTS) <= set(connectors())
    for name, struct in STRUCTS.items():
        if name != "multi":
            assert read_transfer(name, {}) == struct()


def test_settings_are_shown_as_they_were_given() -> None:
    """In `/status`, like every other key."""
    settings = decode(role="prefill", transfer={"lease_s": 10})

    assert msgspec.to_builtins(settings)["transfer"] == {"lease_s": 10}
