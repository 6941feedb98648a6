"""Checks `--url`, which names the balancer that a command asks."""

from urllib.parse import urlsplit

from kvlb.errors import SettingsError


def balancer_url(text: str) -> str:
    """`text` without a trailing slash. Raises SettingsError; a client would take any port modulo 65536."""
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # a port that can't be
        is_address = False
    if not is_address:
        raise SettingsError("--url: not a balancer's address; write http://host:port")
    return text.rstrip("/")
