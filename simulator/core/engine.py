"""The scheduler of one rank: continuous batching with chunked prefill over a prefix cache.

Sans-IO: time goes in as an argument, everything that happened comes out as a `StepResult`. The
same engine runs in real time behind HTTP (sleep for `duration_s`, then deliver) and in virtual
time for experiments (add `duration_s` to the clock).

Rules:

1. A step first gives every running request its next tokens, in order of arrival, then admits
   waiting requests while tokens (`max_num_batched_tokens`), seats (`max_num_seqs`) and blocks last.
   A prompt that doesn't fit the rest of the budget is computed in chunks.
2. A request whose last computed token is its newest samples one token. The token sampled last has
   no KV; a block is announced when the step that fills it is scheduled.
3. If a running request finds no block, the one admitted last loses its blocks and waits again.
4. A prompt whose blocks come from elsewhere waits apart from the queue; when they have come what
   is missing, at least the last token, is computed here.
5. A step takes `inter_token_ms` plus the time of its prompt tokens at `prefill_tokens_per_s`.

Cost: O(running requests) per step plus O(blocks touched).
"""

from collections import deque
from dataclasses import dataclass

from simulator.core.blocks import BlockPool
from simulator.core.errors import EngineDiedError
from simulator.core.kv_cache import KvCache
from simulator.core.live_request import LiveRequest
from simulator.core.loading import Loader
from simulator.core.settings import EngineSettings
from simulator.core.statistics import EngineLoad, EngineStatistics
from simulator.core.tokenizer import END_OF_TEXT_ID
from simulator.core.transfer import (
    Reservations,
    SideChannel,
    TransferDirectory,
    render_transfer_params,
)
from simulator.core.types import (
    EngineRequest,
    FinishReason,
    Keep,
    KvEvent,
    StepResult,
    TokenOutput,
)

# Not in 0.16, in 0.32; the release between them is a guess.
_FIRST_RELEASE_REUSING_EMPTY_BLOCKS = (0, 20, 0)
_FIRST_RELEASE_REPORTING_FULL = (0, 26, 0)


@dataclass(slots=True)
class _Step:
    """What a step computes while it is being put together."""

    budget_tokens: int
    scheduled: list[tuple[LiveRequest, int]]
    prefill_tokens: int = 0

    def add(self, live: LiveRequest, tokens: int) -> None:
        self.scheduled.append((live, tokens))
        self.budget_tokens -= tokens
        if live.computed < live.prompt_tokens or live.is_recomputing:
            self.prefill_tokens += tokens


class EngineCore:
    """One rank of one engine."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        none_hash: bytes,
        channel: SideChannel,
        directory: TransferDirectory,
    ) -> None:
        self._settings = settings
        self._channel = channel
        self._directory = directory
        self._reports_full = settings.release >= _FIRST_RELEASE_REPORTING_FULL
        self._pool = BlockPool(
            settings.num_blocks,
            reuses_empty_first=settings.release >= _FIRST_RELEASE_REUSING_EMPTY_BLOCKS,
        )
        self._cache = KvCache(self._pool, block_size=settings.block_size, none_hash=none_hash)
        self.statistics = EngineStatistics()
        self.reservations = Reservations(settings, lambda ids: self._pool.release(reversed(ids)))
        self._loader = Loader(settings, self._cache, directory, self.statistics)
        self._waiting: deque[LiveRequest] = deque()
        self._running: list[LiveRequest] = []
        self.is_dead = False
        """It has met what an engine dies of: every request fails from now on."""
        directory.listen(channel, self._cache)

    @property
    def has_work(self) -> bool:
        """Whether a step may bring something."""
        return bool(self._running or self._waiting or self._loader.loading)

    def load(self) -> EngineLoad:
        """Return the gauges of this moment."""
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._loader.loading),
            loading=len(self._loader.loading),
            cache_usage=self._pool.used_blocks / (self._settings.num_blocks - 1),
            open_reservations=self.reservations.open,
            expired_reservations=self.reservations.expired,
            released_reservations=self.reservations.released,
            reads_after_expiry=self.reservations.reads_after_expiry,
            reads_of_other_prompt=self.reservations.reads_of_other_prompt,
        )

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Put a request at the end of the queue."""
        live = LiveRequest(request)
        try:
            self._loader.accept(live, now_s)
        except EngineDiedError:
            self.is_dead = True
        self._waiting.append(live)

    def abort(self, request_id: str) -> bool:
        """Forget a request; False if it has finished or never was."""
        for queue in (self._running, self._waiting, self._loader.loading):
            for live in queue:
                if live.request.request_id == request_id:
                    queue.remove(live)
                    self._loader.decline(live)
                    self._cache.free(live)
                    self.statistics.count_finished("abort")
                    return True
        return False

    def reset_prefix_cache(self) -> bool:
        """Forget the cache unless blocks are in use; told to subscribers with the next step."""
        return self._pool.reset()

    def expire(self, now_s: float) -> None:
        """Free reservations whose lease has ended."""
        self.reservations.expire(now_s)

    def step(self, now_s: float) -> StepResult:
        """Compute one step that starts now."""
        self.expire(now_s)
        self._loader.beat(now_s)
        ready, failed = self._loader.finish(now_s)
        outputs = [self._fail(live) for live in failed]
        self._waiting.extendleft(reversed(ready))
        if self.is_dead:
            outputs += [self._fail(live) for live in (*self._waiting, *self._running)]
            self._waiting.clear()
            self._running.clear()
        step = _Step(self._settings.max_num_batched_tokens, [])
        if self._schedule_running(step):
            self._schedule_waiting(step, now_s)
        duration_s = self._duration_s(step)
        self._cache.computed_s = now_s + duration_s
        for live, tokens in step.scheduled:
            self._compute(live, tokens, now_s + duration_s, outputs)
        self.statistics.steps += 1
        self.statistics.busy_s += duration_s
        return StepResult(
            duration_s=duration_s,
            outputs=outputs,
            events=self._published(self._pool.take_events()),
            scheduled_tokens=self._settings.max_num_batched_tokens - step.budget_tokens,
            wake_s=None if step.scheduled else self._next_wake_s(),
        )

    def _published(self, events: list[KvEvent]) -> list[KvEvent]:
        is_published = self._settings.events and self._settings.prefix_caching
        return events if is_published else []

    def _schedule_running(self, step: _Step) -> bool:
        """Schedule the running requests; False if one had to give way, so none may be admitted."""
        nobody_gave_way = True
        index = 0
        while index < len(self._running) and step.budget_tokens > 0:
            live = self._running[index]
            tokens = min(len(live.tokens) - live.computed, step.budget_tokens)
            while not self._cache.allocate(live, live.computed + tokens):
                nobody_gave_way = False
                victim = self._running.pop()
                self._preempt(victim)
                if victim is live:
                    return False
            self._cache.announce_filled(live, live.computed + tokens)
            step.add(live, tokens)
            index += 1
        return nobody_gave_way

    def _preempt(self, live: LiveRequest) -> None:
        self._cache.free(live)
        live.computed = 0
        live.is_loaded = False
        live.is_recomputing = True
        live.preemptions += 1
        self.statistics.preemptions += 1
        self._waiting.appendleft(live)

    def _schedule_waiting(self, step: _Step, now_s: float) -> None:
        while self._waiting and step.budget_tokens > 0:
            if len(self._running) >= self._settings.max_num_seqs:
                return
            live = self._waiting[0]
            reads_blocks = live.remote is not None
            if not (self._loader.start(live, now_s) if reads_blocks else self._admit(live, step)):
                return
            self._waiting.popleft()
            if not reads_blocks:
                self._running.append(live)

    def _admit(self, live: LiveRequest, step: _Step) -> bool:
        """Start computing a waiting request, unless there are too few blocks."""
        hit: list[int] = []
        reads_cache = live.request.reads_cache and self._settings.prefix_caching
        if reads_cache and not live.is_loaded:
            hit = self._cache.find_prefix(live)
        hit_tokens = len(hit) * self._settings.block_size
        computed = live.computed + hit_tokens
        tokens = min(len(live.tokens) - computed, step.budget_tokens)
        if live.request.reports_full and self._reports_full:
            # Before anything is evicted for the rest, as recorded.
            self._cache.announce_reused(live, len(hit))
        if not self._cache.allocate(live, computed + tokens, hit):
            return False
        live.computed = computed
        self._cache.announce_filled(live, computed + tokens)
        self._count_first_admission(live)
        step.add(live, tokens)
        return True

    def _count_first_admission(self, live: LiveRequest) -> None:
        if live.cached_tokens is not None:
            return
        remote = live.request.remote
        live.cached_tokens = live.computed
        if live.is_loaded and remote is not None and remote.prefill_cached_tokens is not None:
            live.cached_tokens = remote.prefill_cached_tokens
        counts = self.statistics
        counts.prompt_tokens += live.prompt_tokens
        counts.computed_prompt_tokens += live.prompt_tokens - live.computed
        counts.prefix_cache_queries_tokens += live.prompt_tokens
        counts.prefix_cache_hits_tokens += live.computed - live.external_tokens

    def _duration_s(self, step: _Step) -> float:
        if not step.scheduled:
            return 0.0
        fixed_s = self._settings.inter_token_ms / 1000
        return fixed_s + step.prefill_tokens / self._settings.prefill_tokens_per_s

    def _compute(
        self, live: LiveRequest, tokens: int, end_s: float, outputs: list[TokenOutput]
    ) -> None:
        live.computed += tokens
        if live.computed < len(live.tokens):
            return
        live.is_recomputing = False
        token_id = live.next_token()
        live.tokens.append(token_id)
        self.statistics.generation_tokens += 1
        reason, stop_reason = self._finish_reason(live, token_id)
        params = None
        if reason is not None:
            self._running.remove(live)
            params = self._finish(live, reason, end_s)
        outputs.append(
            TokenOutput(
                request_id=live.request.request_id,
                token_id=token_id,
                cached_tokens=live.cached_tokens or 0,
                finish_reason=reason,
                stop_reason=stop_reason,
                transfer_params=params,
            )
        )

    def _finish_reason(
        self, live: LiveRequest, token_id: int
    ) -> tuple[FinishReason | None, int | None]:
        request = live.request
        may_stop = live.generated_tokens > request.min_tokens
        if may_stop and token_id == END_OF_TEXT_ID and not request.ignore_eos:
            return "stop", None
        if may_stop and token_id in request.stop_token_ids:
            return "stop", token_id
        if live.generated_tokens >= request.max_tokens:
            return "length", None
        if len(live.tokens) >= self._settings.context_tokens:
            return "length", None
        return None, None

    def _finish(
        self, live: LiveRequest, reason: FinishReason, end_s: float
    ) -> dict[str, object] | None:
        """Free the blocks of a finished request, or keep them for a decode engine."""
        self.statistics.count_finished(reason)
        self._write_storage(live, end_s)
        keep = live.request.keep or (Keep() if live.request.keeps_blocks else None)
        if keep is None or reason not in keep.reasons:
            self._cache.free(live)
            return None
        blocks: list[int] = []
        if keep.copies:
            self._cache.free(live)
        else:
            blocks = self._cache.disown(live)
        kept = self.reservations.reserve(
            keep.key or live.request.request_id,
            blocks,
            live.tokens[: live.computed],
            end_s,
            lease_s=keep.lease_s,
        )
        if keep.tells is None:
            return None
        return render_transfer_params(
            self._settings,
            self._channel,
            kept,
            cached_tokens=live.cached_tokens or 0,
            tells=keep.tells,
        )

    def _write_storage(self, live: LiveRequest, end_s: float) -> None:
        storage, settings = self._directory.storage, self._settings
        prompt, extra = live.tokens[: live.prompt_tokens], live.extra_keys(0)
        if settings.kv_connector == "example" and not live.is_loaded:
            storage.write_prompt(prompt, settings.block_size, extra, end_s)
        elif settings.kv_connector == "lmcache":
            storage.write_chunks(prompt, extra, end_s)

    def _fail(self, live: LiveRequest) -> TokenOutput:
        self._cache.free(live)
        self.statistics.count_finished("error")
        return TokenOutput(
            request_id=live.request.request_id,
            token_id=None,
            cached_tokens=0,
            finish_reason="error",
        )

    def _next_wake_s(self) -> float | None:
        times = [self._loader.next_wake_s]
        if self._waiting:
            times.append(self.reservations.next_expiry_s)
        return min((time_s for time_s in times if time_s is not None), default=None)
