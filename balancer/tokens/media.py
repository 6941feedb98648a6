"""Learns from engines that render what named media become in a prompt, and makes prompts with them.

Rules (how is in `core.prompt.media_runs`):

1. No request waits: the first one with a medium is routed by the text before it, and an engine is asked
   beside it, one chat at a time. At most `WAITING` wait, each with its body; the others aren't learned from.
2. An engine decodes what it is asked about, so each medium is asked about once, and only those that the
   client named, which is how it says that they will come again.
3. A model whose prompts turn out otherwise than made here, `MAX_SURPRISES` times, is left alone.
4. Runs are kept up to `MAX_RUN_TOKENS`, the least recently used go first.
"""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from balancer.core.control_errors import EngineCallError, RenderAbsentError
from balancer.core.fleet.snapshot import Fleet
from balancer.core.prompt.media_runs import (
    MediumName,
    MediumRun,
    learn_runs,
    media_names,
    put_runs,
)
from balancer.core.prompt.rendered import Rendered, RenderQuestion, render_question
from balancer.core.request import GenerateRequest
from balancer.tokens.engine_tokens import ABSENT_S, EngineTokenizer
from indexer.core.hashing import MediumPlace
from indexer.core.types import InstanceId

WAITING: Final = 4
PATIENCE_S: Final = 10.0
"""For one engine's answer: it fetches, decodes and scales, and nobody waits for it."""
MAX_SURPRISES: Final = 3
MAX_RUN_TOKENS: Final = 4 * 1024 * 1024
"""16 MB."""

logger = structlog.stdlib.get_logger(__name__)

_Known = tuple[str, MediumName]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A chat with media that aren't known yet, and who could tell of them."""

    model: str
    names: Sequence[MediumName]
    instances: Sequence[InstanceId]
    question: RenderQuestion
    own: Sequence[int]


class MediaWatch:
    """One per process."""

    def __init__(
        self,
        engine: EngineTokenizer,
        clock: Callable[[], float],
        *,
        max_run_tokens: int = MAX_RUN_TOKENS,
    ) -> None:
        """`clock` is monotonic."""
        self._engine = engine
        self._clock = clock
        self._max_run_tokens = max_run_tokens
        self._waiting: asyncio.Queue[_Sample] = asyncio.Queue(WAITING)
        self._runs: OrderedDict[_Known, MediumRun] = OrderedDict()
        self._run_tokens = 0
        self._surprises: dict[str, int] = {}
        self._absent: dict[InstanceId, float] = {}
        """Until when an engine isn't asked."""

    def place(
        self, fleet: Fleet, request: GenerateRequest, own: Sequence[int]
    ) -> tuple["array[int]", Sequence[MediumPlace]] | None:
        """The chat's prompt with all its media, if they are known; else have them learned.

        `own` is it as its template writes it.
        """
        names = media_names(request)
        # Media of an adapter may have identifiers of their own.
        if not names or request.lora is not None or self._is_left_alone(request.base_model):
            return None
        runs = [self._find((request.base_model, name)) for name in names]
        known = [run for run in runs if run is not None]
        if len(known) == len(names):
            return put_runs(own, known)
        self._offer(fleet, request, names, own)
        return None

    def willing(self, fleet: Fleet, model: str) -> Sequence[InstanceId]:
        """Who may be asked now."""
        now_s = self._clock()
        return [
            each.id
            for each in fleet.serving(model)
            if each.is_available and now_s >= self._absent.get(each.id, 0.0)
        ]

    async def run(self) -> None:
        """Learn from what was offered, one after the other, until cancelled."""
        while True:
            sample = await self._waiting.get()
            if all(self._find((sample.model, name)) for name in sample.names):
                continue  # since it was offered
            answer = await self._ask(sample)
            if answer is not None and not self._is_left_alone(sample.model):
                self._learn(sample, answer)

    def surprised(self, model: str) -> None:
        """An engine made another prompt of a chat than was made here: nothing of it is believed."""
        self._surprises[model] = count = self._surprises.get(model, 0) + 1
        for known in [each for each in self._runs if each[0] == model]:
            self._run_tokens -= len(self._runs.pop(known).ids)
        if count == MAX_SURPRISES:
            logger.warning("media_not_learned", model=model)

    def _is_left_alone(self, model: str) -> bool:
        return self._surprises.get(model, 0) >= MAX_SURPRISES

    def _find(self, known: _Known) -> MediumRun | None:
        run = self._runs.get(known)
        if run is not None:
            self._runs.move_to_end(known)
        return run

    def _offer(
        self,
        fleet: Fleet,
        request: GenerateRequest,
        names: Sequence[MediumName],
        own: Sequence[int],
    ) -> None:
        question = render_question(request)
        instances = self.willing(fleet, request.model)
        if question is None or not instances or self._waiting.full():
            return
        self._waiting.put_nowait(
            _Sample(
                model=request.base_model,
                names=names,
                instances=instances,
                question=question,
                own=own,
            )
        )

    async def _ask(self, sample: _Sample) -> Rendered | None:
        for instance in sample.instances:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    (answer,) = await self._engine.render(instance, sample.question)
            except RenderAbsentError:
                now_s = self._clock()
                self._absent = {
                    each: end_s for each, end_s in self._absent.items() if end_s > now_s
                }
                self._absent[instance] = now_s + ABSENT_S
            except (EngineCallError, TimeoutError, ValueError):
                return None
            else:
                return answer
        return None

    def _learn(self, sample: _Sample, answer: Rendered) -> None:
        runs = learn_runs(sample.own, answer, len(sample.names))
        if runs is None:
            self.surprised(sample.model)
            return
        for name, run in zip(sample.names, runs, strict=True):
            old = self._runs.pop((sample.model, name), None)
            self._run_tokens += len(run.ids) - (len(old.ids) if old else 0)
            self._runs[sample.model, name] = run
        while self._run_tokens > self._max_run_tokens:
            _, forgotten = self._runs.popitem(last=False)
            self._run_tokens -= len(forgotten.ids)
