"""Settings of the registration service. Frozen, checked, units in the names."""

from ipaddress import ip_network
from typing import Annotated

import msgspec

from indexer.core.limits import Port, PositiveFloat, PositiveInt


class RegistrationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines that announce themselves.

    Engines with MoRIIOConnector or P2pNcclConnector tell a proxy every 3 s over ZMQ that they are
    there (`proxy_ip`, `proxy_ping_port`). Without this section nobody listens. Whoever can reach the
    port can have requests, and the engine key, sent to an address of their choice: keep it to the
    engines' network, and name that in `networks`. More: docs/fleet.md.
    """

    port: Port = 36367
    """Port of the ZMQ ROUTER; the P2P-NCCL example uses 30001. 0 takes any free one."""
    bind: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for every interface."""
    networks: tuple[str, ...] = ()
    """Networks that announced addresses must be in: `10.0.0.0/8`. Host names are refused then.
    Without any, every address will do."""
    connector: str | None = None
    """Connector of those that announce themselves. Default: `moriio` for who names a transfer mode,
    else `p2p_nccl`."""
    silent_s: PositiveFloat = 9.0
    """Silence after which an engine gets no new requests: three beats."""
    remove_s: PositiveFloat = 60.0
    """Silence after which it leaves the fleet."""
    max_instances: PositiveInt = 256
    """More are refused."""

    def __post_init__(self) -> None:
        """Raise ValueError for what is no network."""
        for each in self.networks:
            try:
                ip_network(each)
            except ValueError as error:
                raise ValueError(f"networks: {error}") from error
