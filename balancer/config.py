"""The balancer's configuration: one frozen value, composed of the settings of its parts.

Rules:

1. Whoever starts the balancer decodes the file and passes the environment, and gets a value or a
   ConfigError that names the key. The only files read here are the tokenizers and the code that
   the configuration names: each is loaded once, to refuse what is broken at start.
2. A secret is given in the file or by the name of an environment variable, not both.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from balancer.connectors.available import connector_fault, known_connectors
from balancer.core.fleet.snapshot import Role
from balancer.core.settings.admission import AdmissionSettings
from balancer.core.settings.control import (
    AdminSettings,
    InstanceSettings,
    ProbeSettings,
    TokensSettings,
    name_instances,
)
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.core.settings.encode import EncodeSettings
from balancer.core.settings.errors import ConfigError, Secret, encode_custom, nearest
from balancer.core.settings.handlers import HandlerSettings
from balancer.core.settings.notices import NoticeSettings
from balancer.core.settings.own_address import is_own_address
from balancer.core.settings.registration import RegistrationSettings
from balancer.core.settings.reliability import ReliabilitySettings
from balancer.core.settings.routing import PdSettings, RoutingSettings
from balancer.core.settings.tracing import TracingSettings
from balancer.own_code import load_handler, load_policy
from balancer.tokens.directory import TokenizerLoadError, load_tokenizer
from indexer.core.addresses import without_loopback_names
from indexer.core.limits import NonNegativeFloat, Port
from indexer.core.types import InstanceId


class BalancerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator can set of the balancer."""

    instances: tuple[InstanceSettings, ...] = ()
    """One entry describes one engine address."""
    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for every interface."""
    port: Port = 8080
    """Port to listen on; 0 takes any free one."""
    drain_s: NonNegativeFloat = 30.0
    """After SIGTERM running answers get this long to finish."""
    engine_api_key: Secret | None = None
    """Key of every engine that has none of its own. Without a key the client's own
    `Authorization` is passed on."""
    engine_api_key_env: str | None = None
    """Environment variable that holds it."""
    routing: RoutingSettings = RoutingSettings()
    pd: PdSettings = PdSettings()
    admission: AdmissionSettings = AdmissionSettings()
    encode: EncodeSettings = EncodeSettings()
    dataplane: DataPlaneSettings = DataPlaneSettings()
    reliability: ReliabilitySettings = ReliabilitySettings()
    tokens: TokensSettings = TokensSettings()
    probes: ProbeSettings = ProbeSettings()
    admin: AdminSettings = AdminSettings()
    tracing: TracingSettings = TracingSettings()
    handlers: HandlerSettings = HandlerSettings()
    registration: RegistrationSettings | None = None
    """None: engines can't announce themselves."""
    lmcache_notices: NoticeSettings | None = None
    """None: nobody listens to what LMCache's senders say."""

    @classmethod
    def entry_type(cls) -> type[InstanceSettings]:
        """What describes one instance, in the file and at run time."""
        return InstanceSettings

    @classmethod
    def reloadable(cls) -> tuple[str, ...]:
        """Keys that a running process can take over."""
        return RELOADABLE

    def check_fleet(self) -> None:
        """Raise ConfigError for instances that can't be in one fleet."""
        _refuse_duplicates("url", (each.id for each in self.instances))
        _refuse_loopback_twice(self.instances)
        _refuse_duplicates("alias", (each.name for each in self.instances))
        for number, instance in enumerate(self.instances):
            fault = connector_fault(instance.instance())
            if fault is not None:
                raise ConfigError(f"`instances[{number}].{fault}")

    def engine_keys(self) -> dict[InstanceId, str]:
        """Key to use with each instance that needs one."""
        keys = {each.id: each.api_key or self.engine_api_key for each in self.instances}
        return {instance: key.reveal() for instance, key in keys.items() if key is not None}

    def summary(self) -> Mapping[str, Any]:
        """For `/status`: every setting, secrets as asterisks."""
        shown: dict[str, Any] = msgspec.to_builtins(self, enc_hook=encode_custom)
        return shown


Config = TypeVar("Config", bound=BalancerConfig)

RELOADABLE = (
    "instances",
    "engine_api_key",
    "engine_api_key_env",
    "routing",
    "pd",
    "encode",
    "admin",
)
"""Keys that a running balancer can take over."""


def reloaded(running: Config, wanted: Config) -> Config:
    """Return `running` with everything of `wanted` that can change without a restart."""
    taken = {name: getattr(wanted, name) for name in running.reloadable()}
    # Books of predicted blocks have their size from the start.
    fixed = running.routing.max_predicted_blocks
    taken["routing"] = msgspec.structs.replace(wanted.routing, max_predicted_blocks=fixed)
    return msgspec.structs.replace(running, **taken)


def changed_keys(before: msgspec.Struct, now: msgspec.Struct) -> list[str]:
    """Name the keys whose values differ, as the file spells them: `routing.policy`."""
    changed: list[str] = []
    for key in before.__struct_fields__:
        old, new = getattr(before, key), getattr(now, key)
        if isinstance(old, msgspec.Struct) and type(old) is type(new):
            changed += [f"{key}.{inner}" for inner in changed_keys(old, new)]
        elif old != new:
            changed.append(key)
    return changed


def check_config(config: Config, environ: Mapping[str, str]) -> Config:
    """Return `config` with secrets and aliases filled in, or raise ConfigError for what can't work."""
    config = msgspec.structs.replace(config, instances=name_instances(config.instances))
    config.check_fleet()
    _refuse_own_addresses(config)
    if config.registration is not None:
        check_connector(config.registration.connector, "registration.connector", Role.DECODE)
    load_policy(config.routing.policy)
    for name in ("completion", "chat_completion", "forwarded"):
        load_handler(getattr(config.handlers, name), f"handlers.{name}")
    for model, directory in config.tokens.models.items():
        try:
            # It costs a second, and finds what is broken.
            load_tokenizer(Path(directory), str, config.tokens.engine_flags.get(model))
        except TokenizerLoadError as error:
            raise ConfigError(f"`tokens.models.{model}`: {error}") from error
    return _with_secrets(config, environ)


def check_connector(name: str | None, where: str, role: Role) -> None:
    """Raise ConfigError if there is no connector `name` for instances of `role`."""
    known = list(known_connectors(role))
    if name is not None and name not in known:
        raise ConfigError(f"`{where}`: no connector `{name}`{nearest(name, known)}")


def checked_key(key: Secret) -> Secret:
    """A key as a header can carry it. Raises ConfigError."""
    return _sendable(key.reveal(), "`api_key`: ")


def _refuse_duplicates(key: str, values: Iterable[str]) -> None:
    seen: dict[str, int] = {}
    for number, value in enumerate(values):
        if value in seen:
            first = f"instances[{seen[value]}]"
            raise ConfigError(f"`instances[{number}].{key}`: {value} is {first} already")
        seen[value] = number


def _refuse_loopback_twice(instances: Sequence[InstanceSettings]) -> None:
    """Other names for one machine can't be told without asking, those of this one can."""
    seen: dict[InstanceId, str] = {}
    for number, each in enumerate(instances):
        where = f"instances[{number}]"
        first = seen.setdefault(without_loopback_names(each.id), where)
        if first != where:
            raise ConfigError(
                f"`{where}.url`: {each.id} is {first} under another name of this machine"
            )


def _refuse_own_addresses(config: BalancerConfig) -> None:
    """Only of what is written down: who stands in the fleet by another door is told by its answer."""
    for number, each in enumerate(config.instances):
        if is_own_address(each.id, config.host, config.port):
            raise ConfigError(
                f"`instances[{number}].url`: {each.id} is where this balancer listens itself"
            )


def _with_secrets(config: Config, environ: Mapping[str, str]) -> Config:
    instances = tuple(
        msgspec.structs.replace(
            each, api_key=_secret(each, "api_key", f"instances[{number}].", environ)
        )
        for number, each in enumerate(config.instances)
    )
    admin_key = _secret(config.admin, "api_key", "admin.", environ)
    return msgspec.structs.replace(
        config,
        instances=instances,
        engine_api_key=_secret(config, "engine_api_key", "", environ),
        admin=msgspec.structs.replace(config.admin, api_key=admin_key),
    )


def _secret(
    settings: msgspec.Struct, key: str, where: str, environ: Mapping[str, str]
) -> Secret | None:
    """Read the secret `key`, given as such or through the environment."""
    value: Secret | None = getattr(settings, key)
    variable: str | None = getattr(settings, f"{key}_env")
    if variable is None:
        return None if value is None else _sendable(value.reveal(), f"`{where}{key}`: ")
    found = environ.get(variable, "").strip()
    if value is not None and value.reveal().strip() != found:
        raise ConfigError(f"`{where}{key}_env`: `{where}{key}` is set, too; remove one")
    if not found:
        raise ConfigError(f"`{where}{key}_env`: environment variable {variable} is not set")
    return _sendable(found, f"`{where}{key}_env`: environment variable {variable} ")


def _sendable(text: str, named: str) -> Secret:
    """Return the key as a header can carry it. A client library would quote a bad one in its error."""
    key = text.strip()  # a key read from a file often ends with a line break
    if not key:
        raise ConfigError(f"{named}is empty")
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{named}holds characters that can't stand in a header")
    return Secret(key)
