"""ZMQ endpoints as engines write them: which port a rank has, who binds, which host to dial.

Rules (vLLM's own):

1. Rank r listens on the configured TCP port + r, for events and for replay.
2. An engine binds its event socket if the endpoint holds `*` or `::`, or isn't TCP; else it
   connects, and the endpoint is ours to bind. Its replay socket always binds.
3. A host that stands for "every interface" is replaced by the host the instance is known under.
"""

import re
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

_TCP = "tcp://"
_IPC = "ipc://"
_HOST = re.compile(r"\[[^\s\[\]/@]+\]|[^\s\[\]/@]+")
_EVERY_INTERFACE = frozenset(("*", "0.0.0.0", "[::]", "::"))  # noqa: S104 - recognised, not bound


class EndpointError(ValueError):
    """Not a ZMQ endpoint that can be used here; the text says why."""


def check_endpoint(endpoint: str) -> str:
    """Return `endpoint` if it is `tcp://host:port` or `ipc://path`, else raise EndpointError."""
    if endpoint.startswith(_IPC) and len(endpoint) > len(_IPC):
        return endpoint
    split_endpoint(endpoint)
    return endpoint


def check_endpoints(**endpoints: str | None) -> None:
    """Check those that are given; the error begins with the name of the one at fault."""
    for name, endpoint in endpoints.items():
        if endpoint is not None:
            try:
                check_endpoint(endpoint)
            except EndpointError as error:
                raise EndpointError(f"{name}: {error}") from error


def offset_port(endpoint: str, rank: int) -> str:
    """Endpoint of `rank`, given the one that was configured for all."""
    if rank == 0:
        return endpoint
    host, port = split_endpoint(endpoint)
    if port + rank > 65535:
        raise EndpointError(f"{endpoint}: rank {rank} would have port {port + rank}")
    return f"{_TCP}{host}:{port + rank}"


def engine_binds(endpoint: str) -> bool:
    """An engine with this event endpoint binds it itself; if not, it is ours to bind."""
    return not endpoint.startswith(_TCP) or "*" in endpoint or "::" in endpoint


def dialable(endpoint: str, instance_url: str) -> str:
    """`endpoint` with a host that can be connected to from here."""
    return _with_host(
        endpoint, lambda host: _host_of(instance_url) if is_every_interface(host) else host
    )


def bindable(endpoint: str) -> str:
    """`endpoint` as it can be bound here: a name is no interface, so it becomes all of them."""
    return _with_host(endpoint, lambda host: host if _is_address(host) else "*")


def _with_host(endpoint: str, replace: Callable[[str], str]) -> str:
    if endpoint.startswith(_IPC):
        return endpoint
    host, port = split_endpoint(endpoint)
    return f"{_TCP}{_unmapped(replace(host))}:{port}"


def is_every_interface(host: str) -> bool:
    """Whether `host` stands for all addresses of its machine."""
    return host in _EVERY_INTERFACE


def _is_address(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _unmapped(host: str) -> str:
    """IPv4 in IPv6 clothes (`[::ffff:10.0.0.1]`, as vLLM reports it) as plain IPv4."""
    if not _is_address(host):
        return host
    address = ip_address(host.strip("[]"))
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped) if mapped else host


def _host_of(instance_url: str) -> str:
    host = urlsplit(instance_url).hostname or ""
    return f"[{host}]" if ":" in host else host


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`, or raise EndpointError."""
    host, colon, port = endpoint.removeprefix(_TCP).rpartition(":")
    if not endpoint.startswith(_TCP) or not colon or not host:
        raise EndpointError(f"{endpoint!r}: write `tcp://host:port`")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) <= 65535:
        raise EndpointError(f"{endpoint!r}: the port must be 1 to 65535")
    if not _HOST.fullmatch(host):
        raise EndpointError(f"{endpoint!r}: {host!r} is no host; write `tcp://host:port`")
    return host, int(port)
