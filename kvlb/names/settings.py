"""Settings of discovery through DNS. Frozen, checked, units in the names."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import ConfigError, decode_settings
from indexer.core.addresses import parse_instance_id
from indexer.core.endpoints import check_endpoints
from indexer.core.limits import PositiveInt

_OWN = ("dns", "port", "scheme", "max_instances")


class DiscoverySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines behind a DNS name, such as a headless service of Kubernetes: one for each address.

    The section is a list. Each name is looked up every `resolve_interval_s`, and what it stands for
    then is all there is: an address that isn't listed any more gets no new requests, and leaves when it
    has finished. A lookup that fails changes nothing; a name that nobody knows stands for no address
    after three lookups. More: docs/fleet.md.
    """

    dns: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    """Name to look up, A and AAAA records: `vllm-decode.models.svc.cluster.local`."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    """Port of the engines."""
    scheme: Literal["http", "https"] = "http"
    """How they are spoken to."""
    max_instances: PositiveInt = 256
    """More addresses than this are left out, the last ones by number."""
    role: Role = Role.MIXED
    """As of an entry of `instances`; so are the keys below."""
    connector: str | None = None
    """How the KV cache is handed over. Default: `nixl` for prefill and decode, `none` for mixed,
    `ec_example` for encode."""
    ranks: PositiveInt | None = None
    """Data-parallel ranks behind each address. Default: what the engine lists, else 1."""
    events: str | None = None
    """Where their events are, with `*` for the host: `tcp://*:5557`. Default: asked of the engine."""
    replay: str | None = None
    """Where they replay them, with `*` for the host: `tcp://*:5558`. Default: asked of the engine."""
    model: str | None = None
    """Base model under which their blocks are kept. Default: first of `/v1/models`."""

    def __post_init__(self) -> None:
        """Raise ValueError for a name or an endpoint that can't be used."""
        check_endpoints(events=self.events, replay=self.replay)
        try:
            parse_instance_id(f"{self.scheme}://{self.dns}:{self.port}")
        except ValueError as error:
            raise ValueError(f"dns: {error}") from error
        for name in ("events", "replay"):
            endpoint: str | None = getattr(self, name)
            if endpoint is not None and not endpoint.startswith("tcp://*:"):
                raise ValueError(f"{name}: write `tcp://*:port`: each address has its own")

    def entries(
        self, addresses: Iterable[str], entry_type: type[InstanceSettings]
    ) -> tuple[InstanceSettings, ...]:
        """One instance per address. Raises ConfigError if the type has no such keys."""
        shared: dict[str, Any] = {
            name: value
            for name, value in msgspec.to_builtins(self).items()
            if name not in _OWN and value is not None
        }
        found = list(addresses)[: self.max_instances]
        hosts = (f"[{each}]" if ":" in each else each for each in found)
        return tuple(
            decode_settings(
                {**shared, "url": f"{self.scheme}://{host}:{self.port}"}, entry_type, where=""
            )
            for host in hosts
        )


def check_discovery(discovery: Iterable[DiscoverySettings]) -> None:
    """Raise ConfigError for two entries that would find the same instances."""
    seen: dict[tuple[str, int], int] = {}
    for number, each in enumerate(discovery):
        place = each.dns.lower().rstrip("."), each.port
        first = seen.setdefault(place, number)
        if first != number:
            raise ConfigError(
                f"`discovery[{number}].dns`: {each.dns} is discovery[{first}] already"
            )
