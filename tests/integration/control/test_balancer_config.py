"""The balancer's configuration as an operator writes it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from balancer.config import BalancerConfig, check_config
from balancer.core.settings.errors import ConfigError, decode_settings
from balancer.core.settings.registration import RegistrationSettings
from kvlb.settings import KvlbSettings

ROOT = Path(__file__).parents[3]
A = "http://a:1"
B = "http://b:1"


def configure(data: dict[str, Any], **environ: str) -> BalancerConfig:
    """Decode and check, as the command does."""
    return check_config(decode_settings(data, BalancerConfig, where=""), environ)


def test_empty_configuration_is_valid() -> None:
    """Every key has a default."""
    assert configure({}) == BalancerConfig()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(
            {"routing": {"polcy": "kvlb"}},
            "unknown key `routing.polcy`; did you mean `policy`?",
            id="routing-key",
        ),
        pytest.param(
            {"instances": [{"url": A, "rol": "decode"}]},
            "unknown key `instances[0].rol`; did you mean `role`?",
            id="instance-key",
        ),
        pytest.param(
            {"instances": [{"url": A, "role": "both"}]},
            "`instances[0].role`: Invalid enum value 'both'",
            id="role",
        ),
        pytest.param({"port": 70000}, "`port`: Expected `int` <= 65535", id="port"),
        pytest.param({"host": ""}, "`host`: Expected `str` of length >= 1", id="host"),
        pytest.param(
            {"instances": [{"url": A}, {"url": A + "/"}]},
            "`instances[1].url`: http://a:1 is instances[0] already",
            id="same-address",
        ),
        pytest.param(
            {"instances": [{"url": A, "alias": "x"}, {"url": B, "alias": "x"}]},
            "`instances[1].alias`: x is instances[0] already",
            id="same-alias",
        ),
        pytest.param(
            {"instances": [{"url": A, "connector": "nixel"}]},
            "`instances[0].connector`: no connector `nixel`; did you mean `nixl`?",
            id="connector",
        ),
        pytest.param(
            {"tokens": {"models": {"m": "/nowhere"}}},
            "`tokens.models.m`: /nowhere/tokenizer.json is missing",
            id="tokenizer",
        ),
        pytest.param(
            {"admin": {"api_key_env": "NOT_SET"}},
            "`admin.api_key_env`: environment variable NOT_SET is not set",
            id="no-such-variable",
        ),
        pytest.param(
            {"engine_api_key": "a", "engine_api_key_env": "KEY"},
            "`engine_api_key_env`: `engine_api_key` is set, too; remove one",
            id="secret-given-twice",
        ),
        pytest.param(
            {"instances": [{"url": A, "api_key": ""}]},
            "`instances[0].api_key`: is empty",
            id="empty-secret",
        ),
        pytest.param({"probes": {"interval_s": 0}}, "`probes.interval_s`: Expected", id="zero"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(data: dict[str, Any], message: str) -> None:
    """The message names the key and says what to change."""
    with pytest.raises(ConfigError) as raised:
        configure(data, KEY="other")

    assert str(raised.value).startswith(message)


def test_instances_get_aliases() -> None:
    """Checked configurations name every instance."""
    config = configure({"instances": [{"url": A, "role": "prefill"}, {"url": B}]})

    assert [each.alias for each in config.instances] == ["p0", "m0"]


def test_secrets_come_from_the_environment() -> None:
    """Each instance's own key wins over the one for all."""
    config = configure(
        {
            "engine_api_key_env": "ALL",
            "admin": {"api_key_env": "ADMIN"},
            "instances": [{"url": A, "api_key_env": "ONE"}, {"url": B}],
        },
        ALL="all-secret",
        ONE="one-secret",
        ADMIN="admin-secret",
    )

    assert config.engine_keys() == {A: "one-secret", B: "all-secret"}
    assert config.admin.api_key is not None
    assert config.admin.api_key.reveal() == "admin-secret"


def test_checking_twice_changes_nothing() -> None:
    """A reload may check what was checked."""
    environ = {"ALL": "all-secret"}
    config = configure({"engine_api_key_env": "ALL", "instances": [{"url": A}]}, **environ)

    assert check_config(config, environ) == config


def test_instances_without_a_key_have_none() -> None:
    """Clients' own credentials are passed on to them."""
    assert configure({"instances": [{"url": A}]}).engine_keys() == {}


def test_summary_shows_no_secret() -> None:
    """It is part of /status."""
    config = configure(
        {"engine_api_key": "s3cret", "instances": [{"url": A, "api_key": "t0psecret"}]}
    )

    shown = str(config.summary())

    assert "s3cret" not in shown
    assert "t0psecret" not in shown
    assert "s3cret" not in repr(config)
    assert config.summary()["instances"][0]["api_key"] == "***"


def test_tokenizer_is_loaded_when_checked(tokenizer_directory: str) -> None:
    """A directory that works is accepted."""
    config = configure({"tokens": {"models": {"m": tokenizer_directory}}})

    assert config.tokens.models == {"m": tokenizer_directory}


def keys_of(struct: Any, where: str) -> set[str]:
    """Every key of a settings struct, with its path."""
    found = set()
    for name in struct.__struct_fields__:
        value = struct.__struct_defaults__[struct.__struct_fields__.index(name)]
        if name == "registration":  # not there unless asked for
            found |= keys_of(RegistrationSettings, f"{where}{name}.")
        elif hasattr(type(value), "__struct_fields__"):
            found |= keys_of(type(value), f"{where}{name}.")
        else:
            found.add(f"{where}{name}")
    return found


def test_every_key_is_documented() -> None:
    """docs/configuration.md names each key, and the example in it is valid."""
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    documented = set(re.findall(r"`([a-z_.]+)`", text))

    missing = {key for key in keys_of(BalancerConfig, "") if key not in documented}

    assert missing == set()


def test_example_is_valid() -> None:
    """Newcomers copy it."""
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)

    settings = decode_settings(yaml.safe_load(example), KvlbSettings, where="")

    assert [each.role.value for each in settings.instances] == ["prefill", "decode"]
