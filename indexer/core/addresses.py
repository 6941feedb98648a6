"""Instance addresses: one spelling per engine, so that identity is host *and* port.

Rules:

1. `InstanceId` = `scheme://host:port`, lower case, port always written, no trailing slash.
2. IPv6 hosts stay in brackets. Paths, queries and credentials are refused, not dropped.
"""

from urllib.parse import urlsplit

from indexer.core.types import InstanceId

DEFAULT_PORTS = {"http": 80, "https": 443}


def parse_instance_id(url: str) -> InstanceId:
    """Normalise `url`. Raises ValueError that says what is wrong with it."""
    stripped = url.strip()
    if "@" in stripped:  # before anything that repeats the address in its message
        raise ValueError("an instance address holds no credentials; use `api_key`")
    if "://" not in stripped:
        raise ValueError(f"{url!r} has no scheme; write `http://{stripped}`")
    parts = urlsplit(stripped)
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(f"{url!r}: scheme must be http or https")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError(f"{url!r}: only scheme, host and port; no path or query")
    try:
        port = DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: port must be 1 to 65535") from error
    if not parts.hostname or not port:
        raise ValueError(f"{url!r}: no host" if port else f"{url!r}: port must be 1 to 65535")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return InstanceId(f"{parts.scheme}://{host}:{port}")
