"""Blocks that one engine keeps for another, and how it is found: what side channels are for.

Rules:

1. A prefill engine that finished a request with `do_remote_decode` keeps its blocks under the
   request's id until a decode engine has read them, says it won't, or the lease ends.
2. The lease runs from the end of the prefill. A decode engine that has accepted the request
   prolongs it with heartbeats (from 0.22 on); one that never comes lets it end.
3. Nothing checks a read against the lease: who comes late reads whatever is in those blocks. The
   engine counts it, and so does the reader, whose text is then wrong.
4. Where both sides meet by name, blocks are kept under that name instead of the request's id. If
   two requests come under one name the first's blocks are found by nobody.
5. A step is scheduled before it is computed: blocks may be found a step before they can be read,
   and say from when on.

Invariant: every reservation ends in exactly one of `released`, `expired`, or is still `open`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from simulator.core.kv_cache import KvCache
from simulator.core.settings import EngineSettings
from simulator.core.storage import SharedStorage
from simulator.core.types import RemotePrefill, TokenArray

ReadResult = Literal["ok", "expired", "other_prompt"]

_HEARTBEATS_PER_LEASE = 6
_FIRST_RELEASE_WITH_HEARTBEATS = (0, 22, 0)
_OLD_LEASE_S = 480.0
"""`VLLM_NIXL_ABORT_REQUEST_TIMEOUT`, up to 0.21."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Blocks kept for a decode engine."""

    request_id: str
    block_ids: tuple[int, ...]
    tokens: TokenArray
    computed_s: float
    """When the step that fills them ends."""
    expires_s: float


class Reservations:
    """What one rank keeps for others."""

    def __init__(self, settings: EngineSettings, free: Callable[[tuple[int, ...]], None]) -> None:
        has_heartbeats = settings.release >= _FIRST_RELEASE_WITH_HEARTBEATS
        self.lease_s = settings.kv_lease_s if has_heartbeats else _OLD_LEASE_S
        self.heartbeat_s = self.lease_s / _HEARTBEATS_PER_LEASE if has_heartbeats else None
        self.released = 0
        self.expired = 0
        self.reads_after_expiry = 0
        self.reads_of_other_prompt = 0
        self._free = free
        self._nameless = 0
        self._open: dict[str, Reservation] = {}

    @property
    def open(self) -> int:
        return len(self._open)

    def reserve(
        self,
        request_id: str,
        blocks: list[int],
        tokens: TokenArray,
        computed_s: float,
        *,
        lease_s: float | None = None,
    ) -> Reservation:
        """Keep blocks that are computed then until somebody reads them or the lease ends."""
        kept = Reservation(
            request_id=request_id,
            block_ids=tuple(blocks),
            tokens=tokens,
            computed_s=computed_s,
            expires_s=computed_s + (lease_s or self.lease_s),
        )
        before = self._open.get(request_id)
        if before is not None:  # nobody asks for it any more: its blocks wait for the lease
            self._nameless += 1
            name = f"{request_id}#{self._nameless}"
            self._open[name] = replace(before, request_id=name)
        self._open[request_id] = kept
        return kept

    def has(self, remote: RemotePrefill) -> bool:
        """Whether the blocks are there, or will be when a step that has begun ends."""
        return self._find(remote) is not None

    def computed_s(self, remote: RemotePrefill) -> float:
        """From when on the blocks can be read; ones that are gone can't get readier."""
        kept = self._find(remote)
        return -math.inf if kept is None else kept.computed_s

    def renew(self, remote: RemotePrefill, now_s: float) -> None:
        """A decode engine is alive and still wants the blocks."""
        kept = self._find(remote)
        if kept is not None:
            expires_s = max(kept.expires_s, now_s + self.lease_s * 2 / 3)
            self._open[kept.request_id] = replace(kept, expires_s=expires_s)

    def read(self, remote: RemotePrefill, prompt: TokenArray) -> ReadResult:
        """Hand the blocks over and free them; `prompt` is what the reader believes they hold."""
        kept = self._find(remote)
        if kept is None:
            self.reads_after_expiry += 1
            return "expired"
        self._release(kept)
        if kept.tokens[: len(prompt)] != prompt:
            self.reads_of_other_prompt += 1
            return "other_prompt"
        return "ok"

    def release(self, remote: RemotePrefill) -> None:
        """A decode engine doesn't need the blocks after all."""
        kept = self._find(remote)
        if kept is not None:
            self._release(kept)

    def expire(self, now_s: float) -> None:
        """Free what nobody came for in time."""
        for ended in [kept for kept in self._open.values() if kept.expires_s <= now_s]:
            del self._open[ended.request_id]
            self.expired += 1
            self._free(ended.block_ids)

    @property
    def next_expiry_s(self) -> float | None:
        """When the next lease ends unless it is prolonged."""
        return min((kept.expires_s for kept in self._open.values()), default=None)

    def _find(self, remote: RemotePrefill) -> Reservation | None:
        """Releases up to 0.12 don't name the request, only the blocks."""
        if remote.request_id is not None:
            return self._open.get(remote.request_id)
        matching = (kept for kept in self._open.values() if kept.block_ids == remote.block_ids)
        return next(matching, None)

    def _release(self, kept: Reservation) -> None:
        del self._open[kept.request_id]
        self.released += 1
        self._free(kept.block_ids)


class TransferDirectory:
    """Finds the engine an id belongs to: what side channels and handshakes are in the real thing."""

    def __init__(self) -> None:
        self._by_engine_id: dict[str, Reservations] = {}
        self._by_address: dict[str, str] = {}
        self._caches: dict[str, KvCache] = {}
        self._bootstraps: dict[str, list[str]] = {}
        self.storage = SharedStorage()

    def enter(self, engine_id: str, reservations: Reservations) -> None:
        self._by_engine_id[engine_id] = reservations

    def listen(self, channel: "SideChannel", cache: KvCache) -> None:
        """From now on the engine is found at its side channel's address."""
        self._by_address[channel.address] = channel.engine_id
        self._caches[channel.engine_id] = cache

    def register(self, bootstrap: str, engine_id: str) -> None:
        """A worker tells a bootstrap server of itself."""
        self._bootstraps.setdefault(bootstrap, []).append(engine_id)

    def leave(self, engine_id: str) -> None:
        """An engine's life has ended; who listens at its address now is somebody else."""
        self._by_engine_id.pop(engine_id, None)
        self._caches.pop(engine_id, None)
        self._by_address = {
            address: each for address, each in self._by_address.items() if each != engine_id
        }
        for engines in self._bootstraps.values():
            if engine_id in engines:
                engines.remove(engine_id)

    def at(self, address: str) -> str | None:
        """Return the id of the engine that listens there."""
        return self._by_address.get(address)

    def registered(self, bootstrap: object) -> list[str]:
        """Return the engine ids that a bootstrap server knows, in the order of their ranks."""
        return self._bootstraps.get(str(bootstrap), [])

    def cache_of(self, engine_id: str) -> KvCache | None:
        return self._caches.get(engine_id)

    def find(self, engine_id: str) -> Reservations | None:
        return self._by_engine_id.get(engine_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannel:
    """How a rank presents itself to decode engines."""

    engine_id: str
    host: str
    port: int
    """Of this rank."""
    rank: int = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def render_transfer_params(
    settings: EngineSettings,
    channel: SideChannel,
    kept: Reservation,
    *,
    cached_tokens: int,
    tells: str = "pull",
) -> dict[str, object]:
    """Build the `kv_transfer_params` this release would return for `kept`."""
    if tells == "read":
        return _render_read(settings, channel, kept)
    release = settings.release
    is_decode = tells == "decode"
    nested = release >= (0, 21, 0)
    params: dict[str, object] = {
        "do_remote_prefill": not is_decode,
        "do_remote_decode": is_decode,
        "remote_block_ids": [list(kept.block_ids)] if nested else list(kept.block_ids),
        "remote_engine_id": channel.engine_id,
        "remote_host": channel.host,
        "remote_port": channel.port,
    }
    fields = (
        ((0, 9, 2), "tp_size", 1),
        ((0, 13, 0), "remote_request_id", kept.request_id),
        ((0, 21, 0), "remote_num_tokens", len(kept.tokens)),
        ((0, 26, 0), "remote_blocks_expiry_time", kept.expires_s),
        ((0, 28, 0), "transfer_mode", "push" if tells == "push" else "pull"),
        ((0, 29, 0), "dcp_size", 1),
        ((0, 29, 0), "pp_size", 1),
        ((0, 31, 0), "remote_prefill_cached_tokens", cached_tokens),
        ((0, 33, 0), "remote_registration_generation", 0),
    )
    return params | {name: value for since, name, value in fields if release >= since}


def _render_read(
    settings: EngineSettings, channel: SideChannel, kept: Reservation
) -> dict[str, object]:
    """MoRI-IO in READ mode: everything the decode leg has to carry."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(kept.block_ids)],
        "remote_engine_id": channel.engine_id,
        "remote_host": channel.host,
        "remote_handshake_port": channel.port,
        "remote_notify_port": channel.port - channel.rank,
        "remote_dp_rank": channel.rank,
        "remote_dp_rank_override": True,
        "remote_dp_size": settings.dp_size,
        "remote_dp_size_local": settings.dp_size,
        "tp_size": 1,
        "transfer_id": kept.request_id,
    }
