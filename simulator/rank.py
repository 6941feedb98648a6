"""One data-parallel rank in real time: steps its engine core, sleeps, delivers, publishes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from simulator.core.engine import EngineCore
from simulator.core.types import EngineRequest, StepResult, TokenOutput
from simulator.latency import LatencyHistogram
from simulator.publisher import EventPublisher

_LARGEST_LAG_S = 0.05
_LONGEST_BLOCKED_S = 0.02
"""Blocks may be freed by another engine, of which nobody tells us."""


class OutputStream:
    """The tokens of the sequences of one HTTP request, as they come."""

    def __init__(self, capacity_tokens: int) -> None:
        self._queue: asyncio.Queue[TokenOutput] = asyncio.Queue(capacity_tokens)

    def deliver(self, output: TokenOutput) -> None:
        self._queue.put_nowait(output)

    async def next(self) -> TokenOutput:
        """Wait for the next token of any of the sequences."""
        return await self._queue.get()


@dataclass(slots=True)
class _Accepted:
    """A request that has not finished."""

    stream: OutputStream
    arrived_s: float
    last_token_s: float | None = None


class EngineRank:
    """Runs one engine core against the clock."""

    def __init__(
        self, core: EngineCore, publisher: EventPublisher, clock: Callable[[], float]
    ) -> None:
        self.core = core
        self.publisher = publisher
        self.time_to_first_token = LatencyHistogram()
        self.inter_token_latency = LatencyHistogram()
        self.request_latency = LatencyHistogram()
        self._clock = clock
        self._accepted: dict[str, _Accepted] = {}
        self._woken = asyncio.Event()
        self._is_asleep = False
        self._is_frozen = False

    @property
    def is_asleep(self) -> bool:
        """Computes nothing; requests wait."""
        return self._is_asleep

    @is_asleep.setter
    def is_asleep(self, is_asleep: bool) -> None:
        self._is_asleep = is_asleep
        self._woken.set()

    def freeze(self) -> None:
        """Stand still with what there is; nothing can be asked of it."""
        self._is_frozen = True

    def thaw(self) -> None:
        self._is_frozen = False
        self._woken.set()

    @property
    def in_flight(self) -> int:
        """Requests accepted and not finished."""
        return len(self._accepted)

    def submit(self, request: EngineRequest, stream: OutputStream) -> None:
        """Queue a request; its outputs arrive in `stream`, which must have room for them all."""
        now_s = self._clock()
        self._accepted[request.request_id] = _Accepted(stream, now_s)
        self.core.add(request, now_s)
        self._woken.set()

    def abort(self, request_id: str) -> None:
        """Stop a request whose client is gone; unknown ids are none of its business."""
        if self._accepted.pop(request_id, None) is not None:
            self.core.abort(request_id)
            self._woken.set()

    async def run(self) -> None:
        """Step until cancelled."""
        step_s = self._clock()
        while True:
            self._woken.clear()
            if self._is_asleep or self._is_frozen or not self.core.has_work:
                await self._woken.wait()
                continue
            now_s = self._clock()
            # Steps follow each other without drift, unless the event loop was late for good.
            step_s = step_s if now_s - step_s < _LARGEST_LAG_S else now_s
            result = self.core.step(step_s)
            step_s += result.duration_s
            await asyncio.sleep(max(0.0, step_s - self._clock()))
            self._deliver(result)
            if not result.scheduled_tokens and self.core.has_work:
                await self._wait_while_blocked(result.wake_s)
                step_s = self._clock()

    async def _wait_while_blocked(self, until_s: float | None) -> None:
        """Wait for a request or an abort, but only until something else may have changed."""
        delay_s = _LONGEST_BLOCKED_S
        if until_s is not None:
            delay_s = min(delay_s, max(0.0, until_s - self._clock()))
        try:
            async with asyncio.timeout(delay_s):
                await self._woken.wait()
        except TimeoutError:
            return

    def _deliver(self, result: StepResult) -> None:
        if result.events:
            self.publisher.publish(result.events)
        now_s = self._clock()
        for output in result.outputs:
            accepted = self._accepted.get(output.request_id)
            if accepted is None:
                continue
            accepted.stream.deliver(output)
            self._observe(accepted, now_s)
            if output.finish_reason is not None:
                self.request_latency.observe(now_s - accepted.arrived_s)
                del self._accepted[output.request_id]

    def _observe(self, accepted: _Accepted, now_s: float) -> None:
        if accepted.last_token_s is None:
            self.time_to_first_token.observe(now_s - accepted.arrived_s)
        else:
            self.inter_token_latency.observe(now_s - accepted.last_token_s)
        accepted.last_token_s = now_s
