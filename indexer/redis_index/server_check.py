"""Looks if a server is set up for an index, and says what to change. Nothing depends on it."""

from collections.abc import Mapping, Sequence

import structlog

from indexer.core.index import IndexUnavailableError
from indexer.redis_index.connection import RedisConnection

_logger = structlog.get_logger(__name__)

_ASKED = ("maxmemory-policy", "lazyfree-lazy-expire")


def advice(settings: Mapping[str, str]) -> Sequence[str]:
    """What to change, by what `CONFIG GET` says. Pure."""
    found = []
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        found.append(
            f"`maxmemory-policy {policy}` takes single keys, which makes wrong predictions: "
            "set `noeviction`"
        )
    if settings.get("lazyfree-lazy-expire", "yes") != "yes":
        found.append(
            "`lazyfree-lazy-expire no`: when the lease of a big rank ends, Redis answers nobody "
            "for a tenth of a second: set it to `yes`"
        )
    return found


async def check_server(connection: RedisConnection) -> None:
    """Warn of what should be changed. Many a server lets nobody ask: then there is no advice."""
    settings = {}
    for name in _ASKED:
        try:
            answer = await connection.ask("CONFIG", "GET", name)
        except IndexUnavailableError:
            return
        settings.update(
            {answer[at].decode(): answer[at + 1].decode() for at in range(0, len(answer), 2)}
        )
    for each in advice(settings):
        _logger.warning("redis_should_be_set_up_otherwise", advice=each)
