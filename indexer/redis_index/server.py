"""From the settings to one server's address, and how to be let in."""

import ssl
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from indexer.redis_index.lane import Access, Address
from indexer.redis_index.settings import RedisSettings

_PORT = 6379


def find_server(settings: RedisSettings) -> tuple[Address, Access]:
    """Raises ValueError for a password or certificate that isn't there."""
    parts = urlsplit(settings.url)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    database = parts.path.strip("/")
    if parts.scheme == "unix":
        database = options.get("db", "")
    access = Access(
        username=settings.username,
        password=settings.password(),
        database=int(database or 0),
        tls=_tls(options) if parts.scheme == "rediss" else None,
    )
    return _address(parts), access


def _address(parts: SplitResult) -> Address:
    if parts.scheme == "unix":
        return Address(unquote(parts.path))
    return Address(parts.hostname or "localhost", parts.port or _PORT)


def _tls(options: Mapping[str, str]) -> ssl.SSLContext:
    """Who answers is checked by the system's authorities, or by those that are named."""
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if "ssl_certfile" in options:
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    except OSError as error:  # SSLError is one
        raise ValueError(f"url: its certificates can't be used: {error}") from error
    if options.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
