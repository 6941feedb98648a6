"""Settings of Redis and of tracing: who names them, and secrets that aren't repeated."""

from collections.abc import Callable
from pathlib import Path

import pytest

from balancer.core.settings.tracing import TracingSettings
from kvlb.errors import SettingsError
from kvlb.settings import KvlbSettings, Overrides, load_settings

Load = Callable[..., KvlbSettings]

NOTHING = Overrides()
PASSWORD = {"KVLB_REDIS_PASSWORD": "s3cret"}


def test_redis_may_be_named_by_file_environment_and_option(tmp_path: Path, load: Load) -> None:
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
def test_without_redis_there_is_none(text: str, tmp_path: Path, load: Load) -> None:
    """A password alone doesn't make one."""
    assert load(text, tmp_path, NOTHING, **PASSWORD).redis is None


def test_usual_variable_holds_redis_password(tmp_path: Path, load: Load) -> None:
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
def test_mistake_in_redis_or_tracing_is_named(
    text: str, says: str, tmp_path: Path, load: Load
) -> None:
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


@pytest.mark.parametrize("url", ["u:hunter2@a:1", "ftp://u:hunter2@a:1", "http://u:hunter2@a:1/x"])
def test_password_in_an_address_of_the_file_is_not_repeated(
    url: str, tmp_path: Path, load: Load
) -> None:
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
