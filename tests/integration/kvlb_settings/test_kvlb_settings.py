"""Where settings of `kvlb up` come from, what wins over what, and mistakes named by key."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.errors import Secret, decode_settings
from kvlb.errors import SettingsError
from kvlb.settings import KvlbSettings, Overrides, load_settings

Load = Callable[..., KvlbSettings]

NOTHING = Overrides()

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(
        re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    )
    if not block.startswith("# docker-compose")  # compose's own files have tests of their own
]


def test_no_file_gives_defaults() -> None:
    """`kvlb up --instance ...` needs no file; unnamed instances are named by role."""
    overrides = Overrides(
        instances=("http://a:1,role=prefill", "http://b:2,role=decode", "http://c:3,role=decode")
    )

    settings = load_settings(None, overrides, {})

    assert [each.name for each in settings.instances] == ["p0", "d0", "d1"]
    assert settings.routing.policy == "kvlb"
    assert settings.port == 8080


def test_one_entry_describes_an_engine_to_both_halves(tmp_path: Path, load: Load) -> None:
    """Role goes to the balancer, endpoints go to the indexer, address, name and key to both."""
    settings = load(
        """
        instances:
          - url: http://GPU1:8000/
            alias: big
            role: decode
            ranks: 2
            events: tcp://gpu1:5557
            replay: tcp://gpu1:6557
            api_key: k1
        """,
        tmp_path,
    )

    (instance,) = settings.instances
    (source,) = settings.engine_sources()
    assert (instance.role, instance.ranks) == (Role.DECODE, 2)
    assert (source.instance, source.name) == (instance.id, "big")
    assert (source.events, source.replay, source.ranks) == ("tcp://gpu1:5557", "tcp://gpu1:6557", 2)
    assert source.api_key == "k1"


def test_one_rank_is_left_for_the_engine_to_say() -> None:
    """Nobody said how many: `/kv_event_sources` knows."""
    settings = load_settings(None, Overrides(instances=("http://a:1",)), {})

    assert settings.engine_sources()[0].ranks is None


def test_environment_overrides_the_file_and_options_override_both(
    tmp_path: Path, load: Load
) -> None:
    """File < environment < options, key by key."""
    text = "{host: 10.0.0.1, port: 1, routing: {policy: session, lookup_timeout_s: 0.5}}"

    settings = load(
        text,
        tmp_path,
        Overrides(port=3, policy="round_robin"),
        KVLB_HOST="10.0.0.2",
        KVLB_PORT="2",
    )

    assert (settings.host, settings.port) == ("10.0.0.2", 3)
    assert settings.routing.policy == "round_robin"
    assert settings.routing.lookup_timeout_s == 0.5


def test_host_option_overrides_the_environment() -> None:
    """The nearest word wins."""
    settings = load_settings(None, Overrides(host="::1"), {"KVLB_HOST": "10.0.0.2"})

    assert settings.host == "::1"


def test_instance_options_replace_the_files_instances(tmp_path: Path, load: Load) -> None:
    """They don't add to it: what was said last is the fleet."""
    settings = load(
        "instances: [{url: 'http://a:1'}]", tmp_path, Overrides(instances=("http://b:2",))
    )

    assert [each.id for each in settings.instances] == ["http://b:2"]


def test_secrets_come_from_the_environment_and_never_show(tmp_path: Path, load: Load) -> None:
    """Also where the file names a variable for them."""
    settings = load(
        "{engine_api_key_env: OTHER, admin: {api_key: from-file}}",
        tmp_path,
        KVLB_ENGINE_API_KEY="engine-secret",
        KVLB_ADMIN_API_KEY="admin-secret",
    )

    assert settings.engine_api_key == Secret("engine-secret")
    assert settings.admin.api_key == Secret("admin-secret")
    assert "secret" not in f"{settings!r}{settings.summary()}".replace("Secret", "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("routing: {polcy: kvlb}", "unknown key `routing.polcy`", id="unknown"),
        pytest.param("routing: {polcy: kvlb}", "did you mean `policy`", id="nearest"),
        pytest.param("instances: [{url: 'http://a:1', rol: x}]", "instances[0].rol", id="in-list"),
        pytest.param("indexer: {replay_timeout: 1}", "`replay_timeout_s`", id="indexer"),
        pytest.param("port: eighty", "`port`", id="wrong-type"),
        pytest.param("routing: [1]", "`routing`", id="section-of-wrong-type"),
        pytest.param("instances: [{url: a:1}]", "instances[0]", id="address"),
        pytest.param(
            "instances: [{url: 'http://a:1', events: 'a:2'}]", "instances[0]", id="endpoint"
        ),
        pytest.param("- a", "holds no keys", id="list"),
        pytest.param("a: [", "is not YAML", id="not-yaml"),
    ],
)
def test_mistake_in_the_file_names_file_and_key(
    text: str, says: str, tmp_path: Path, load: Load
) -> None:
    """What to change, and where."""
    with pytest.raises(SettingsError) as caught:
        load(text, tmp_path)

    assert says in str(caught.value)
    assert str(tmp_path / "kvlb.yaml") in str(caught.value)


def test_policy_option_over_a_section_of_the_wrong_type(tmp_path: Path, load: Load) -> None:
    """The decoder names the section; the option does not crash on it."""
    with pytest.raises(SettingsError, match="`routing`"):
        load("routing: 7", tmp_path, Overrides(policy="kvlb"))


def test_empty_file_is_no_mistake(tmp_path: Path, load: Load) -> None:
    """It says nothing, so the defaults hold."""
    assert load("", tmp_path).instances == ()


def test_missing_file_is_named(tmp_path: Path) -> None:
    """Not a traceback."""
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(tmp_path / "absent.yaml", NOTHING, {})


def test_port_of_the_environment_must_be_a_number() -> None:
    """The variable is named."""
    with pytest.raises(SettingsError, match="KVLB_PORT"):
        load_settings(None, NOTHING, {"KVLB_PORT": "http"})


@pytest.mark.parametrize(
    ("option", "says"),
    [
        pytest.param("http://a:1/v1", "no path", id="path"),
        pytest.param("http://a:1,events=tcp://a", "tcp://host:port", id="endpoint"),
        pytest.param("http://a:1,alias=a b", "alias", id="alias"),
    ],
)
def test_mistake_in_an_option_names_the_option(option: str, says: str) -> None:
    """Not a place in a file that doesn't exist."""
    with pytest.raises(SettingsError) as caught:
        load_settings(None, Overrides(instances=(option,)), {})

    assert str(caught.value).startswith(f"--instance {option}")
    assert says in str(caught.value)


@pytest.mark.parametrize("example", EXAMPLES)
def test_documented_example_is_valid(example: str) -> None:
    """Every YAML block of the documents has keys that exist and values of their types."""
    settings = decode_settings(yaml.safe_load(example), KvlbSettings, where="")

    assert settings != KvlbSettings()


def test_repeated_key_is_refused_with_its_lines(tmp_path: Path, load: Load) -> None:
    """The second would silently win."""
    with pytest.raises(SettingsError, match="line 3: key `port` is in line 1 already"):
        load("port: 1\nhost: h\nport: 2\n", tmp_path)


def test_merged_keys_may_be_overridden(tmp_path: Path, load: Load) -> None:
    """That is what `<<` is for, and it may be written twice."""
    text = """
instances:
  - &first {url: "http://a:1", role: decode}
  - &second {url: "http://b:1", connector: none}
  - {<<: *first, <<: *second, url: "http://c:1"}
"""
    assert load(text, tmp_path).instances[2].id == "http://c:1"
