"""Speaks to Redis: one lane for what reads and one for what writes. Every call has a deadline.

A failure is one of three: `IndexUnavailableError` (no answer, a refusal, a wrong password, read-only),
`IndexFullError` (out of memory), or an answer.

Rules:

1. A command whose connection breaks is sent once more, on a new one and within the same deadline.
   That is safe for writes too: if the first was applied after all, the fence tells by its number.
   A refusal or a deadline is not retried: a lookup is advice that must not be late.
2. Where `run_ahead` runs, connections are opened ahead of need, with a deadline of their own: a
   lookup's is too short for TLS and a password over a slow network.
3. A node of a cluster says `MOVED`: then all is asked for where its slot is. If that node is
   gone, any other tells who has taken its place.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from hashlib import sha1
from importlib.resources import files
from typing import Any

from indexer.redis_index.cluster import SlotTable, slot_of
from indexer.redis_index.faults import index_error
from indexer.redis_index.lane import Address, Lane, RedisRefusal
from indexer.redis_index.packing import PackedKeys, pack_command, pack_part
from indexer.redis_index.server import find_server
from indexer.redis_index.settings import RedisSettings

_ROWS_PER_SCAN = 2000
_WATCH_S = 0.2
"""How often it is looked if connections are still open."""

Part = str | bytes | int


class Script:
    """One of `lua/`, by the name Redis caches it under."""

    def __init__(self, text: str, *, writes: bool) -> None:
        sha = sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.by_sha = pack_part(b"EVALSHA") + pack_part(sha.encode())
        self.by_text = pack_part(b"EVAL") + pack_part(text.encode())
        self.writes = writes


def load_script(name: str, *, writes: bool) -> Script:
    """Read `lua/<name>.lua` from the package."""
    folder = files("indexer.redis_index") / "lua"
    text = (folder / f"{name}.lua").read_text("utf-8")
    if writes:
        text = (folder / "prelude.lua").read_text("utf-8") + text
    return Script(text, writes=writes)


class RedisConnection:
    """To one server, or to a cluster."""

    def __init__(self, settings: RedisSettings) -> None:
        """Connects at the first call. Raises ValueError if the password's variable isn't set."""
        self.settings = settings
        self._seed, self._access = find_server(settings)
        self._lanes: dict[tuple[Address, bool], Lane] = {}
        self._opening: dict[tuple[Address, bool], asyncio.Lock] = {}
        self._slots = SlotTable()

    async def aclose(self) -> None:
        """Close every connection."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    async def run_ahead(self) -> None:
        """Keep a connection for lookups open until cancelled, so that none has to wait for one."""
        while True:
            for node in {self._seed, *self._slots.nodes}:
                with suppress(OSError, RedisRefusal):  # whoever asks is told
                    await self._lane(node, writes=False)
            await asyncio.sleep(_WATCH_S)

    async def run(
        self, script: Script, keys: PackedKeys, args: Sequence[bytes], *, timeout_s: float
    ) -> Any:
        """One round trip; two if the server has forgotten the script."""
        size = b"*%d\r\n" % (3 + keys.count + len(args))
        tail = b"".join([pack_part(arg) for arg in args])
        command = b"".join((size, script.by_sha, keys.packed, tail))
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._exchange(command, keys.first, writes=script.writes)
                except RedisRefusal as refusal:
                    if refusal.code != "NOSCRIPT":
                        raise
                command = b"".join((size, script.by_text, keys.packed, tail))
                return await self._exchange(command, keys.first, writes=script.writes)
        except (RedisRefusal, OSError) as error:  # TimeoutError is one
            raise index_error(error) from error

    async def ping(self) -> None:
        """Return if the server answers."""
        await self.ask("PING")

    async def fields(self, key: str) -> Sequence[bytes]:
        """Field names of a small hash."""
        names: Sequence[bytes] = await self.ask("HKEYS", key)
        return names

    async def scan_hash(self, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
        """Every field of a hash that nobody changes meanwhile, whatever its size."""
        cursor = b"0"
        while True:
            cursor, found = await self.ask("HSCAN", key, cursor, "COUNT", _ROWS_PER_SCAN)
            for name, value in zip(found[::2], found[1::2], strict=True):
                yield name, value
            if cursor == b"0":
                return

    async def cardinality(self, key: str) -> int:
        """Members of a set."""
        members: int = await self.ask("SCARD", key)
        return members

    async def ask(self, name: str, key: str = "", *parts: Part) -> Any:
        """Any command of one key, at the writer's pace; or of none, for any node."""
        return await self.ask_at(key, name, *((key, *parts) if key else ()))

    async def ask_at(self, key: str, name: str, *parts: Part) -> Any:
        """Likewise, of a command that doesn't begin with its key."""
        command = pack_command(name, *parts)
        try:
            async with asyncio.timeout(self.settings.write_timeout_s):
                return await self._exchange(command, key, writes=True)
        except (RedisRefusal, OSError) as error:
            raise index_error(error) from error

    async def remove_unless(self, kind: bytes, key: str) -> None:
        """Remove a key of ours to which somebody gave another type: all commands on it fail."""
        if await self.ask("TYPE", key) != kind:
            await self.ask("UNLINK", key)

    # Where, and over what.

    async def _exchange(self, command: bytes, key: str, *, writes: bool) -> Any:
        node = self._slots.node(slot_of(key)) or self._seed
        try:
            return await self._answer(node, command, writes=writes)
        except RedisRefusal as refusal:
            if refusal.code == "ASK":  # its slot is on the way to another node
                there = _named_node(refusal, node)
                return await (await self._lane(there, writes=writes)).ask(
                    pack_command("ASKING"), command
                )
            if refusal.code != "MOVED":
                raise
        await self._read_slots(node)
        node = self._slots.node(slot_of(key)) or self._seed
        return await self._answer(node, command, writes=writes)

    async def _answer(self, node: Address, command: bytes, *, writes: bool) -> Any:
        """Over the open lane; if that turns out to be dead, over a new one."""
        lane = self._lanes.get((node, writes))
        if lane is not None and lane.is_open:
            try:
                return await lane.ask(command)
            except OSError:
                pass
        try:
            return await (await self._lane(node, writes=writes)).ask(command)
        except OSError:
            await self._look_around(node)
            raise

    async def _lane(self, node: Address, *, writes: bool) -> Lane:
        """Open one unless it is open. One attempt at a time, whoever wants it."""
        key = node, writes
        lock = self._opening.setdefault(key, asyncio.Lock())
        async with lock:
            lane = self._lanes.get(key)
            if lane is None or not lane.is_open:
                async with asyncio.timeout(self.settings.connect_timeout_s):
                    lane = self._lanes[key] = await Lane.open(node, self._access)
            return lane

    async def _look_around(self, gone: Address) -> None:
        """A node that is gone may have been replaced: the next command goes to who has."""
        for node in (self._slots.nodes | {self._seed}) - {gone} if self._slots.nodes else ():
            with suppress(OSError, RedisRefusal):
                await self._read_slots(node)
                return

    async def _read_slots(self, node: Address) -> None:
        lane = await self._lane(node, writes=True)
        self._slots = SlotTable(await lane.ask(pack_command("CLUSTER", "SLOTS")), node)


def _named_node(refusal: RedisRefusal, asked: Address) -> Address:
    """`ASK slot host:port`."""
    host, _, port = str(refusal).split(" ")[2].rpartition(":")
    return Address(host or asked.host, int(port))
