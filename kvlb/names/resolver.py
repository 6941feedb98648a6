"""Asks the system's resolver. The only place that does so for more than a connection."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

LOOKUP_TIMEOUT_S = 5.0


class NameUnknownError(Exception):
    """There is no such name, or it has no address."""


class LookupFailedError(Exception):
    """Nobody could say. Ask again."""


Resolve = Callable[[str], Awaitable[frozenset[str]]]
"""Addresses of a name, at least one. Raises NameUnknownError or LookupFailedError."""

_UNKNOWN = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


async def resolve(name: str) -> frozenset[str]:
    """As `Resolve` says, by `getaddrinfo`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _UNKNOWN:
            raise NameUnknownError(name) from error
        raise LookupFailedError(f"{name}: {error.strerror}") from error
    except (OSError, UnicodeError) as error:  # TimeoutError is one
        raise LookupFailedError(f"{name}: {type(error).__name__}") from error
    # An address with a zone (`fe80::1%eth0`) is no host of a URL.
    addresses = frozenset(str(place[0]) for *_, place in found if "%" not in str(place[0]))
    if not addresses:
        raise NameUnknownError(name)
    return addresses
