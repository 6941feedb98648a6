"""One engine in virtual time: `simulator.core.engine`, step for step, without computing most steps.

Rules: those of `simulator.core.engine` for a mixed engine without transfers; a test holds every
first and last token, cached count and block change of both against each other. What is different:

1. Of requests that decode only their *next moment* is kept: the step in which one needs a block,
   fills one, or ends. Steps before the first of these change nothing but the time, so none of them
   is run: the engine coasts. A request that arrives meanwhile is admitted at the next step's
   begin, as it would be.
2. All that run have decoded at least one token, except the last one: whoever's prompt isn't
   computed yet takes the rest of the step's tokens, so nobody is admitted behind it.
3. A waiting request that found no room is tried again once a block or a seat was freed, or a new
   key is held: before that the answer is the same.

Cost: O(1) per block filled or taken, O(log running) per moment; nothing per token.
"""

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from heapq import heapify, heappop, heappush
from typing import Protocol

from indexer.core.index import Change
from indexer.core.types import BlockKey
from kvlb.bench.blocks import KeyPool
from simulator.core.settings import EngineSettings

Publish = Callable[[list[Change]], None]


class Clock(Protocol):
    """What an engine needs of `kvlb.bench.clock.VirtualClock`."""

    now_s: float

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Run `action` at `when_s`."""


class Job:
    """One request in an engine."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "computed",
        "keys",
        "length",
        "moment",
        "on_end",
        "on_first",
        "order",
        "output_tokens",
        "prompt_tokens",
        "registered",
        "since",
    )

    def __init__(
        self,
        *,
        keys: Sequence[BlockKey],
        prompt_tokens: int,
        output_tokens: int,
        on_first: Callable[["Job"], None],
        on_end: Callable[["Job"], None],
    ) -> None:
        """`keys`: of the full blocks of prompt and answer."""
        self.keys = keys
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.on_first = on_first
        self.on_end = on_end
        self.cached_tokens: int | None = None
        self.blocks: list[int] = []
        self.registered = 0
        """Of `blocks`: full and known to the cache."""
        self.computed = 0
        """Tokens with KV; not kept up while it decodes."""
        self.length = prompt_tokens
        """Prompt and answer, as of step `since`."""
        self.since = 0
        self.moment: tuple[int, int] | None = None
        """Step of its next moment, and its order; None: it doesn't decode."""
        self.order = 0

    def copy(self) -> "Job":
        """Another one in the same state."""
        twin = copy(self)
        twin.blocks = self.blocks.copy()
        return twin


_Delivery = tuple[list[Change], list[Job], list[Job]]
"""Changes of the cache, jobs with a first token, and jobs that ended."""


class VirtualEngine:
    """One rank. `clock` drives it; what its cache does goes to `publish`."""

    def __init__(self, settings: EngineSettings, clock: Clock, publish: Publish) -> None:
        self._clock = clock
        self._publish = publish
        self._size = settings.block_size
        self._seats = settings.max_num_seqs
        self._step_tokens = settings.max_num_batched_tokens
        self._step_s = settings.inter_token_ms / 1000
        self._tokens_per_s = settings.prefill_tokens_per_s
        self._pool = KeyPool(settings.num_blocks)
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._filling: Job | None = None
        """The last one running, if its prompt isn't computed yet."""
        self._due: list[tuple[int, int, Job]] = []
        self._step = 0
        self._orders = 0
        self._is_stepping = False
        self._delivery: _Delivery | None = None
        """What the step under way ends with."""
        self._coasts_since_s: float | None = None
        self._coasts_to = 0
        """The step before the one that it coasts to."""
        self._acts_at_s: float | None = None
        self._look = 0
        self._changed = 0
        """Counts what may let a waiting request in."""
        self._refused = -1
        """`_changed` when the head of the queue was last refused."""
        self.prefill_s = 0.0
        """Seconds spent on prompt tokens, those computed again included."""
        self.preemptions = 0

    def submit(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)
        if self._is_stepping:
            return
        if self._coasts_since_s is None:
            self.act_at(self._clock.now_s)
        elif len(self._waiting) == 1:  # else the head is refused, and nobody passes it
            self._stop_coasting(self._coasts_since_s)

    def copy(self, clock: Clock, twin_of: Callable[[Job], Job]) -> "VirtualEngine":
        """Another one in the same state, which goes on by itself; `twin_of` copies each job once."""
        twin = copy(self)
        delivery = self._delivery
        if delivery is not None:
            changes, firsts, ended = delivery
            delivery = (changes, [*map(twin_of, firsts)], [*map(twin_of, ended)])
        due = [
            (step, order, twin_of(job))
            for step, order, job in self._due
            if job.moment == (step, order)
        ]
        heapify(due)
        vars(twin).update(
            _clock=clock,
            _pool=self._pool.copy(),
            _waiting=deque(map(twin_of, self._waiting)),
            _running=[*map(twin_of, self._running)],
            _filling=None if self._filling is None else twin_of(self._filling),
            _due=due,
            _delivery=delivery,
        )
        if self._acts_at_s is not None:
            twin.act_at(self._acts_at_s)
        return twin

    def act_at(self, when_s: float) -> None:
        """Whatever comes next comes then, and nothing before it."""
        self._acts_at_s = when_s
        self._look += 1
        number = self._look

        def act() -> None:
            if number == self._look:
                self._act()

        self._clock.at(when_s, act)

    def _act(self) -> None:
        self._acts_at_s = None
        if self._delivery is not None:
            delivery, self._delivery = self._delivery, None
            self._deliver(*delivery)
            return
        if self._coasts_since_s is not None:
            self._coasts_since_s = None
            self._step = self._coasts_to
        self._run_step()

    def _stop_coasting(self, since_s: float) -> None:
        """The next step that begins is run again."""
        now_s, begin_s = self._clock.now_s, since_s
        while begin_s < now_s:
            begin_s += self._step_s
            self._step += 1
        self._coasts_since_s = None
        self._is_stepping = True
        self.act_at(begin_s)

    def _go_on(self) -> None:
        """Run the next step, or coast until one matters."""
        begin_s = self._clock.now_s
        is_refused = not self._waiting or self._refused == self._changed
        if self._filling is not None or not is_refused:
            self.act_at(begin_s)
            return
        due = self._due
        while due[0][2].moment != due[0][:2]:
            heappop(due)
        steps = due[0][0] - self._step - 1
        if not steps:
            self.act_at(begin_s)
            return
        self._coasts_since_s = begin_s
        for _ in range(steps):  # one by one: a product would round otherwise
            begin_s += self._step_s
        self._coasts_to = self._step + steps
        self.act_at(begin_s)

    def _run_step(self) -> None:
        self._step += 1
        ended: list[Job] = []
        computed: list[Job] = []
        gave_way = self._decode(ended)
        filling = self._filling
        budget = self._step_tokens - len(self._running) + (filling is not None)
        left = budget
        if filling is not None:
            tokens = self._fill(filling, budget, computed)
            gave_way = gave_way or not tokens
            left -= tokens
        if not gave_way:
            left = self._admit_all(left, computed)
        firsts = self._sample(computed, ended)
        for job in ended:
            self._end(job)
        prefill_s = (budget - left) / self._tokens_per_s
        self.prefill_s += prefill_s
        self._delivery = (self._pool.take_changes(), firsts, ended)
        self._is_stepping = True
        self.act_at(self._clock.now_s + (self._step_s + prefill_s))

    def _decode(self, ended: list[Job]) -> bool:
        """Moments of this step among those that decode; True if somebody had to give way."""
        due, size, step, pool = self._due, self._size, self._step, self._pool
        gave_way = False
        while due and due[0][0] <= step:
            when, order, job = heappop(due)
            if job.moment != (when, order):
                continue  # it gave way since
            computed = job.length - 1 + step - job.since
            if computed > len(job.blocks) * size:
                gave_way = gave_way or not pool.free_blocks
                if not self._makes_room(job):
                    continue
                job.blocks += pool.take(1)
            self._register(job, computed)
            if computed + 1 - job.prompt_tokens >= job.output_tokens:
                ended.append(job)
            else:
                self._plan(job)
        return gave_way

    def _makes_room(self, job: Job) -> bool:
        """Who came last gives way until a block is free; False if that was `job` itself."""
        while not self._pool.free_blocks:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is job:
                return False
        return True

    def _plan(self, job: Job) -> None:
        """Its next moment: it ends, needs a block, or has filled one."""
        size = self._size
        after = min(
            job.output_tokens - (job.length - job.prompt_tokens),
            len(job.blocks) * size - job.length + 2,
            (job.registered + 1) * size - job.length + 1,
        )
        job.moment = (job.since + after, job.order)
        heappush(self._due, (*job.moment, job))

    def _register(self, job: Job, computed: int) -> None:
        first, full = job.registered, computed // self._size
        if full > first:
            job.registered = full
            if self._pool.register(job.blocks[first:full], job.keys[first:full]):
                self._changed += 1

    def _preempt(self, job: Job) -> None:
        if job.moment is not None:
            job.length += self._step - 1 - job.since
        self._filling = None if job is self._filling else self._filling
        self._pool.release(job.blocks, job.keys[: job.registered])
        job.blocks = []
        job.registered = job.computed = 0
        job.moment = None
        self.preemptions += 1
        self._changed += 1
        self._waiting.appendleft(job)

    def _fill(self, job: Job, budget: int, computed: list[Job]) -> int:
        """Go on computing a prompt; tokens of this step."""
        tokens = min(job.length - job.computed, budget)
        needed = -(-(job.computed + tokens) // self._size) - len(job.blocks)
        if needed > self._pool.free_blocks:
            self._preempt(self._running.pop())
            return 0
        job.blocks += self._pool.take(needed)
        self._compute(job, tokens, computed)
        return tokens

    def _compute(self, job: Job, tokens: int, computed: list[Job]) -> None:
        job.computed += tokens
        self._register(job, job.computed)
        if job.computed == job.length:
            computed.append(job)
            self._filling = None
        else:
            self._filling = job

    def _admit_all(self, left: int, computed: list[Job]) -> int:
        """Admit who waits while tokens, seats and blocks last; tokens left."""
        while self._waiting and left > 0:
            if self._refused == self._changed:
                break
            job = self._waiting[0]
            tokens = self._admit(job, left) if len(self._running) < self._seats else 0
            if not tokens:
                self._refused = self._changed
                break
            self._waiting.popleft()
            self._orders += 1
            job.order = self._orders
            self._running.append(job)
            self._compute(job, tokens, computed)
            left -= tokens
        return left

    def _admit(self, job: Job, budget: int) -> int:
        """Give it blocks; tokens of this step, 0 if there is no room."""
        pool, size = self._pool, self._size
        hits = pool.held(job.keys[: (job.length - 1) // size])
        held = hits * size
        tokens = min(job.length - held, budget)
        needed = -(-(held + tokens) // size) - hits
        if needed > pool.free_blocks:
            return 0  # as nearly always, before anything is listed
        hit = pool.run(job.keys[:hits])
        if needed + pool.unused(hit) > pool.free_blocks:
            return 0
        pool.touch(hit)
        job.blocks = hit + pool.take(needed)
        job.registered = len(hit)
        job.computed = held
        if job.cached_tokens is None:
            job.cached_tokens = held
        return tokens

    def _sample(self, computed: list[Job], ended: list[Job]) -> list[Job]:
        """A token each for those whose prompt is computed; those whose first one it is."""
        firsts = []
        for job in computed:
            if job.length == job.prompt_tokens:
                firsts.append(job)
            job.length += 1
            job.since = self._step
            if job.length - job.prompt_tokens >= job.output_tokens:
                ended.append(job)
            else:
                self._plan(job)
        return firsts

    def _end(self, job: Job) -> None:
        self._running.remove(job)
        self._pool.release(job.blocks, job.keys[: job.registered])
        job.blocks = []
        job.moment = None
        self._changed += 1

    def _deliver(self, changes: list[Change], firsts: list[Job], ended: list[Job]) -> None:
        self._is_stepping = False
        if changes:
            self._publish(changes)
        for job in firsts:
            job.on_first(job)
        for job in ended:
            job.on_end(job)
        if self._running or self._waiting:
            self._go_on()
