"""Prompts whose blocks come from another engine: the decode side of the nixl connector.

Rules:

1. The engine asks for what its own cache doesn't hold, allocates room for the whole prompt and
   reads while the request waits apart; the blocks are announced when they have arrived.
2. A loaded prompt has `n - 1` tokens: the last one is computed here to sample from.
3. An unknown engine id is a failed load: from 0.17 on the request fails, before that it is
   computed here. A read that comes too late, or is of another prompt, goes unnoticed and makes the
   text wrong.
4. The other engine hears that it may free its blocks whatever becomes of the request, and until
   then that they are still wanted.

Cost: O(requests that wait for blocks) per step.
"""

from simulator.core.kv_cache import KvCache
from simulator.core.live_request import LiveRequest
from simulator.core.settings import EngineSettings
from simulator.core.statistics import EngineStatistics
from simulator.core.transfer import TransferDirectory

_FIRST_RELEASE_FAILING_LOADS = (0, 17, 0)


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
        """A request came in; if its blocks are elsewhere, say that they are wanted."""
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
        missing_tokens = live.prompt_tokens - live.computed
        live.external_tokens = missing_tokens - 1
        live.load_until_s = (
            now_s
            + self._settings.transfer_latency_ms / 1000
            + missing_tokens / self._settings.transfer_tokens_per_s
        )
        self._statistics.external_cache_queries_tokens += missing_tokens
        self.loading.append(live)
        return True

    def finish(self, now_s: float) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """Return the requests whose blocks have arrived by now, and those whose never will."""
        arrived = [live for live in self.loading if live.load_until_s <= now_s]
        ready: list[LiveRequest] = []
        failed: list[LiveRequest] = []
        for live in arrived:
            self.loading.remove(live)
            self._pending.remove(live)
            (ready if self._read(live) else failed).append(live)
        return ready, failed

    def _beat(self, live: LiveRequest, now_s: float) -> None:
        peer = None if live.remote is None else self._directory.find(live.remote.engine_id)
        if live.remote is None or peer is None or peer.heartbeat_s is None:
            return
        peer.renew(live.remote, now_s)
        live.heartbeat_due_s = now_s + peer.heartbeat_s

    def _read(self, live: LiveRequest) -> bool:
        """Finish one load; False if the request must fail."""
        remote, live.remote = live.remote, None
        peer = None if remote is None else self._directory.find(remote.engine_id)
        if remote is None or peer is None:
            self._statistics.failed_loads += 1
            if self._settings.release >= _FIRST_RELEASE_FAILING_LOADS:
                return False
            self._cache.free(live)
            live.computed = live.external_tokens = 0
            return True
        if peer.read(remote, live.tokens) != "ok":
            self._statistics.corrupt_reads += 1
            live.is_corrupt = True
        live.is_loaded = True
        live.computed = live.prompt_tokens - 1
        self._statistics.external_cache_hits_tokens += live.external_tokens
        self._cache.announce_filled(live, live.computed)
        return True
