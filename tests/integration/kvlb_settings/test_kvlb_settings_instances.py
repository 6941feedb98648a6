"""Settings of instances: addresses, streams and keys that can't be."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from balancer.core.settings.errors import Secret
from kvlb.errors import NoEnginesError, SettingsError
from kvlb.settings import KvlbSettings, Overrides, load_fleet, load_settings

Load = Callable[..., KvlbSettings]

NOTHING = Overrides()


def test_two_instances_cannot_share_an_address() -> None:
    """Checked over all of them."""
    with pytest.raises(SettingsError, match="already"):
        load_settings(None, Overrides(instances=("http://a:1", "http://A:1/")), {})


def test_fleet_without_instances_is_refused(tmp_path: Path) -> None:
    """With the file's name and what to do."""
    path = tmp_path / "kvlb.yaml"
    path.write_text("port: 1")

    with pytest.raises(NoEnginesError, match=r"kvlb\.yaml.*instances"):
        load_fleet(path, NOTHING, {})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        pytest.param("engine_api_key: '%s'", "`engine_api_key`", id="engines"),
        pytest.param(
            "instances: [{url: 'http://a:1', api_key: '%s'}]", "`instances[0].api_key`", id="one"
        ),
        pytest.param("admin: {api_key: '%s'}", "`admin.api_key`", id="admin"),
    ],
)
@pytest.mark.parametrize(
    "key", [pytest.param("kéy-1", id="not-ascii"), pytest.param("k\u00a0y-1", id="no-break-space")]
)
def test_key_that_is_no_header_value_is_refused_unseen(
    text: str, place: str, key: str, tmp_path: Path, load: Load
) -> None:
    """Its place is named; a client library would have quoted it in a log."""
    with pytest.raises(SettingsError) as caught:
        load(text % key, tmp_path)

    assert place in str(caught.value)
    assert "y-1" not in str(caught.value)


def test_key_of_the_environment_that_is_no_header_value_is_refused_unseen(
    tmp_path: Path, load: Load
) -> None:
    """The variable is named."""
    with pytest.raises(SettingsError, match="environment variable ODD holds") as caught:
        load("engine_api_key_env: ODD", tmp_path, ODD="one\ntwo")

    assert "two" not in str(caught.value)


def test_white_space_around_a_key_is_no_part_of_it(tmp_path: Path, load: Load) -> None:
    """A file that a variable was filled from ends with a line break."""
    text = "{engine_api_key_env: X, admin: {api_key: ' a '}}"

    settings = load(text, tmp_path, X="e\n")

    assert settings.engine_api_key == Secret("e")
    assert settings.admin.api_key == Secret("a")


ONE_STREAM = [
    pytest.param("events: 'tcp://h:5557'", "events: 'tcp://h:5557'", id="same"),
    pytest.param("events: 'tcp://h:5556', ranks: 2", "events: 'tcp://h:5557'", id="second-rank"),
    pytest.param(
        "events: 'tcp://h:5557', direction: bind, topic: a",
        "events: 'tcp://*:5557', direction: bind",
        id="bound-and-one-without-topic",
    ),
    pytest.param(
        "events: 'tcp://*:5557', direction: bind, topic: a",
        "events: 'tcp://*:5557', direction: bind, topic: a",
        id="bound-with-one-topic",
    ),
    pytest.param("topic: a", "topic: a", id="shared-port-and-one-topic"),
]


def two_instances(first: str, second: str) -> str:
    return (
        "{indexer: {shared_bind: 'tcp://*:5600'}, "
        f"instances: [{{url: 'http://a:1', {first}}}, {{url: 'http://b:1', {second}}}]}}"
    )


@pytest.mark.parametrize(("first", "second"), ONE_STREAM)
def test_two_instances_cannot_share_a_stream(
    first: str, second: str, tmp_path: Path, load: Load
) -> None:
    """Blocks of one would be taken for the other's; both are named."""
    with pytest.raises(SettingsError, match=r"instances\[1\]\.events.*instances\[0\]'s"):
        load(two_instances(first, second), tmp_path)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            "events: 'tcp://h:5557'",
            "events: 'tcp://h:5557', rank_base: 1",
            id="ranks-of-one-group",
        ),
        pytest.param("topic: a", "topic: b", id="topics"),
        pytest.param("role: prefill", "role: decode", id="asked-of-the-engines"),
    ],
)
def test_streams_that_differ_are_no_mistake(
    first: str, second: str, tmp_path: Path, load: Load
) -> None:
    """The endpoint of a data-parallel group is the same for all of its ranks, the ports are not."""
    assert len(load(two_instances(first, second), tmp_path).instances) == 2


def test_rank_without_a_port_is_refused(tmp_path: Path, load: Load) -> None:
    """The highest rank's port must exist."""
    with pytest.raises(SettingsError, match=r"instances\[0\]\.events.*rank 1"):
        load("instances: [{url: 'http://a:1', events: 'tcp://h:65535', ranks: 2}]", tmp_path)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        pytest.param(
            "tracing: {endpoint: 'http://c:99999'}", "tracing.endpoint", id="tracing-port"
        ),
        pytest.param("tracing: {endpoint: 'http://c?x=1'}", "tracing.endpoint", id="tracing-query"),
        pytest.param("tracing: {endpoint: 'c:4318'}", "tracing.endpoint", id="tracing-scheme"),
        pytest.param("instances: [{url: 'http://a:99999'}]", "instances[0].url", id="port"),
        pytest.param("instances: [{url: 'http://a b:1'}]", "instances[0].url", id="space"),
        pytest.param("instances: [{url: 'http://[::1:1'}]", "instances[0].url", id="bracket"),
        pytest.param(
            "instances: [{url: 'http://a:1', replay: 'tcp://a b:2'}]",
            "instances[0].replay",
            id="replay",
        ),
        pytest.param(
            "indexer: {shared_bind: 'tcp://*:99999'}", "indexer.shared_bind", id="shared-bind"
        ),
    ],
)
def test_address_that_cannot_be_is_refused_by_its_key(
    text: str, key: str, tmp_path: Path, load: Load
) -> None:
    """Before anything is connected to it."""
    with pytest.raises(SettingsError, match=re.escape(f": `{key}`: ")):
        load(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        pytest.param("redis: {url: 'redis://u:hun#ter2@h'}", "password_env", id="redis"),
        pytest.param("redis: {url: 'redis://:hunter2@h'}", "password_env", id="redis-no-user"),
        pytest.param("tracing: {endpoint: 'http://u:hunter2@c'}", "OTEL_", id="tracing"),
    ],
)
def test_password_in_an_address_is_refused_and_not_repeated(
    text: str, instead: str, tmp_path: Path, load: Load
) -> None:
    """`/status` shows both addresses."""
    with pytest.raises(SettingsError, match=instead) as caught:
        load(text, tmp_path)

    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("other", ["http://127.0.0.1:8000", "http://[::1]:8000"])
def test_one_port_of_this_machine_is_one_instance(other: str) -> None:
    """Under whichever of its usual names: the engine's cache and load would count twice."""
    with pytest.raises(SettingsError, match=r"`instances\[1\].url`: .* under another name"):
        load_settings(None, Overrides(instances=("http://localhost:8000", other)), {})


def test_ports_and_other_addresses_of_this_machine_are_instances_of_their_own() -> None:
    """An engine can listen on 127.0.0.2."""
    urls = ("http://localhost:1", "http://127.0.0.1:2", "http://127.0.0.2:1", "https://[::1]:1")

    settings = load_settings(None, Overrides(instances=urls), {})

    assert len(settings.instances) == len(urls)


@pytest.mark.parametrize("variable", ["KVLB_ENGINE_API_KEY", "KVLB_ADMIN_API_KEY"])
def test_unusable_key_of_the_usual_variable_is_named_by_it(variable: str) -> None:
    """The file has no key to change."""
    with pytest.raises(SettingsError, match=f"environment variable {variable} holds") as caught:
        load_settings(None, NOTHING, {variable: "one\ntwo"})

    assert "two" not in str(caught.value)
