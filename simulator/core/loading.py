"""Prompts whose blocks come from another engine or a shared storage.

Rules:

1. The engine asks for what its own cache doesn't hold, allocates room for the whole prompt and
   reads while the request waits apart; the blocks are announced when they have arrived.
2. A loaded prompt has at most `n - 1` tokens: the last one is computed here to sample from.
3. An unknown engine id is a failed load: from 0.17 on the request fails, before that it is
   computed here. A read that comes too late, or is of another prompt, goes unnoticed and makes the
   text wrong.
4. The other engine hears that it may free its blocks whatever becomes of the request, and until
   then that they are still wanted.
5. Where both sides meet by name the read begins when the other side is ready. Nothing tells that
   it never will be: the request holds its blocks until the waiting's end, if it has one, or until
   it is aborted.
6. A peer that is only probed gives what it has cached of the prompt now.
7. No read begins before the other side has computed what is read.

Cost: O(requests that wait for blocks) per step.
"""

import math
from dataclasses import replace

from simulator.core.kv_cache import KvCache
from simulator.core.live_request import LiveRequest
from simulator.core.settings import EngineSettings
from simulator.core.statistics import EngineStatistics
from simulator.core.transfer import TransferDirectory
from simulator.core.types import RemotePrefill

_FIRST_RELEASE_FAILING_LOADS = (0, 17, 0)
_RECOMPUTE_TOKENS = 64
"""`kv_recompute_threshold`: less isn't worth a read from a decode engine."""


class Loader:
    """Reads blocks of other engines for one rank."""

    def __init__(
        self,
        settings: EngineSettings,
        cache: KvCache,
        directory: TransferDirectory,
        statistics: EngineStatistics,
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._directory = directory
        self._statistics = statistics
        self.loading: list[LiveRequest] = []
        self._pending: list[LiveRequest] = []

    @property
    def next_wake_s(self) -> float | None:
        """When the next blocks arrive or the next heartbeat is due."""
        return min(
            (min(live.load_until_s, live.heartbeat_due_s) for live in self._pending), default=None
        )

    def accept(self, live: LiveRequest, now_s: float) -> None:
        """A request came in; if its blocks are elsewhere, say that they are wanted.

        Raises EngineDiedError.
        """
        if live.remote is None:
            live.remote = self._look_into_storage(live, now_s)
        elif live.remote.probes:
            live.remote = self._probe(live, live.remote)
        if live.remote is not None:
            self._pending.append(live)
            self._beat(live, now_s)

    def beat(self, now_s: float) -> None:
        """Prolong the leases of everything still waited for."""
        for live in self._pending:
            if live.heartbeat_due_s <= now_s:
                self._beat(live, now_s)

    def decline(self, live: LiveRequest) -> None:
        """The request is gone: blocks kept for it may be freed."""
        if live.remote is None:
            return
        self._pending.remove(live)
        peer = self._directory.find(live.remote.engine_id)
        if peer is not None:
            peer.release(live.remote)

    def start(self, live: LiveRequest, now_s: float) -> bool:
        """Begin to read a prompt's blocks; False if there is no room for them."""
        hit = self._cache.find_prefix(live)
        if not self._cache.allocate(live, live.prompt_tokens, hit):
            return False
        live.computed = len(hit) * self._settings.block_size
        remote = live.remote
        to_load = live.prompt_tokens - 1
        if remote is not None and remote.num_tokens is not None:
            to_load = min(remote.num_tokens, to_load)
        live.loaded_tokens = max(to_load, live.computed)
        live.external_tokens = live.loaded_tokens - live.computed
        self._statistics.external_cache_queries_tokens += live.prompt_tokens - live.computed
        self.loading.append(live)
        if remote is None or remote.waits_s is None:
            self._begin(live, now_s)
        else:
            live.waits_until_s = now_s + remote.waits_s
        return True

    def finish(self, now_s: float) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """Return the requests whose blocks have arrived by now, and those whose never will."""
        for live in self.loading:
            if live.waits_until_s is not None:
                self._look_for_other_side(live, live.waits_until_s, now_s)
        arrived = [live for live in self.loading if live.load_until_s <= now_s]
        ready: list[LiveRequest] = []
        failed: list[LiveRequest] = []
        for live in arrived:
            self.loading.remove(live)
            self._pending.remove(live)
            (ready if self._read(live) else failed).append(live)
        return ready, failed

    def _look_into_storage(self, live: LiveRequest, now_s: float) -> RemotePrefill | None:
        storage, size = self._directory.storage, self._settings.block_size
        if self._settings.kv_connector == "example":
            return storage.find_prompt(live.tokens, size, live.extra_keys(0), now_s)
        if self._settings.kv_connector == "lmcache":
            return storage.find_chunks(live.tokens, live.extra_keys(0), now_s)
        return None

    def _probe(self, live: LiveRequest, remote: RemotePrefill) -> RemotePrefill | None:
        """Ask a peer what it has cached; nothing is better than what is here."""
        here = len(self._cache.find_prefix(live))
        peer = self._directory.cache_of(remote.engine_id)
        found = 0 if peer is None else peer.count_known(live)
        if found <= here:
            return None
        return replace(remote, num_tokens=found * self._settings.block_size)

    def _look_for_other_side(self, live: LiveRequest, until_s: float, now_s: float) -> None:
        peer = None if live.remote is None else self._directory.find(live.remote.engine_id)
        if peer is not None and live.remote is not None and peer.has(live.remote):
            live.waits_until_s = None
            self._begin(live, now_s)
        elif until_s <= now_s:
            live.waits_until_s = None
            live.load_until_s = now_s  # reading will fail

    def _begin(self, live: LiveRequest, now_s: float) -> None:
        settings = self._settings
        # The last token's place is moved, too, where the whole prompt is.
        is_whole = live.remote is not None and live.remote.num_tokens is None
        seconds = (live.external_tokens + is_whole) / settings.transfer_tokens_per_s
        start_s = max(now_s, self._computed_s(live.remote))
        live.load_until_s = start_s + settings.transfer_latency_ms / 1000 + seconds

    def _computed_s(self, remote: RemotePrefill | None) -> float:
        """When the other side will have computed what is read."""
        if remote is None or remote.is_shared:
            return -math.inf
        if remote.probes:
            cache = self._directory.cache_of(remote.engine_id)
            return -math.inf if cache is None else cache.computed_s
        peer = self._directory.find(remote.engine_id)
        return -math.inf if peer is None else peer.computed_s(remote)

    def _beat(self, live: LiveRequest, now_s: float) -> None:
        peer = None if live.remote is None else self._directory.find(live.remote.engine_id)
        if live.remote is None or peer is None or peer.heartbeat_s is None:
            return
        peer.renew(live.remote, now_s)
        live.heartbeat_due_s = now_s + peer.heartbeat_s

    def _read(self, live: LiveRequest) -> bool:
        """Finish one load; False if the request must fail."""
        remote, live.remote = live.remote, None
        if remote is not None and remote.is_shared:
            self._count_corrupt(live, is_corrupt=remote.is_foreign)
            return self._take(live)
        peer = None if remote is None else self._directory.find(remote.engine_id)
        never_came = (
            remote is not None
            and remote.waits_s is not None
            and (peer is None or not peer.has(remote))
        )
        if remote is None or peer is None or never_came:
            self._statistics.failed_loads += 1
            if self._settings.release >= _FIRST_RELEASE_FAILING_LOADS:
                return False
            self._cache.free(live)
            live.computed = live.external_tokens = 0
            return True
        if not remote.probes:
            wanted = live.tokens if remote.num_tokens is None else live.tokens[: live.loaded_tokens]
            self._count_corrupt(live, is_corrupt=peer.read(remote, wanted) != "ok")
        return self._take(live)

    def _count_corrupt(self, live: LiveRequest, *, is_corrupt: bool) -> None:
        if is_corrupt:
            self._statistics.corrupt_reads += 1
            live.is_corrupt = True

    def _take(self, live: LiveRequest) -> bool:
        """The blocks are here."""
        live.is_loaded = True
        live.computed = live.loaded_tokens
        self._statistics.external_cache_hits_tokens += live.external_tokens
        self._cache.announce_filled(live, live.computed)
        return True
