"""Which addresses are a balancer's own, by their spelling alone: told at start, before anybody is asked.

Rules:

1. Names that have to be looked up, and addresses of other interfaces, are not judged: the first probe
   finds out (`core.http.own_mark`).
2. What may be another listener is not refused: 127.0.0.2 is not 127.0.0.1. The usual names of this
   machine are one (`indexer.core.addresses`).
3. Port 0 is any free port: nobody can have named it.
"""

from ipaddress import IPv6Address, ip_address

from indexer.core.addresses import split_address, without_loopback_names
from indexer.core.types import InstanceId


def is_own_address(instance: InstanceId, host: str, port: int) -> bool:
    """Tell whether `instance` is where a balancer listens that was given `host` and `port`."""
    parts = split_address(instance)
    if parts.port != port or parts.hostname is None:
        return False
    named, listening = _plain(parts.hostname), _plain(host)
    if _is_everywhere(listening):
        return _is_this_machine(named)
    if _is_everywhere(named):  # who connects there reaches this machine
        return _is_this_machine(listening)
    return _without_names(named) == _without_names(listening)


def _plain(host: str) -> str:
    """One spelling of an address; a name in lower case."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return host.lower().rstrip(".")
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _is_everywhere(host: str) -> bool:
    return host in {"0.0.0.0", "::", ""}  # noqa: S104 - recognised, not bound


def _is_this_machine(host: str) -> bool:
    if _is_everywhere(host) or host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _without_names(host: str) -> str:
    bracketed = f"[{host}]" if ":" in host else host
    return without_loopback_names(InstanceId(f"http://{bracketed}:0"))
