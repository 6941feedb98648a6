"""Settings of an instance's `transfer:`, one struct per connector: what no engine tells on its own.

Rules:

1. The connector's name chooses the struct; a connector that isn't listed has no settings.
2. Everything has a default but what nobody could guess; a value that only one role needs is not
   asked of the other. What is missing when a leg is written fails that leg by name.
3. A setting wins over what was learned from the engine.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from balancer.core.settings.errors import ConfigError, decode_settings
from indexer.core.limits import NonNegativeInt, PositiveFloat, PositiveInt

Word = Annotated[str, msgspec.Meta(min_length=1)]
EnginePort = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class NixlSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NIXL, pull: the decode engine reads the prefill engine's blocks."""

    lease_s: PositiveFloat = 25.0
    """A decode leg that isn't on its way so long after the prefill leg answered is too late for the
    blocks, so both run again. Keep it below the prefill engine's `kv_lease_duration` (30 s): a
    read after that is wrong text."""
    bidirectional: bool = False
    """The engine runs with `bidirectional_kv_xfer`: what the decode engine computed in one turn of
    a conversation (`conversation_id` in the body) is read by the prefill engine in the next.
    Wanted on both sides."""
    decode_ttl_s: PositiveFloat = 450.0
    """How long the blocks of a finished turn are counted on. Keep it below the decode engine's
    `decoder_kv_blocks_ttl` (480 s)."""


class NixlPushSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NIXL, push: the prefill engine writes into the decode engine's blocks."""

    engine_id: Word | None = None
    """`engine_id` of the prefill engine's `--kv-transfer-config`, without the `_dp0` of a rank.
    Default: asked of the engine's `/server_info`, which it has with `VLLM_SERVER_DEV_MODE=1`."""
    kv_host: Word | None = None
    """Its `VLLM_NIXL_SIDE_CHANNEL_HOST`. Default: as the engine tells, else the host of `url`."""
    side_channel_port: EnginePort | None = None
    """Its `VLLM_NIXL_SIDE_CHANNEL_PORT`; a rank adds its number. Default: as the engine tells,
    else 5600."""
    tp_size: PositiveInt | None = None
    """Its `--tensor-parallel-size`. Default: as the engine tells, else 1."""
    pp_size: PositiveInt | None = None
    """Its `--pipeline-parallel-size`. Default: as the engine tells, else 1."""


class LmcacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LMCache: a cache that both engines use, or a receiver that the prefill engine sends to."""

    receiver_host: Word | None = None
    """Host where the decode engine's LMCache receives (`pd_peer_host`). Default: nothing is sent;
    both engines share one cache."""
    receiver_init_ports: tuple[EnginePort, ...] = ()
    """Its `pd_peer_init_port`, one for each tensor-parallel rank."""
    receiver_alloc_ports: tuple[EnginePort, ...] = ()
    """Its `pd_peer_alloc_port`, one for each tensor-parallel rank."""

    def __post_init__(self) -> None:
        """Raise ValueError for half a receiver."""
        given = (self.receiver_host, self.receiver_init_ports, self.receiver_alloc_ports)
        if any(given) and not all(given):
            raise ValueError(
                "receiver_host: goes with receiver_init_ports and receiver_alloc_ports"
            )


class P2pNcclSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """P2P-NCCL, up to vLLM 0.23: request ids carry both engines' addresses."""

    zmq_address: Word | None = None
    """`host:port` of the engine's `kv_port`. Default: as it registers itself."""


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mooncake: the decode engine finds the prefill engine through its bootstrap server."""

    bootstrap_host: Word | None = None
    """Host of the prefill engine's bootstrap server. Default: the host of `url`."""
    bootstrap_port: EnginePort = 8998
    """Its `VLLM_MOONCAKE_BOOTSTRAP_PORT`."""


class MoriioSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """MoRI-IO: the prefill engine writes (WRITE), or the decode engine reads (READ)."""

    zmq_address: Word | None = None
    """`host:IP,handshake:PORT,notify:PORT` of the engine. Default: as it registers itself."""
    mode: Literal["READ", "WRITE"] | None = None
    """READ if the engine runs with `read_mode`. Default: as it registers itself, else WRITE."""
    dp_size: PositiveInt | None = None
    """Its data-parallel ranks. Default: as it registers itself, else those it is known to have."""
    tp_size: PositiveInt | None = None
    """Its `--tensor-parallel-size`. Default: as it registers itself, else 1."""
    addresses: Literal["params", "request_id"] = "params"
    """How the legs learn each other's address: in fields of their own, or in the request id, as
    vLLM's toy proxy does it; the id of the answer then shows both addresses to the client."""


class OffloadingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Offloading: caches behind the GPU's, which peers may read."""

    p2p_host: Word | None = None
    """The engine's `VLLM_P2P_SIDE_CHANNEL_HOST`, if it has the P2P tier. Default: it has none, and
    the legs of a pair meet in a storage that both use."""
    p2p_port: EnginePort = 5710
    """Its `VLLM_P2P_SIDE_CHANNEL_PORT`; a rank adds its number."""
    pull_min_tokens: NonNegativeInt = 0
    """A request that is served whole by this instance fetches its prefix from the peer that the
    index names, if that holds so many tokens more. 0: never. Both need `p2p_host` and the same
    hash seed."""
    decoder_first: bool = False
    """Of a decode instance with `p2p_host`: both legs are sent at once, and it waits for the blocks
    itself, up to 30 s, instead of being asked when they are there."""

    def __post_init__(self) -> None:
        """Raise ValueError for a decode engine that would find nothing to wait for."""
        if self.decoder_first and self.p2p_host is None:
            raise ValueError("decoder_first: goes with p2p_host")


class MultiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """MultiConnector: several connectors in one engine."""

    children: dict[str, dict[str, Any]] = {}
    """Connector → its own `transfer:` settings, for each child that has a part in requests."""

    def __post_init__(self) -> None:
        """Raise ValueError for no child, for a child in a child, or for wrong settings of one."""
        if not self.children:
            raise ValueError("children: at least one connector")
        for name, settings in self.children.items():
            if name in {"multi", "none"}:
                raise ValueError(f"children: `{name}` can't be a child")
            if settings.get("decoder_first"):
                raise ValueError(f"children: of `{name}`, decoder_first: not beside others")
            try:
                read_transfer(name, settings)
            except ConfigError as error:
                raise ValueError(f"children: of `{name}`, {error}") from error


class ChildSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `MultiSettings` says, each child's settings of its own type. Not part of the file."""

    children: dict[str, msgspec.Struct | None] = {}


STRUCTS: Mapping[str, type[msgspec.Struct]] = {
    "lmcache": LmcacheSettings,
    "mooncake": MooncakeSettings,
    "moriio": MoriioSettings,
    "multi": MultiSettings,
    "nixl": NixlSettings,
    "nixl_push": NixlPushSettings,
    "offloading": OffloadingSettings,
    "p2p_nccl": P2pNcclSettings,
}
"""Settings by connector."""

S = TypeVar("S", bound=msgspec.Struct)


def read_transfer(connector: str, given: Mapping[str, Any]) -> msgspec.Struct | None:
    """Decode an instance's `transfer:`; None for a connector without settings.

    Raises ConfigError naming the key.
    """
    struct = STRUCTS.get(connector)
    if struct is None:
        if given:
            raise ConfigError(f"connector `{connector}` has no settings")
        return None
    settings = decode_settings(dict(given), struct, where="")
    if not isinstance(settings, MultiSettings):
        return settings
    return ChildSettings(
        children={name: read_transfer(name, its) for name, its in settings.children.items()}
    )
