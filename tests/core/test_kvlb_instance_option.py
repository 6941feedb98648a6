"""`--instance`: what one line says of an engine, and how its mistakes are named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlb.errors import SettingsError
from kvlb.instance_option import NAMES, parse_instance


def test_an_address_is_enough() -> None:
    """Everything but the address has a default, which the settings know."""
    assert parse_instance("http://10.0.0.1:8000") == {"url": "http://10.0.0.1:8000"}


def test_every_name_is_read() -> None:
    """All parts of an instance fit on the line, numbers as numbers."""
    text = (
        "http://h:1, events=tcp://h:5557, replay=tcp://h:5558, role=decode, alias=d0, "
        "connector=nixl, ranks=2, rank_base=4, ec_zmq_addrs=tcp://h:1+tcp://h:2"
    )

    assert parse_instance(text) == {
        "url": "http://h:1",
        "events": "tcp://h:5557",
        "replay": "tcp://h:5558",
        "role": "decode",
        "alias": "d0",
        "connector": "nixl",
        "ranks": 2,
        "rank_base": 4,
        "ec_zmq_addrs": ["tcp://h:1", "tcp://h:2"],
    }


def test_connector_settings_are_a_mapping() -> None:
    """Numbers and truth values as such."""
    text = "http://h:1,transfer.engine_id=e-1,transfer.side_channel_port=5601,transfer.x=true"

    assert parse_instance(text)["transfer"] == {
        "engine_id": "e-1",
        "side_channel_port": 5601,
        "x": True,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(
            "http://h:1,transfer.a=1,transfer.a=2", "'transfer.a' is given twice", id="twice-there"
        ),
        pytest.param("gpu1:8000", "'gpu1:8000' is not an engine's address", id="no-scheme"),
        pytest.param("http://", "'http://' is not an engine's address", id="no-host"),
        pytest.param("http://h:port", "'http://h:port' is not an engine's", id="port-no-number"),
        pytest.param("http://h:99999", "'http://h:99999' is not an engine's", id="port-too-high"),
        pytest.param("tcp://h:1", "'tcp://h:1' is not an engine's address", id="event-socket"),
        pytest.param("http://h:1,prefill", "'prefill' is not name=value", id="no-name"),
        pytest.param("http://h:1,role=", "'role=' is not name=value", id="no-value"),
        pytest.param("http://h:1,event=tcp://h:2", "did you mean 'events'?", id="nearest"),
        pytest.param("http://h:1,xyz=1", "names are events, replay", id="no-near-name"),
        pytest.param("http://h:1,role=p,role=d", "role=p; roles are prefill", id="bad-role"),
        pytest.param("http://h:1,alias=a,alias=b", "'alias' is given twice", id="twice"),
        pytest.param("http://h:1,ranks=two", "ranks=two is not a whole number", id="number"),
        pytest.param("http://h:1,events=h:5557", "write events=tcp://host:port", id="endpoint"),
    ],
)
def test_mistake_is_named_with_the_remedy(text: str, says: str) -> None:
    """The message holds the part at fault and what would be right."""
    with pytest.raises(SettingsError) as caught:
        parse_instance(text)

    assert says in str(caught.value)
    assert text in str(caught.value)


@given(st.text())
def test_any_text_is_an_entry_or_a_settings_error(text: str) -> None:
    """No input escapes with another exception; an accepted one has known keys only."""
    try:
        entry = parse_instance(text)
    except SettingsError:
        return

    assert set(entry) <= {"url", "transfer", *NAMES}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("http://user:hunter2@h:1", "http://***@h:1: ", id="password"),
        pytest.param(
            "http://user:hun,ter2/@h:1,role=x", "http://***@h:1,role=x: ", id="odd-password"
        ),
        pytest.param("user:hunter2@h:1", "***@h:1: ", id="no-scheme"),
        pytest.param("http://h:1,api_key=hunter2", "http://h:1: ", id="key"),
        pytest.param("http://h:1, Api-Key = hun,ter2", "http://h:1: ", id="odd-key"),
        pytest.param("http://h:1,token=hunter2,role=decode", "http://h:1: ", id="token"),
    ],
)
def test_secret_is_refused_and_not_repeated(text: str, says: str) -> None:
    """The message points at where a key belongs."""
    with pytest.raises(SettingsError, match="`api_key_env`") as caught:
        parse_instance(text)

    assert str(caught.value).startswith(f"--instance {says}")
    assert "ter2" not in str(caught.value)
