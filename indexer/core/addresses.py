"""Addresses: what has a host and a port that can be; one spelling per engine.

Rules:

1. `InstanceId` = `scheme://host:port`, lower case, port always written, no trailing slash.
2. IPv6 hosts stay in brackets. Paths, queries and credentials are refused, not dropped.
3. No message repeats what may be a password: everything before an `@`.
"""

import re
from urllib.parse import SplitResult, urlsplit

from indexer.core.types import InstanceId

DEFAULT_PORTS = {"http": 80, "https": 443}
_LOOPBACK = re.compile(
    r"(?<=://)"
    r"(localhost\.?|127\.0\.0\.1|127\.1|0\.0\.0\.0|\[::1?\]|\[::ffff:(127\.0\.0\.1|7f00:1)\])"
    r"(?=:[0-9]+$)"
)
_HOST = re.compile(r"[^\s/?#@\[\]*]+")


def parse_instance_id(url: str) -> InstanceId:
    """Normalise `url`. Raises ValueError that says what is wrong with it."""
    stripped = url.strip()
    if "@" in stripped:  # before anything that repeats the address in its message
        raise ValueError("an instance address holds no credentials; use `api_key`")
    if "://" not in stripped:
        raise ValueError(f"{url!r} has no scheme; write `http://{stripped}`")
    parts = split_address(stripped)
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(f"{url!r}: scheme must be http or https")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError(f"{url!r}: only scheme, host and port; no path or query")
    if not parts.hostname:
        raise ValueError(f"{url!r}: no host")
    port = DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return InstanceId(f"{parts.scheme}://{host}:{port}")


def split_address(url: str) -> SplitResult:
    """Split `url`. Raises ValueError for credentials, and for a host or a port that can't be."""
    if "@" in url:
        raise ValueError("an address holds no credentials")
    try:
        parts = urlsplit(url)
    except ValueError as error:  # brackets that don't match
        raise ValueError(f"{url!r}: {error}") from error
    try:
        has_port = parts.port != 0
    except ValueError:
        has_port = False
    if not has_port:
        raise ValueError(f"{url!r}: port must be 1 to 65535")
    if parts.hostname and not _HOST.fullmatch(parts.hostname):
        raise ValueError(f"{url!r}: {parts.hostname!r} is no host name")
    return parts


def without_loopback_names(instance: InstanceId) -> InstanceId:
    """One spelling for the usual names of this machine: `localhost`, 127.0.0.1, [::1] and theirs.

    Who connects to "every interface" (0.0.0.0, [::]) reaches it, too.
    """
    return InstanceId(_LOOPBACK.sub("localhost", instance))
