"""Messages between balancers through Redis: one bounded stream, read by everybody with a waiting read.

Messages are of use for seconds only. So the stream is short, leaves Redis when nobody writes to it, and
is read from its present end; who has missed something asks for it (`balancer.core.load.peers`).
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from balancer.sharing import Channel, ChannelError
from indexer.core.index import BlockIndexError, IndexSpoiltError
from indexer.redis_index.connection import Part, RedisConnection
from indexer.redis_index.keys import load_key
from indexer.redis_index.settings import RedisSettings

KEPT_MS = 3000
"""Who lags further behind asks for a snapshot."""
EXPIRES_S = 10
RENEW_S = 2.0
WAIT_MS = 1000
MOST_AT_ONCE = 100

_decoder = msgspec.msgpack.Decoder(list[bytes])


class RedisChannel:
    """A `Channel` between every process around one Redis."""

    def __init__(self, writes: RedisConnection, reads: RedisConnection, *, source: bytes) -> None:
        """`reads` is for nobody else: its one connection mostly waits. `source` names this process."""
        self._writes = writes
        self._reads = reads
        self._source = source
        self._key = load_key(writes.settings.prefix)
        self._renewed_s = float("-inf")
        self._oldest = b"0"
        """What is older may go, by the clock of Redis."""

    async def send(self, messages: Sequence[bytes]) -> None:
        """As one entry: they are taken together."""
        if not messages:
            return
        packed = msgspec.msgpack.encode(messages)
        now_s = asyncio.get_running_loop().time()
        try:
            number = await self._ask(
                self._writes, "XADD", "MINID", "~", self._oldest, "*", self._source, packed
            )
            self._oldest = b"%d" % max(0, int(number.partition(b"-")[0]) - KEPT_MS)
            if now_s - self._renewed_s > RENEW_S:
                await self._ask(self._writes, "EXPIRE", EXPIRES_S)
                self._renewed_s = now_s
        except BlockIndexError as error:
            raise ChannelError(str(error)) from error

    async def receive(self, on_message: Callable[[bytes], None]) -> None:
        last = await self._ask_last()
        while True:
            entries = await self._read(last)
            if not entries:
                # Our own signs of life should be there. Another server, whose clock is behind?
                last = await self._ask_last()
            for number, source, packed in entries:
                last = number
                if source != self._source:
                    for message in _messages(packed):
                        on_message(message)

    async def _ask_last(self) -> bytes:
        """Where the stream ends now. `$` would lose what comes between two reads."""
        try:
            found = await self._ask(self._reads, "XREVRANGE", "+", "-", "COUNT", 1)
        except BlockIndexError as error:
            raise ChannelError(str(error)) from error
        return bytes(found[0][0]) if found else b"0-0"

    async def _read(self, last: bytes) -> Sequence[tuple[bytes, bytes, bytes]]:
        where = ("COUNT", MOST_AT_ONCE, "BLOCK", WAIT_MS, "STREAMS", self._key, last)
        try:
            answer = await self._reads.ask_at(self._key, "XREAD", *where)
        except BlockIndexError as error:
            raise ChannelError(str(error)) from error
        entries = [entry for _, found in answer or () for entry in found]
        return [(number, fields[0], fields[1]) for number, fields in entries]

    async def _ask(self, connection: RedisConnection, command: str, *parts: Part) -> Any:
        """What has another type is removed, and the next attempt goes on."""
        try:
            return await connection.ask(command, self._key, *parts)
        except IndexSpoiltError:
            await connection.remove_unless(b"stream", self._key)
            raise


def _messages(packed: bytes) -> Sequence[bytes]:
    try:
        return _decoder.decode(packed)
    except msgspec.DecodeError:
        return ()


@asynccontextmanager
async def open_channel(settings: RedisSettings | None) -> AsyncIterator[Channel | None]:
    """None without Redis: then there is nobody to share with."""
    if settings is None:
        yield None
        return
    patient = msgspec.structs.replace(
        settings, write_timeout_s=settings.write_timeout_s + WAIT_MS / 1000
    )
    writes, reads = RedisConnection(settings), RedisConnection(patient)
    try:
        yield RedisChannel(writes, reads, source=uuid.uuid4().bytes)
    finally:
        await reads.aclose()
        await writes.aclose()
