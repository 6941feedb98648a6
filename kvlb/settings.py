"""Settings of `kvlb up`: one YAML file, then the environment, then the command line. Typed, once.

Rules:

1. Later ways in win: file < environment < options. `--instance` options replace `instances:`.
2. A key nobody knows is refused with its path and the nearest one that exists; so is a value
   of the wrong type. Nothing is read twice, nothing is ignored.
3. Keys of the balancer (`routing`, `pd`, `dataplane`, ...) stand at the top of the file, those
   of the indexer under `indexer`; one entry of `instances` describes an engine to both.
4. Secrets may stand in the file, better in the environment; they never show in `repr`.

Environment: KVLB_HOST, KVLB_PORT, KVLB_ADMIN_API_KEY, KVLB_ENGINE_API_KEY.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from balancer.config import BalancerConfig, check_config
from balancer.core.control_settings import InstanceSettings
from balancer.core.settings_errors import ConfigError, decode_settings
from indexer.config import Direction, IndexerConfig, InstanceSource
from indexer.core.endpoints import check_endpoint
from kvlb.errors import SettingsError
from kvlb.instance_option import parse_instance


class InstanceEntry(InstanceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: what the balancer needs of it and where its events are.

    `events` and `replay` are only needed for engines without `/kv_event_sources` (before 0.31)
    or whose ports are mapped.
    """

    events: str | None = None
    """Endpoint of `--kv-events-config`; rank r is found at its port + r."""
    replay: str | None = None
    """Replay endpoint, likewise."""
    direction: Direction = "connect"
    """`bind`: the engine connects to `events`, which we bind."""
    topic: str | None = None
    """With `bind`: tells this engine's messages from others on the same port."""
    model: str | None = None
    """Base model; default: the first that the engine's `/v1/models` lists."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for endpoint in (self.events, self.replay):
            if endpoint is not None:
                check_endpoint(endpoint)


class KvlbSettings(BalancerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator can set."""

    instances: tuple[InstanceEntry, ...] = ()
    indexer: IndexerConfig = IndexerConfig()

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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the command line says; None or empty where it says nothing."""

    instances: Sequence[str] = ()
    policy: str | None = None
    host: str | None = None
    port: int | None = None


def load_settings(
    config: Path | None, overrides: Overrides, environ: Mapping[str, str]
) -> KvlbSettings:
    """Read, join and check all settings, or raise SettingsError that names what to change."""
    source = f"{config}: " if config else ""
    values = _read_file(config) if config else {}
    _apply_environment(values, environ)
    _apply_overrides(values, overrides)
    try:
        decoded = decode_settings(values, KvlbSettings, where="")
        checked = check_config(decoded, environ)
    except ConfigError as error:
        raise SettingsError(f"{source}{error}") from error
    return checked


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is not YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: holds no keys; begin with `instances:`")
    return values


def _apply_environment(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    if host := environ.get("KVLB_HOST"):
        values["host"] = host
    if port := environ.get("KVLB_PORT"):
        if not port.isdecimal():
            raise SettingsError(f"KVLB_PORT: {port!r} is not a port")
        values["port"] = int(port)
    if key := environ.get("KVLB_ENGINE_API_KEY"):
        values["engine_api_key"] = key
        values.pop("engine_api_key_env", None)
    if key := environ.get("KVLB_ADMIN_API_KEY"):
        admin = _section(values, "admin")
        admin["api_key"] = key
        admin.pop("api_key_env", None)


def _apply_overrides(values: dict[str, Any], overrides: Overrides) -> None:
    if overrides.instances:
        values["instances"] = [_parse_option(text) for text in overrides.instances]
    if overrides.policy is not None:
        _section(values, "routing")["policy"] = overrides.policy
    if overrides.host is not None:
        values["host"] = overrides.host
    if overrides.port is not None:
        values["port"] = overrides.port


def _parse_option(text: str) -> dict[str, Any]:
    entry = parse_instance(text)
    try:
        decode_settings(entry, InstanceEntry, where="")
    except ConfigError as error:
        raise SettingsError(f"--instance {text}: {error}") from error
    return entry


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The mapping under `name`, made if absent. Another type is left for the decoder to refuse."""
    section = values.setdefault(name, {})
    return section if isinstance(section, dict) else {}
