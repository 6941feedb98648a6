"""Tokens from engines: bounded, within a deadline, with a breaker per instance.

Rules:

1. An engine that renders (`core.prompt.rendered`) is asked to: that answer is what it would compute,
   whatever fields the request has. One that doesn't is left alone for `ABSENT_S`, by path.
2. The others have `/tokenize`, which lacks some fields; what it can't be asked stays unscorable.
3. An instance that fails is followed by the next one at once, one that is silent for half of the time
   that is left gets company: an engine may die without a word.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from balancer.core.control_errors import (
    EngineCallError,
    RenderAbsentError,
    TokenizeRefusedError,
)
from balancer.core.fleet.snapshot import Fleet
from balancer.core.prompt.rendered import Rendered, RenderQuestion, render_question
from balancer.core.prompt.shape import (
    ChatShape,
    TextShape,
    Truncation,
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

MAX_ENGINE_PROMPTS: Final = 4
"""A list of more texts than this is not worth as many calls to an engine's `/tokenize`."""
ABSENT_S: Final = 300.0
"""Until an engine that didn't render is asked again: it may have been started anew."""
ENGINE_MAY_KNOW: Final = frozenset(
    {
        Unscorable.NO_TOKENIZER,
        Unscorable.TOKENIZER_FAILED,
        Unscorable.UNSUPPORTED_FIELD,
        Unscorable.PARITY,
    }
)
"""What the local tokenizer can't do and an engine perhaps can."""


class EngineTokenizer(Protocol):
    """Asks one instance for the ids of a prompt."""

    async def tokenize(self, instance: InstanceId, body: Mapping[str, Any]) -> Sequence[int]:
        """Raises TokenizeRefusedError if the prompt is at fault, else EngineCallError."""
        ...

    async def render(self, instance: InstanceId, question: RenderQuestion) -> Sequence[Rendered]:
        """The same, of all prompts of a request; or RenderAbsentError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What is asked of one instance after the other."""

    render: RenderQuestion | None
    bodies: Sequence[Mapping[str, Any]]
    """For `/tokenize`, one per prompt; none if it can't be asked."""
    truncation: Truncation | None
    otherwise: Unscorable
    """If nobody can tell."""


class EngineTokens:
    """One per process."""

    def __init__(
        self, settings: TokensSettings, engine: EngineTokenizer, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._breakers: dict[InstanceId, Breaker] = {}
        self._absent: dict[tuple[InstanceId, str], float] = {}
        """Until when an instance isn't asked to render on a path."""
        self._calls = 0
        self._turn = 0

    def may_know(self, fleet: Fleet, request: GenerateRequest, reason: Unscorable) -> bool:
        """Whether it is worth asking for what isn't known here for this reason."""
        if reason in ENGINE_MAY_KNOW:
            return True
        render = render_question(request)
        if reason is not Unscorable.TRUNCATED or render is None:
            return False
        return any(self._may_render(each.id, render.path) for each in fleet.serving(request.model))

    async def encode(
        self, fleet: Fleet, request: GenerateRequest, shape: TextShape | ChatShape, ends_s: float
    ) -> Tokens:
        """Ask until the loop's time is `ends_s`. Raises UnscorableError."""
        question = self._question(request, shape)
        if self._calls >= self._settings.engine_concurrency:
            raise UnscorableError(Unscorable.BUSY)
        self._calls += 1
        try:
            answer = await self._race(self._willing(fleet, request.model), question, ends_s)
        finally:
            self._calls -= 1
        if isinstance(answer, Unscorable):
            raise UnscorableError(answer)
        return answer

    def _question(self, request: GenerateRequest, shape: TextShape | ChatShape) -> _Question:
        flags = self._settings.engine_flags.get(request.base_model, EngineFlags())
        otherwise = Unscorable.NO_TOKENIZER
        bodies: Sequence[Mapping[str, Any]] = ()
        try:
            bodies = tokenize_bodies(shape, request.model, flags)
        except UnscorableError as error:
            otherwise = error.reason
        return _Question(
            render=render_question(request),
            bodies=bodies if len(bodies) <= MAX_ENGINE_PROMPTS else (),
            truncation=shape.truncation,
            otherwise=otherwise,
        )

    async def _race(
        self,
        instances: Iterator[InstanceId],
        question: _Question,
        ends_s: float,
    ) -> Tokens | Unscorable:
        """The first answer that settles the matter. At most two instances are asked at a time."""
        asked: dict[asyncio.Task[Tokens | Unscorable | None], InstanceId] = {}
        is_alone = True
        async with asyncio.TaskGroup() as group:
            while True:
                instance = next(instances, None)
                if instance is not None:
                    task = group.create_task(self._ask(instance, question, ends_s))
                    asked[task] = instance
                if not asked:
                    return question.otherwise
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
        self, instance: InstanceId, question: _Question, ends_s: float
    ) -> Tokens | Unscorable | None:
        """Tokens, or why there can't be any, or None if another instance should be asked."""
        breaker = self._breaker(instance)
        answer: Tokens | Unscorable | None
        try:
            async with asyncio.timeout_at(ends_s):
                answer = await self._tokens_of(instance, question)
        except TokenizeRefusedError:
            answer = Unscorable.REFUSED
        except UnscorableError as error:
            answer = error.reason
        except TimeoutError:
            breaker.failed(self._clock())
            return Unscorable.TIMEOUT
        except (EngineCallError, OverflowError):
            breaker.failed(self._clock())
            return None
        breaker.succeeded()
        return answer

    async def _tokens_of(self, instance: InstanceId, question: _Question) -> Tokens | None:
        render = question.render
        if render is not None and self._may_render(instance, render.path):
            try:
                rendered = await self._engine.render(instance, render)
                return tuple(array("I", each.token_ids) for each in rendered)
            except RenderAbsentError:
                self._absent[instance, render.path] = self._clock() + ABSENT_S
            except TokenizeRefusedError:
                if not question.bodies:
                    raise
        if not question.bodies:
            return None
        ids = [await self._engine.tokenize(instance, body) for body in question.bodies]
        for each in ids:
            check_text_length(len(each), question.truncation)
        return tuple(array("I", each) for each in ids)

    def _may_render(self, instance: InstanceId, path: str) -> bool:
        return self._clock() >= self._absent.get((instance, path), 0.0)

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
            self._absent = {key: each for key, each in self._absent.items() if key[0] in known}
