"""Whether a request comes from this machine itself, as far as its connection and headers tell.

Rules:

1. The connection's address decides, not what a header claims. A forwarding header means that a
   proxy on this machine speaks for somebody else.
2. The name that was asked for has to be this machine's own, too. Otherwise any web page that a
   browser here shows could have its own host name resolved to 127.0.0.1 and read the answers
   (DNS rebinding). A request without `Host` is no browser's.

Cost: some microseconds.
"""

from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address

FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


def is_local_client(
    address: str | None,
    headers: Mapping[str, object],
    asked_hosts: Sequence[str],
    own_names: Collection[str],
) -> bool:
    """Tell it from the client's address, the headers' names and every `Host` header.

    `own_names` are hosts that mean this machine beside `localhost` and loopback addresses.
    """
    if address is None or not _is_loopback(address) or any(name in headers for name in FORWARDED):
        return False
    return all(_is_own(host, own_names) for host in asked_hosts)


def _is_own(host: str, own_names: Collection[str]) -> bool:
    name = host_name(host)
    return name == "localhost" or name in own_names or _is_loopback(name)


def host_name(host: str) -> str:
    """`Host` without its port and an IPv6 address's brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_loopback(text: str) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
