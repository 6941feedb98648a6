"""Speaks to Redis: the only module that imports its client. Every call has a deadline.

A failure is one of three: `IndexUnavailableError` (no answer, a refusal, a wrong password, read-only),
`IndexFullError` (out of memory), or an answer.

A server that was restarted, or that closes idle connections, leaves dead ones in the pool. So a
command whose connection breaks is sent once more, on a new one and within the same deadline. That
is safe for writes too: if the first was applied after all, the fence tells by its sequence number.
A refusal or a deadline is never retried: a lookup is advice that must not be late.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.maint_notifications import MaintNotificationsConfig

from indexer.redis_index.faults import index_error
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
        self._pool = redis.asyncio.BlockingConnectionPool.from_url(
            settings.url,
            username=settings.username,
            password=settings.password(),
            max_connections=settings.max_connections,
            timeout=longest_s,
            # `_send` has the deadline. With one of its own the client sends by `wait_for`, which
            # swallows a cancellation that comes as the command is sent (Python 3.11), and costs
            # a task per command.
            socket_timeout=None,
            socket_connect_timeout=settings.connect_timeout_s,
            retry=Retry(NoBackoff(), 0),
            client_name="kvlb",
            # With them the pool hands out connections that the server has closed.
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._pool.aclose()

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
        await self._ask("PING")

    async def fields(self, key: str) -> Sequence[bytes]:
        """Field names of a small hash."""
        names: Sequence[bytes] = await self._ask("HKEYS", key)
        return names

    async def scan_hash(self, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
        """Every field of a hash that nobody changes meanwhile, whatever its size."""
        cursor = b"0"
        while True:
            cursor, found = await self._ask("HSCAN", key, cursor, "COUNT", _ROWS_PER_SCAN)
            for name, value in zip(found[::2], found[1::2], strict=True):
                yield name, value
            if cursor == b"0":
                return

    async def cardinality(self, key: str) -> int:
        """Members of a set."""
        members: int = await self._ask("SCARD", key)
        return members

    async def _ask(self, *parts: Part) -> Any:
        packed = [
            pack_part(part if isinstance(part, bytes) else str(part).encode()) for part in parts
        ]
        command = b"*%d\r\n%b" % (len(parts), b"".join(packed))
        return await self._send(self.settings.write_timeout_s, command)

    async def _send(self, timeout_s: float, command: bytes) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(command)
        except NoScriptError as error:
            raise _ScriptForgottenError from error
        except (RedisError, OSError, TimeoutError) as error:
            raise index_error(error) from error

    async def _exchange(self, command: bytes) -> Any:
        """Over a pooled connection; if that turns out to be dead, over a new one."""
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            return await _answer(connection, command)
        except (RedisConnectionError, OSError):
            pass  # of the pool's others any may be dead, too
        finally:
            await self._pool.release(connection)
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
            return await _answer(connection, command)
        finally:
            await connection.disconnect()


async def _answer(connection: Any, command: bytes) -> Any:
    await connection.send_packed_command([command])
    return await connection.read_response()


class _ScriptForgottenError(Exception):
    """The server was restarted, or never knew the script."""
