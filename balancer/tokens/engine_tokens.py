"""Tokens from the engines' `/tokenize`: bounded, within a deadline, with a breaker per instance.

An instance that fails is followed by the next one at once, one that is silent for half of the time
that is left gets company: an engine may die without a word.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from balancer.core.control_errors import EngineCallError, TokenizeRefusedError
from balancer.core.fleet.snapshot import Fleet
from balancer.core.prompt.shape import (
    ChatShape,
    TextShape,
    Unscorable,
    UnscorableError,
    check_text_length,
)
from balancer.core.prompt.token_cache import Tokens
from balancer.core.prompt.tokenize_body import tokenize_bodies
from balancer.core.reliability.breaker import Breaker
from balancer.core.request import GenerateRequest
from balancer.core.settings.control import EngineFlags, TokensSettings
from indexer.core.types import InstanceId

MAX_ENGINE_PROMPTS = 4
"""A list of more texts than this is not worth as many calls to an engine."""


class EngineTokenizer(Protocol):
    """Asks one instance for the ids of a prompt."""

    async def tokenize(self, instance: InstanceId, body: Mapping[str, Any]) -> Sequence[int]:
        """Raises TokenizeRefusedError if the prompt is at fault, else EngineCallError."""
        ...


class EngineTokens:
    """One per process."""

    def __init__(
        self, settings: TokensSettings, engine: EngineTokenizer, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._breakers: dict[InstanceId, Breaker] = {}
        self._calls = 0
        self._turn = 0

    async def encode(
        self, fleet: Fleet, request: GenerateRequest, shape: TextShape | ChatShape, ends_s: float
    ) -> Tokens:
        """Ask until the loop's time is `ends_s`. Raises UnscorableError."""
        flags = self._settings.engine_flags.get(request.base_model, EngineFlags())
        bodies = tokenize_bodies(shape, request.model, flags)
        if len(bodies) > MAX_ENGINE_PROMPTS:
            raise UnscorableError(Unscorable.NO_TOKENIZER)
        if self._calls >= self._settings.engine_concurrency:
            raise UnscorableError(Unscorable.BUSY)
        self._calls += 1
        try:
            answer = await self._race(self._willing(fleet, request.model), bodies, ends_s)
        finally:
            self._calls -= 1
        if isinstance(answer, Unscorable):
            raise UnscorableError(answer)
        for each in answer:
            check_text_length(len(each), shape.truncation)
        return answer

    async def _race(
        self,
        instances: Iterator[InstanceId],
        bodies: Sequence[Mapping[str, Any]],
        ends_s: float,
    ) -> Tokens | Unscorable:
        """The first answer that settles the matter. At most two instances are asked at a time."""
        asked: dict[asyncio.Task[Tokens | Unscorable | None], InstanceId] = {}
        is_alone = True
        async with asyncio.TaskGroup() as group:
            while True:
                instance = next(instances, None)
                if instance is not None:
                    task = group.create_task(self._ask(instance, bodies, ends_s))
                    asked[task] = instance
                if not asked:
                    return Unscorable.NO_TOKENIZER
                patience_s = (ends_s - asyncio.get_running_loop().time()) / 2 if is_alone else None
                done, _ = await asyncio.wait(
                    asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                is_alone = bool(done)
                for task in done:
                    del asked[task]
                    answer = task.result()
                    if answer is not None:
                        self._give_up(asked)
                        return answer

    def _give_up(self, late: Mapping[asyncio.Task[Any], InstanceId]) -> None:
        for task, instance in late.items():
            task.cancel()
            self._breaker(instance).failed(self._clock())

    def _willing(self, fleet: Fleet, model: str) -> Iterator[InstanceId]:
        """Instances that may be asked, each time another one first."""
        serving = [each.id for each in fleet.serving(model) if each.is_available]
        self._turn += 1
        self._forget_strangers(fleet)
        for number in range(len(serving)):
            instance = serving[(self._turn + number) % len(serving)]
            if self._breaker(instance).allows(self._clock()):
                yield instance

    async def _ask(
        self, instance: InstanceId, bodies: Sequence[Mapping[str, Any]], ends_s: float
    ) -> Tokens | Unscorable | None:
        """Tokens, or why there can't be any, or None if another instance should be asked."""
        breaker = self._breaker(instance)
        try:
            async with asyncio.timeout_at(ends_s):
                ids = [await self._engine.tokenize(instance, body) for body in bodies]
            tokens = tuple(array("I", each) for each in ids)
        except TokenizeRefusedError:
            breaker.succeeded()
            return Unscorable.REFUSED
        except TimeoutError:
            breaker.failed(self._clock())
            return Unscorable.TIMEOUT
        except (EngineCallError, OverflowError):
            breaker.failed(self._clock())
            return None
        breaker.succeeded()
        return tokens

    def _breaker(self, instance: InstanceId) -> Breaker:
        settings = self._settings
        return self._breakers.setdefault(
            instance,
            Breaker(failures=settings.breaker_failures, cool_down_s=settings.breaker_cool_down_s),
        )

    def _forget_strangers(self, fleet: Fleet) -> None:
        if len(self._breakers) > len(fleet.instances):
            known = {each.id for each in fleet.instances}
            self._breakers = {key: each for key, each in self._breakers.items() if key in known}
