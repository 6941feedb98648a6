"""Compares a sample of live prompts with the engine's own ids, beside the requests they came from.

Rules (when and what follows is in `core.prompt.parity`):

1. No request waits for a comparison. At most `WAITING` wait for theirs, the next ones aren't compared.
2. A difference is looked at again, both sides anew: a template may tell the date. Only if it stands is
   the model switched to the engine's tokens, with an error in the log that names the place.
3. What can't be compared (an engine that is busy, refuses or doesn't know a field) is counted.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from balancer.core.control_errors import EngineCallError, TokenizeRefusedError
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.prompt.parity import Difference, ParityBook, find_difference
from balancer.core.prompt.shape import ChatShape, TextShape, UnscorableError
from balancer.core.prompt.token_cache import Tokens
from balancer.core.prompt.tokenize_body import tokenize_bodies
from balancer.core.request import GenerateRequest
from balancer.core.settings.control import EngineFlags, TokensSettings
from balancer.tokens.engine_tokens import EngineTokenizer
from balancer.tokens.pool import TokenPool

WAITING: Final = 4
PATIENCE_S: Final = 10.0
"""For one engine's answer: nobody waits for it."""

logger = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A prompt that was read, and who could say the same of it."""

    model: str
    instances: tuple[Instance, ...]
    shape: TextShape | ChatShape
    body: Mapping[str, Any]
    own: Tokens


class ParityWatch(Collector):
    """One per process."""

    def __init__(
        self,
        *,
        settings: TokensSettings,
        pool: TokenPool,
        engine: EngineTokenizer,
        clock: Callable[[], float],
    ) -> None:
        self._flags = settings.engine_flags
        self._pool = pool
        self._engine = engine
        self._clock = clock
        self._waiting: asyncio.Queue[_Sample] = asyncio.Queue(WAITING)
        self._turn = 0
        self.book = ParityBook(settings.parity_interval_s)

    def offer(
        self, fleet: Fleet, request: GenerateRequest, shape: TextShape | ChatShape, own: Tokens
    ) -> None:
        """A prompt was read here; perhaps it should be compared."""
        model = request.base_model
        if len(own) != 1 or self._waiting.full() or not self.book.is_due(model, self._clock()):
            return
        flags = self._flags.get(model, EngineFlags())
        try:
            (body,) = tokenize_bodies(shape, request.model, flags)
        except UnscorableError:
            self.book.count(model, "not_asked")
            return
        instances = tuple(each for each in fleet.serving(request.model) if each.is_available)
        sample = _Sample(model=model, instances=instances, shape=shape, body=body, own=own)
        self._waiting.put_nowait(sample)

    async def run(self) -> None:
        """Compare what is offered, one after the other, until cancelled."""
        while True:
            sample = await self._waiting.get()
            self.book.count(sample.model, await self._outcome(sample))

    async def _outcome(self, sample: _Sample) -> str:
        if not sample.instances:
            return "no_engine"
        self._turn += 1
        instance = sample.instances[self._turn % len(sample.instances)]
        try:
            async with asyncio.timeout(PATIENCE_S):
                difference = await self._compare(sample, instance)
        except TokenizeRefusedError:
            return "refused"
        except (EngineCallError, UnscorableError, TimeoutError):
            return "failed"
        if difference is None:
            return "same"
        self._raise_alarm(sample.model, replace(difference, instance=instance.alias))
        return "different"

    async def _compare(self, sample: _Sample, instance: Instance) -> Difference | None:
        theirs = await self._engine.tokenize(instance.id, sample.body)
        if find_difference(sample.own[0], theirs) is None:
            return None
        (own,) = await self._pool.encode_anew(sample.model, sample.shape)
        return find_difference(own, await self._engine.tokenize(instance.id, sample.body))

    def _raise_alarm(self, model: str, difference: Difference) -> None:
        self.book.distrust(model, difference)
        self._pool.forget()
        logger.error(
            "token_parity_lost",
            model=model,
            instance=difference.instance,
            first_difference=difference.index,
            own_tokens=difference.own_tokens,
            engine_tokens=difference.engine_tokens,
        )

    def status(self) -> Mapping[str, Any]:
        """For `/status`: by model where tokens come from, and what comparisons have shown."""
        return {model: self._model_status(model) for model in self._pool.models}

    def _model_status(self, model: str) -> Mapping[str, Any]:
        known = self.book.models.get(model)
        difference = None if known is None else known.difference
        return {
            "source": "local" if difference is None else "engine",
            "comparisons": {} if known is None else dict(known.outcomes),
            "difference": difference
            and {
                "first_difference": difference.index,
                "own_tokens": difference.own_tokens,
                "engine_tokens": difference.engine_tokens,
                "instance": difference.instance,
            },
        }

    def collect(self) -> Iterable[Metric]:
        compared = CounterMetricFamily(
            "kvlb_token_comparisons_total",
            "Prompts whose local tokens were compared with the engine's, by what came of it.",
            labels=("model", "outcome"),
        )
        for model in self._pool.models:
            known = self.book.models.get(model)
            # A counter that begins at 1 shows no rise.
            counts = {"same": 0, "different": 0} | ({} if known is None else dict(known.outcomes))
            for outcome, count in counts.items():
                compared.add_metric((model, outcome), count)
        return (compared,)
