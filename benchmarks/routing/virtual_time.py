"""Engines without sleeping: a queue of moments, and ranks that step their engine core in it."""

from collections.abc import Awaitable, Callable
from heapq import heappop, heappush
from itertools import count

from simulator.core.engine import EngineCore
from simulator.core.types import EngineRequest, KvEvent, StepResult, TokenOutput

BLOCKED_S = 0.02
"""A rank that could schedule nothing looks again: blocks may be freed by another engine."""

Action = Callable[[], Awaitable[None] | None]
Publish = Callable[[list[KvEvent]], None]
OnOutput = Callable[[TokenOutput], None]


class VirtualClock:
    """Runs actions at their moment, in order, at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._moments: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, when_s: float, action: Action) -> None:
        """Run `action` at `when_s`, after what was asked for before at the same moment."""
        heappush(self._moments, (when_s, next(self._numbers), action))

    async def run(self) -> None:
        """Until nothing is left to do."""
        while self._moments:
            self.now_s, _, action = heappop(self._moments)
            waiting = action()
            if waiting is not None:
                await waiting


class VirtualRank:
    """One rank: the counterpart of the simulator's `EngineRank`, which runs in real time."""

    def __init__(self, core: EngineCore, clock: VirtualClock, publish: Publish) -> None:
        self.core = core
        self._clock = clock
        self._publish = publish
        self._on_output: dict[str, OnOutput] = {}
        self._is_stepping = False
        self._look = 0

    def submit(self, request: EngineRequest, on_output: OnOutput) -> None:
        """Queue a request; every token of it goes to `on_output`."""
        self._on_output[request.request_id] = on_output
        self.core.add(request, self._clock.now_s)
        if not self._is_stepping:
            self._look_again(self._clock.now_s)

    def _look_again(self, when_s: float) -> None:
        self._look += 1
        number = self._look

        def look() -> None:
            if number == self._look and not self._is_stepping and self.core.has_work:
                self._step()

        self._clock.at(when_s, look)

    def _step(self) -> None:
        now_s = self._clock.now_s
        result = self.core.step(now_s)
        self._is_stepping = True
        self._clock.at(now_s + result.duration_s, lambda: self._deliver(result))

    def _deliver(self, result: StepResult) -> None:
        self._is_stepping = False
        if result.events:
            self._publish(result.events)
        for output in result.outputs:
            deliver = self._on_output[output.request_id]
            if output.finish_reason is not None:
                del self._on_output[output.request_id]
            deliver(output)
        if self._is_stepping or not self.core.has_work:
            return
        now_s = self._clock.now_s
        if result.scheduled_tokens:
            self._look_again(now_s)
        else:
            wake_s = now_s + BLOCKED_S if result.wake_s is None else result.wake_s
            self._look_again(min(max(wake_s, now_s), now_s + BLOCKED_S))
