"""Speaks to Redis: the only module that imports its client. Every call has a deadline.

A failure is one of three: `IndexUnavailableError` (no answer, a refusal, a wrong password, read-only),
`IndexFullError` (out of memory), or an answer. The client doesn't retry: a lookup is advice that
must not be late, and a write that may have been applied is sorted out by its sequence number.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, OutOfMemoryError, RedisError

from indexer.core.index import IndexFullError, IndexUnavailableError
from indexer.redis_index.packing import PackedKeys, pack_part
from indexer.redis_index.settings import RedisSettings

_ROWS_PER_SCAN = 2000

Part = str | bytes | int


class Script:
    """One of `lua/`, by the name Redis caches it under."""

    def __init__(self, text: str) -> None:
        sha = sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.by_sha = pack_part(b"EVALSHA") + pack_part(sha.encode())
        self.by_text = pack_part(b"EVAL") + pack_part(text.encode())


def load_script(name: str, *, writes: bool) -> Script:
    """Read `lua/<name>.lua` from the package."""
    folder = files("indexer.redis_index") / "lua"
    text = (folder / f"{name}.lua").read_text("utf-8")
    if writes:
        text = (folder / "prelude.lua").read_text("utf-8") + text
    return Script(text)


class RedisConnection:
    """A pool of connections to one server."""

    def __init__(self, settings: RedisSettings) -> None:
        """Connects at the first call. Raises ValueError if the password's variable isn't set."""
        self.settings = settings
        longest_s = max(settings.read_timeout_s, settings.write_timeout_s)
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            settings.url,
            username=settings.username,
            password=settings.password(),
            max_connections=settings.max_connections,
            timeout=longest_s,
            # `_ask` has the deadline. With one of its own the client sends by `wait_for`, which
            # swallows a cancellation that comes as the command is sent (Python 3.11), and costs
            # a task per command.
            socket_timeout=None,
            socket_connect_timeout=settings.connect_timeout_s,
            retry=Retry(NoBackoff(), 0),
            client_name="kvlb",
        )
        self._client = redis.asyncio.Redis(connection_pool=pool)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def run(
        self, script: Script, keys: PackedKeys, args: Sequence[bytes], *, timeout_s: float
    ) -> Any:
        """One round trip; two if the server has forgotten the script.

        Packed here, since the client takes three times as long over as many keys as a lookup has.
        """
        size = b"*%d\r\n" % (3 + keys.count + len(args))
        tail = b"".join([pack_part(arg) for arg in args])
        try:
            command = b"".join((size, script.by_sha, keys.packed, tail))
            return await self._send(timeout_s, command)
        except _ScriptForgottenError:
            command = b"".join((size, script.by_text, keys.packed, tail))
            return await self._send(timeout_s, command)

    async def ping(self) -> None:
        """Return if the server answers."""
        await self._ask(self.settings.write_timeout_s, "PING")

    async def fields(self, key: str) -> Sequence[bytes]:
        """Field names of a small hash."""
        names: Sequence[bytes] = await self._ask(self.settings.write_timeout_s, "HKEYS", key)
        return names

    async def scan_hash(self, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
        """Every field of a hash that nobody changes meanwhile, whatever its size."""
        cursor = 0
        while True:
            asked = ("HSCAN", key, cursor, "COUNT", _ROWS_PER_SCAN)
            cursor, found = await self._ask(self.settings.write_timeout_s, *asked)
            for each in found.items():
                yield each
            if not cursor:
                return

    async def cardinality(self, key: str) -> int:
        """Members of a set."""
        members: int = await self._ask(self.settings.write_timeout_s, "SCARD", key)
        return members

    async def _ask(self, timeout_s: float, *parts: Part) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.execute_command(*parts)  # type: ignore[no-untyped-call]
        except NoScriptError as error:
            raise _ScriptForgottenError from error
        except (RedisError, OSError, TimeoutError) as error:
            raise _translated(error) from error

    async def _send(self, timeout_s: float, command: bytes) -> Any:
        pool = self._client.connection_pool
        try:
            async with asyncio.timeout(timeout_s):
                connection = await pool.get_connection()  # type: ignore[no-untyped-call]
                try:
                    await connection.send_packed_command([command])
                    return await connection.read_response()
                finally:
                    await pool.release(connection)
        except NoScriptError as error:
            raise _ScriptForgottenError from error
        except (RedisError, OSError, TimeoutError) as error:
            raise _translated(error) from error


class _ScriptForgottenError(Exception):
    """The server was restarted, or never knew the script."""


def _translated(error: Exception) -> IndexUnavailableError:
    """Redis's words can quote a command, so only the kind of fault is told."""
    if isinstance(error, OutOfMemoryError) or "OOM " in str(error):
        return IndexFullError("Redis is out of memory: raise maxmemory (docs/redis-schema.md)")
    return IndexUnavailableError(f"Redis failed: {type(error).__name__}")
