"""Settings of every process: one YAML file, then the environment, then the command line. Typed, once.

Rules:

1. Later ways in win: file < environment < options. `--instance` options replace `instances:`.
2. A key nobody knows is refused with its path and the nearest one that exists; so is a value
   of the wrong type. Nothing is read twice, nothing is ignored.
3. Keys of the balancer (`routing`, `pd`, `dataplane`, ...) stand at the top of the file, those
   of the indexer under `indexer`; one entry of `instances` describes an engine to both.
4. Secrets may stand in the file, better in the environment; they never show in `repr`.

Environment: KVLB_HOST, KVLB_PORT, KVLB_REDIS_URL, KVLB_REDIS_PASSWORD, KVLB_ADMIN_API_KEY (or
ADMIN_API_KEY), KVLB_ENGINE_API_KEY.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from balancer.config import BalancerConfig, check_config, check_connector
from balancer.core.fleet.snapshot import Role
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import ConfigError, decode_settings
from indexer.config import Direction, IndexerConfig, InstanceSource
from indexer.core.endpoints import (
    EndpointError,
    bindable,
    check_endpoints,
    dialable,
    offset_port,
)
from indexer.core.limits import NonNegativeFloat
from indexer.redis_index.settings import RedisSettings
from kvlb.errors import NoEnginesError, SettingsError
from kvlb.instance_option import parse_instance
from kvlb.names.settings import DiscoverySettings, check_discovery
from kvlb.yaml_file import read_yaml

NO_ENGINES = (
    "no engine to balance over; name one with --instance http://host:port or list them under "
    "`instances:` in a file, given with --config kvlb.yaml"
)
EXAMPLE_ADMIN_KEY = "ADMIN_API_KEY"
"""As vLLM's example proxies call it: used where nothing else names a key."""
REDIS_PASSWORD = "KVLB_REDIS_PASSWORD"  # noqa: S105 - the variable's name


class InstanceEntry(InstanceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: what the balancer needs of it and where its events are.

    Engines from 0.31 on tell themselves where their events are found (`/kv_event_sources`). `events`,
    `replay`, `direction` and `topic` are for older ones, and for ports that are mapped on the way:
    what is given here is used instead of the engine's answer.
    """

    events: str | None = None
    """`endpoint` of its `--kv-events-config`: `tcp://host:5557` or `ipc:///path`. For `*` the
    instance's host is dialled; rank r is found at the port + r. Default: asked of the engine."""
    replay: str | None = None
    """`replay_endpoint` of its `--kv-events-config`, likewise. Without one a gap can't be
    repaired. Default: asked of the engine."""
    direction: Direction = "connect"
    """`bind`: the engine connects to `events`, which we bind. It is so where the engine's own
    `endpoint` has neither `*` nor `::`."""
    topic: str | None = None
    """With `bind`: tells the messages of this instance from others on the same port. Where we
    connect, the connection says whose they are. Default: the engine's own."""
    model: str | None = None
    """Base model under which its blocks are kept. Default: first of `/v1/models`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_endpoints(events=self.events, replay=self.replay)


class KvlbSettings(BalancerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator can set."""

    instances: tuple[InstanceEntry, ...] = ()
    indexer: IndexerConfig = IndexerConfig()
    redis: RedisSettings | None = None
    """None: the index lives in the memory of `kvlb up`."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Processes of `kvlb balancer` that answer on `port`. Each uses one core, and has memory, connections
    and tokenizers of its own; they share load and figures. `kvlb up` is always one."""
    discovery: tuple[DiscoverySettings, ...] = ()
    resolve_interval_s: NonNegativeFloat = 5.0
    """How often host names of engines, and the names under `discovery`, are looked up; 0: never. An
    engine whose name stands for another address is connected to anew, and what was known of its cache is
    dropped."""

    @classmethod
    def reloadable(cls) -> tuple[str, ...]:
        return (*super().reloadable(), "discovery", "resolve_interval_s")

    @classmethod
    def entry_type(cls) -> type[InstanceEntry]:
        return InstanceEntry

    def check_fleet(self) -> None:
        super().check_fleet()
        _check_streams(self)
        check_discovery(self.discovery)
        for number, each in enumerate(self.discovery):
            check_connector(each.connector, f"discovery[{number}].connector", each.role)

    def engine_sources(self) -> tuple[InstanceSource, ...]:
        """The instances as the indexer wants them."""
        keys = self.engine_keys()
        return tuple(
            InstanceSource(
                url=each.id,
                alias=each.name,
                events=each.events,
                replay=each.replay,
                direction=each.direction,
                topic=each.topic,
                model=each.model,
                ranks=each.ranks,
                rank_base=each.rank_base,
                api_key=keys.get(each.id),
            )
            for each in self.instances
            if each.role is not Role.ENCODE  # they keep no KV cache
        )


def engine_sources(config: BalancerConfig) -> tuple[InstanceSource, ...]:
    """The instances of these settings as the indexer wants them, if they say where events are."""
    return config.engine_sources() if isinstance(config, KvlbSettings) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the command line says; None or empty where it says nothing."""

    instances: Sequence[str] = ()
    policy: str | None = None
    host: str | None = None
    port: int | None = None
    redis_url: str | None = None
    status_port: int | None = None
    workers: int | None = None


def load_settings(
    config: Path | None, overrides: Overrides, environ: Mapping[str, str]
) -> KvlbSettings:
    """Read, join and check all settings, or raise SettingsError that names what to change."""
    source = f"{config}: " if config else ""
    values = read_yaml(config) if config else {}
    _apply_environment(values, environ)
    _apply_overrides(values, overrides)
    _name_redis_password(values, environ)
    try:
        decoded = decode_settings(values, KvlbSettings, where="")
        checked = check_config(decoded, environ)
        _check_redis(checked.redis, environ)
    except ConfigError as error:
        raise SettingsError(f"{source}{error}") from error
    return checked


def load_fleet(
    config: Path | None, overrides: Overrides, environ: Mapping[str, str]
) -> KvlbSettings:
    """Likewise, and refuse a fleet without instances: a file cut short must not empty a fleet.

    Unless it says how instances come by themselves.
    """
    settings = load_settings(config, overrides, environ)
    comes_by_itself = settings.registration is not None or settings.discovery
    if not settings.instances and not comes_by_itself:
        raise NoEnginesError(f"{config}: {NO_ENGINES}" if config else NO_ENGINES)
    return settings


def _check_streams(settings: KvlbSettings) -> None:
    """Refuse two instances that would follow one stream: one's blocks would be taken for both's."""
    followed: dict[str, list[tuple[str | None, str]]] = {}
    for number, each in enumerate(settings.instances):
        where = f"instances[{number}]"
        for stream, topic in _streams(each, settings.indexer.shared_bind, where):
            others = followed.setdefault(stream, [])
            for other_topic, other in others:
                if other != where and (None in {topic, other_topic} or topic == other_topic):
                    what = "with the same topic" if topic and other_topic else "already"
                    raise ConfigError(f"`{where}.events`: {stream} is {other}'s {what}")
            others.append((topic, where))


def _streams(
    entry: InstanceEntry, shared_bind: str | None, where: str
) -> Iterator[tuple[str, str | None]]:
    """Endpoint of each rank that `entry` tells of, and the topic where we bind."""
    events, direction, topic = entry.events, entry.direction, entry.topic
    if events is None and topic is not None and shared_bind is not None:
        events, direction = shared_bind, "bind"
    if events is None:
        return
    for local in range(entry.ranks or 1):
        try:
            endpoint = offset_port(events, entry.rank_base + local)
        except EndpointError as error:
            raise ConfigError(f"`{where}.events`: {error}") from error
        is_ours = direction == "bind"
        yield (bindable(endpoint), topic) if is_ours else (dialable(endpoint, entry.id), None)


def _check_redis(redis: RedisSettings | None, environ: Mapping[str, str]) -> None:
    name = redis.password_env if redis else None
    if name is not None and not environ.get(name):
        raise ConfigError(f"`redis.password_env`: environment variable {name} is not set")


def _apply_environment(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    if host := environ.get("KVLB_HOST"):
        values["host"] = host
    if port := environ.get("KVLB_PORT"):
        if not port.isdecimal():
            raise SettingsError(f"KVLB_PORT: {port!r} is not a port")
        values["port"] = int(port)
    if url := environ.get("KVLB_REDIS_URL"):
        _section(values, "redis")["url"] = url
    # By name, so that what is wrong with one is said of the variable.
    if environ.get("KVLB_ENGINE_API_KEY"):
        values.pop("engine_api_key", None)
        values["engine_api_key_env"] = "KVLB_ENGINE_API_KEY"
    if environ.get("KVLB_ADMIN_API_KEY"):
        admin = _section(values, "admin")
        admin.pop("api_key", None)
        admin["api_key_env"] = "KVLB_ADMIN_API_KEY"
    elif environ.get(EXAMPLE_ADMIN_KEY) and not _has_admin_key(values):
        _section(values, "admin")["api_key_env"] = EXAMPLE_ADMIN_KEY


def _has_admin_key(values: dict[str, Any]) -> bool:
    return any(_section(values, "admin").get(name) for name in ("api_key", "api_key_env"))


def _apply_overrides(values: dict[str, Any], overrides: Overrides) -> None:
    if overrides.instances:
        values["instances"] = [_parse_option(text) for text in overrides.instances]
    if overrides.policy is not None:
        _section(values, "routing")["policy"] = overrides.policy
    if overrides.redis_url is not None:
        _section(values, "redis")["url"] = overrides.redis_url
    if overrides.status_port is not None:
        _section(values, "indexer")["status_port"] = overrides.status_port
    if overrides.host is not None:
        values["host"] = overrides.host
    if overrides.port is not None:
        values["port"] = overrides.port
    if overrides.workers is not None:
        values["workers"] = overrides.workers


def _name_redis_password(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """The usual variable is used where the file names none."""
    if environ.get(REDIS_PASSWORD) and values.get("redis") is not None:
        _section(values, "redis").setdefault("password_env", REDIS_PASSWORD)


def _parse_option(text: str) -> dict[str, Any]:
    entry = parse_instance(text)
    try:
        decode_settings(entry, InstanceEntry, where="")
    except ConfigError as error:
        raise SettingsError(f"--instance {text}: {error}") from error
    return entry


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The mapping under `name`, made if absent. Another type is left for the decoder to refuse."""
    if values.get(name) is None:
        values[name] = {}
    section = values[name]
    return section if isinstance(section, dict) else {}
