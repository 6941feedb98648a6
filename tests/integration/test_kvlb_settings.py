"""Settings of `kvlb up`: file, environment and command line joined, mistakes named by key."""

import re
from pathlib import Path

import pytest
import yaml

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.errors import Secret, decode_settings
from balancer.core.settings.tracing import TracingSettings
from kvlb.errors import NoEnginesError, SettingsError
from kvlb.settings import KvlbSettings, Overrides, load_fleet, load_settings

NOTHING = Overrides()
PASSWORD = {"KVLB_REDIS_PASSWORD": "s3cret"}
DOCS = Path(__file__).parent.parent.parent / "docs"
EXAMPLES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(
        re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    )
    if not block.startswith("# docker-compose")  # compose's own files have tests of their own
]


def load(text: str, tmp_path: Path, overrides: Overrides = NOTHING, **environ: str) -> KvlbSettings:
    path = tmp_path / "kvlb.yaml"
    path.write_text(text)
    return load_settings(path, overrides, environ)


def test_no_file_gives_defaults() -> None:
    """`kvlb up --instance ...` needs no file; unnamed instances are named by role."""
    overrides = Overrides(
        instances=("http://a:1,role=prefill", "http://b:2,role=decode", "http://c:3,role=decode")
    )

    settings = load_settings(None, overrides, {})

    assert [each.name for each in settings.instances] == ["p0", "d0", "d1"]
    assert settings.routing.policy == "kvlb"
    assert settings.port == 8080


def test_one_entry_describes_an_engine_to_both_halves(tmp_path: Path) -> None:
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


def test_environment_overrides_the_file_and_options_override_both(tmp_path: Path) -> None:
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


def test_instance_options_replace_the_files_instances(tmp_path: Path) -> None:
    """They don't add to it: what was said last is the fleet."""
    settings = load(
        "instances: [{url: 'http://a:1'}]", tmp_path, Overrides(instances=("http://b:2",))
    )

    assert [each.id for each in settings.instances] == ["http://b:2"]


def test_secrets_come_from_the_environment_and_never_show(tmp_path: Path) -> None:
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
def test_mistake_in_the_file_names_file_and_key(text: str, says: str, tmp_path: Path) -> None:
    """What to change, and where."""
    with pytest.raises(SettingsError) as caught:
        load(text, tmp_path)

    assert says in str(caught.value)
    assert str(tmp_path / "kvlb.yaml") in str(caught.value)


def test_policy_option_over_a_section_of_the_wrong_type(tmp_path: Path) -> None:
    """The decoder names the section; the option does not crash on it."""
    with pytest.raises(SettingsError, match="`routing`"):
        load("routing: 7", tmp_path, Overrides(policy="kvlb"))


def test_empty_file_is_no_mistake(tmp_path: Path) -> None:
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


def test_two_instances_cannot_share_an_address() -> None:
    """Checked over all of them."""
    with pytest.raises(SettingsError, match="already"):
        load_settings(None, Overrides(instances=("http://a:1", "http://A:1/")), {})


@pytest.mark.parametrize("example", EXAMPLES)
def test_documented_example_is_valid(example: str) -> None:
    """Every YAML block of the documents has keys that exist and values of their types."""
    settings = decode_settings(yaml.safe_load(example), KvlbSettings, where="")

    assert settings != KvlbSettings()


def test_redis_may_be_named_by_file_environment_and_option(tmp_path: Path) -> None:
    """In that order, as everything else."""
    text = "redis: {url: 'redis://file:1', lease_s: 60}"

    by_file = load(text, tmp_path)
    by_environment = load(text, tmp_path, KVLB_REDIS_URL="redis://environment:1")
    by_option = load(text, tmp_path, Overrides(redis_url="redis://option:1"))

    assert by_file.redis is not None
    assert by_environment.redis is not None
    assert by_option.redis is not None
    assert by_file.redis.url == "redis://file:1"
    assert by_environment.redis.url == "redis://environment:1"
    assert (by_option.redis.url, by_option.redis.lease_s) == ("redis://option:1", 60)


@pytest.mark.parametrize("text", ["", "redis:"], ids=["no-section", "empty-section"])
def test_without_redis_there_is_none(text: str, tmp_path: Path) -> None:
    """A password alone doesn't make one."""
    assert load(text, tmp_path, NOTHING, **PASSWORD).redis is None


def test_usual_variable_holds_redis_password(tmp_path: Path) -> None:
    """Unless the file names another; its value shows nowhere."""
    usual = load("redis: {}", tmp_path, NOTHING, **PASSWORD).redis
    named = load("redis: {password_env: X}", tmp_path, NOTHING, X="x", **PASSWORD).redis

    assert usual is not None
    assert named is not None
    assert [usual.password_env] == list(PASSWORD)
    assert [named.password_env] == ["X"]
    assert "s3cret" not in repr(usual)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("redis: {password_env: NOT_SET}", "`redis.password_env`", id="variable"),
        pytest.param("redis: {url: 'http://a:1'}", "redis", id="scheme"),
        pytest.param("redis: {url: 'redis://:pw@a:1'}", "password_env", id="password"),
        pytest.param("redis: {lease: 1}", "did you mean `lease_s`", id="unknown"),
        pytest.param("tracing: {endpoint: collector}", "tracing", id="endpoint"),
        pytest.param("tracing: {sample_ratio: 2}", "`tracing.sample_ratio`", id="ratio"),
    ],
)
def test_mistake_in_redis_or_tracing_is_named(text: str, says: str, tmp_path: Path) -> None:
    """And the password in an address is not repeated."""
    with pytest.raises(SettingsError) as caught:
        load(text, tmp_path)

    assert says in str(caught.value)
    assert ":pw@" not in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        pytest.param(None, None, id="off"),
        pytest.param("http://c:4318", "http://c:4318/v1/traces", id="base"),
        pytest.param("http://c:4318/", "http://c:4318/v1/traces", id="slash"),
        pytest.param("https://c/otlp/v1/traces", "https://c/otlp/v1/traces", id="whole"),
    ],
)
def test_traces_go_to_the_usual_path(endpoint: str | None, url: str | None) -> None:
    """Unless another one is given."""
    assert TracingSettings(endpoint=endpoint).traces_url == url


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
    text: str, place: str, key: str, tmp_path: Path
) -> None:
    """Its place is named; a client library would have quoted it in a log."""
    with pytest.raises(SettingsError) as caught:
        load(text % key, tmp_path)

    assert place in str(caught.value)
    assert "y-1" not in str(caught.value)


def test_key_of_the_environment_that_is_no_header_value_is_refused_unseen(tmp_path: Path) -> None:
    """The variable is named."""
    with pytest.raises(SettingsError, match="environment variable ODD holds") as caught:
        load("engine_api_key_env: ODD", tmp_path, ODD="one\ntwo")

    assert "two" not in str(caught.value)


def test_white_space_around_a_key_is_no_part_of_it(tmp_path: Path) -> None:
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
def test_two_instances_cannot_share_a_stream(first: str, second: str, tmp_path: Path) -> None:
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
def test_streams_that_differ_are_no_mistake(first: str, second: str, tmp_path: Path) -> None:
    """The endpoint of a data-parallel group is the same for all of its ranks, the ports are not."""
    assert len(load(two_instances(first, second), tmp_path).instances) == 2


def test_rank_without_a_port_is_refused(tmp_path: Path) -> None:
    """The highest rank's port must exist."""
    with pytest.raises(SettingsError, match=r"instances\[0\]\.events.*rank 1"):
        load("instances: [{url: 'http://a:1', events: 'tcp://h:65535', ranks: 2}]", tmp_path)


def test_repeated_key_is_refused_with_its_lines(tmp_path: Path) -> None:
    """The second would silently win."""
    with pytest.raises(SettingsError, match="line 3: key `port` is in line 1 already"):
        load("port: 1\nhost: h\nport: 2\n", tmp_path)


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    """That is what `<<` is for, and it may be written twice."""
    text = """
instances:
  - &first {url: "http://a:1", role: decode}
  - &second {url: "http://b:1", connector: none}
  - {<<: *first, <<: *second, url: "http://c:1"}
"""
    assert load(text, tmp_path).instances[2].id == "http://c:1"


@pytest.mark.parametrize("url", ["u:hunter2@a:1", "ftp://u:hunter2@a:1", "http://u:hunter2@a:1/x"])
def test_password_in_an_address_of_the_file_is_not_repeated(url: str, tmp_path: Path) -> None:
    """Whatever else is wrong with the address."""
    with pytest.raises(SettingsError, match="credentials") as caught:
        load(f"instances: [{{url: '{url}'}}]", tmp_path)

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:6379/abc",
        "redis://h:6379/1/2",
        "redis://h:6379/-1",
        "redis://h:99999/0",
        "redis://h:0/0",
        "redis://h:six/0",
        "redis://[::1/0",
        "redis://a b:6379/0",
        "redis://:6379/0",
        "redis:///0",
        "redis://h:6379/0#1",
        "redis://h:6379/0?db=1",
        "rediss://h:6379/0?password=x",
        "http://h:6379/0",
        "h:6379",
        "unix://",
        "unix://run/redis.sock",
        "unix:///run/redis.sock?db=x",
        "unix:///run/redis.sock?password=x",
    ],
)
def test_redis_address_that_would_be_misread_is_refused(url: str) -> None:
    """By the key's name, with the right form: the client takes `abc` for 0 and `1/2` for 12."""
    with pytest.raises(SettingsError) as caught:
        load_settings(None, Overrides(redis_url=url), {})

    assert str(caught.value).startswith("`redis.url`: ")
    assert "redis://host:6379/0" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h:6379/",
        "redis://[::1]:6379/15",
        "rediss://h:6379/0?ssl_ca_certs=/ca.pem&ssl_cert_reqs=required",
        "unix:///run/redis.sock",
        "unix:///run/redis.sock?db=3",
    ],
)
def test_redis_address_is_taken_as_it_is(url: str) -> None:
    """Every form that the page names."""
    redis = load_settings(None, Overrides(redis_url=url), {}).redis

    assert redis is not None
    assert redis.url == url


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
def test_address_that_cannot_be_is_refused_by_its_key(text: str, key: str, tmp_path: Path) -> None:
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
    text: str, instead: str, tmp_path: Path
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
