"""What an engine does with images, audio and video: finds what another has encoded, or runs its encoder.

Rules, as each encoder connector has them:

1. An item's name is the client's `uuid`, else the hash of its content; both engines compute it.
2. example: the encode engine leaves each item in a storage that outlives it; others look there.
3. cpu: it keeps the last `ec_cpu_items` in its memory and answers with where that is. Others read there
   what `ec_transfer_params` of their request announce, by name.
4. mooncake: it pushes to `consumer_zmq` under `transfer_id`. A consumer waits for its push
   (`ec_push_wait_s`), uses it once, and fails the request if none comes: it doesn't encode itself.
5. example, cpu, or no connector: what isn't found is encoded here. One item at a time.
6. What an engine has encoded or loaded it keeps, the last `encoder_cache_items`.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from simulator.core.errors import GenerationFailedError, RequestRefusedError
from simulator.core.media import MEDIA_TYPES
from simulator.core.settings import EngineSettings

SIZE_BYTES = 4096
_FIRST_RELEASE_WITH_PARAMS = (0, 26, 0)
"""`ec_transfer_params` of bodies and answers."""


@dataclass(slots=True)
class EncoderDirectory:
    """What encoders and consumers of one process share."""

    storage: set[str] = field(default_factory=set)
    tiers: dict[str, OrderedDict[str, None]] = field(default_factory=dict)
    """What the engine at `host:port` keeps for others."""
    pushes: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the consumer's address: name of the transfer, and of the item."""
    pushed: asyncio.Condition = field(default_factory=asyncio.Condition)


@dataclass(slots=True)
class EncoderCounts:
    """What an engine's encoder did since it started."""

    runs: int = 0
    """Items it encoded itself."""
    hits: int = 0
    """Items it still had."""
    loaded: int = 0
    """Items that another engine had encoded."""
    aborted: int = 0
    """Runs that ended because nobody waited any more."""
    lost: int = 0
    """Items that were announced, and weren't there."""


class Encoder:
    """The encoder of one engine, and its connector to others."""

    def __init__(
        self,
        settings: EngineSettings,
        directory: EncoderDirectory,
        *,
        encodes: bool,
        address: str,
        receives_at: Sequence[str],
    ) -> None:
        self._settings = settings
        self._directory = directory
        self.encodes = encodes
        """It does nothing else (`ec_producer`)."""
        self._address = address
        self._receives_at = receives_at
        self._cache: OrderedDict[str, None] = OrderedDict()
        self._seat = asyncio.Lock()
        self.counts = EncoderCounts()
        if settings.ec_connector == "cpu" and encodes:
            directory.tiers[address] = OrderedDict()
        for each in receives_at:
            directory.pushes[each] = {}

    def close(self) -> None:
        """The process ends; a storage stays."""
        self._directory.tiers.pop(self._address, None)
        for each in self._receives_at:
            self._directory.pushes.pop(each, None)

    async def encode(
        self, media: Sequence[str], params: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """An encode leg: returns the answer's `ec_transfer_params`."""
        if not media:
            raise RequestRefusedError(
                "This engine runs the encoder only: the request has no media."
            )
        told: dict[str, Any] = {}
        for number, name in enumerate(media):
            if not self._has(name):
                await self._run(name)
            told[name] = await self._publish(name, number, params)
        return told if self._settings.release >= _FIRST_RELEASE_WITH_PARAMS else None

    async def provide(self, media: Sequence[str], params: Mapping[str, Any], rank: int) -> None:
        """Have every item of a prompt here. Raises GenerationFailedError."""
        for number, name in enumerate(media):
            if self._has(name):
                continue
            if self._settings.ec_connector == "mooncake":
                await self._receive(name, number, params, self._receives_at[rank])
            elif self._finds(name, params):
                self._keep(name)
                self.counts.loaded += 1
            else:
                await self._run(name)

    def _has(self, name: str) -> bool:
        if name not in self._cache:
            return False
        self._cache.move_to_end(name)
        self.counts.hits += 1
        return True

    def _keep(self, name: str) -> None:
        self._cache[name] = None
        while len(self._cache) > self._settings.encoder_cache_items:
            self._cache.popitem(last=False)

    async def _run(self, name: str) -> None:
        try:
            async with self._seat:
                await asyncio.sleep(self._settings.encode_ms / 1000)
        except asyncio.CancelledError:
            self.counts.aborted += 1
            raise
        self.counts.runs += 1
        self._keep(name)

    async def _publish(
        self, name: str, number: int, params: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        told: dict[str, Any] = {"metadata": {}, "item_indices": [number]}
        if self._settings.ec_connector == "example":
            self._directory.storage.add(name)
        elif self._settings.ec_connector == "cpu":
            tier = self._directory.tiers[self._address]
            tier[name] = None
            while len(tier) > self._settings.ec_cpu_items:
                tier.popitem(last=False)
            host, _, port = self._address.rpartition(":")
            told |= {"peer_host": host, "peer_port": int(port), "size_bytes": SIZE_BYTES}
        else:
            await self._push(name, number, params)
        return told

    async def _push(self, name: str, number: int, params: Mapping[str, Any]) -> None:
        mailbox = self._directory.pushes.get(str(params.get("consumer_zmq")))
        transfer = _transfer_id(name, number, params)
        if mailbox is None or transfer is None:
            return
        async with self._directory.pushed:
            mailbox[transfer] = name
            self._directory.pushed.notify_all()

    async def _receive(
        self, name: str, number: int, params: Mapping[str, Any], address: str
    ) -> None:
        transfer = _transfer_id(name, number, params)
        mailbox = self._directory.pushes[address]
        try:
            async with (
                asyncio.timeout(self._settings.ec_push_wait_s),
                self._directory.pushed,
            ):
                await self._directory.pushed.wait_for(
                    lambda: transfer in mailbox and mailbox[transfer] == name
                )
        except TimeoutError as error:
            self.counts.lost += 1
            raise GenerationFailedError("Internal server error: retry the request") from error
        del mailbox[str(transfer)]
        self._keep(name)
        self.counts.loaded += 1

    def _finds(self, name: str, params: Mapping[str, Any]) -> bool:
        if self._settings.ec_connector == "example":
            return name in self._directory.storage
        told = params.get(name)
        if self._settings.ec_connector != "cpu" or not isinstance(told, Mapping):
            return False
        tier = self._directory.tiers.get(f"{told.get('peer_host')}:{told.get('peer_port')}")
        is_there = tier is not None and name in tier and told.get("size_bytes") == SIZE_BYTES
        self.counts.lost += not is_there
        return is_there


def media_names(messages: Sequence[Mapping[str, Any]], options: object) -> list[str]:
    """The names of a chat's items, in order. `options` are those of the processor."""
    return [media_name(part, options) for part in _parts(messages)]


def media_name(part: Mapping[str, Any], options: object) -> str:
    """The client's, else a hash of the content."""
    named = part.get("uuid")
    if isinstance(named, str) and named:
        return named
    content = msgspec.json.encode([part[str(part["type"])], options])
    return hashlib.sha256(content).hexdigest()


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in MEDIA_TYPES:
                yield part


def _transfer_id(name: str, number: int, params: Mapping[str, Any]) -> str | None:
    """By position if the entry there doesn't name another item, else by name."""
    items = params.get("ec_items")
    entries = [each for each in items if isinstance(each, dict)] if isinstance(items, list) else []
    fitting = [each for each in entries if each.get("mm_hash") == name]
    if number < len(entries) and entries[number].get("mm_hash") in {None, name}:
        fitting.insert(0, entries[number])
    named = [each["transfer_id"] for each in fitting if each.get("transfer_id")]
    return str(named[0]) if named else None
