"""From a request to the tokens its engine will see, within a deadline, or a reason why not.

Ids are used as they are. Text and chat go to the model's own tokenizer in threads, or to an
engine's `/tokenize`; either way they are remembered, so that a repeated prompt is free. Whatever
goes wrong here costs cache knowledge, never a request.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from balancer.core.control_errors import EngineCallError, TokenizeRefusedError
from balancer.core.fleet.snapshot import Fleet
from balancer.core.prompt.limits import PromptLimits, find_model_tokens
from balancer.core.prompt.media_prefix import guess_rest_tokens
from balancer.core.prompt.shape import (
    ChatShape,
    IdsShape,
    TextShape,
    Unscorable,
    UnscorableError,
    check_text_length,
    shape_digest,
    shape_prompt,
    tokenize_bodies,
    truncate_ids,
)
from balancer.core.prompt.token_cache import Tokens
from balancer.core.reliability.breaker import Breaker
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.settings.control import TokensSettings
from balancer.tokens.pool import TokenPool
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.types import InstanceId

MAX_ENGINE_PROMPTS = 4
"""A list of more texts than this is not worth as many calls to an engine."""

ENGINE_MAY_KNOW = frozenset(
    {Unscorable.NO_TOKENIZER, Unscorable.TOKENIZER_FAILED, Unscorable.UNSUPPORTED_FIELD}
)
"""What the local tokenizer can't do and an engine perhaps can."""


class EngineTokenizer(Protocol):
    """Asks one instance for the ids of a prompt."""

    async def tokenize(self, instance: InstanceId, body: Mapping[str, Any]) -> Sequence[int]:
        """Raises TokenizeRefusedError if the prompt is at fault, else EngineCallError."""
        ...


class PromptReader:
    """Finds the tokens of a request, from whichever source knows them."""

    def __init__(
        self,
        *,
        settings: TokensSettings,
        pool: TokenPool,
        engine: EngineTokenizer | None,
        clock: Callable[[], float],
    ) -> None:
        """`engine` None: engines are never asked. `clock` is monotonic."""
        self._deadline_s = settings.deadline_s
        self._limits = PromptLimits(
            max_prompts=settings.max_prompts, max_tokens=settings.max_prompt_tokens
        )
        self._pool = pool
        self._engine = (
            EngineTokens(settings, engine, clock) if engine and settings.engine_fallback else None
        )

    async def read(self, fleet: Fleet, request: GenerateRequest) -> PromptView:
        """Find the request's tokens. Never raises for what the request or an engine does."""
        try:
            self._limits.check_count(request)
            shape = shape_prompt(request)
            if isinstance(shape, IdsShape):
                ids = [truncate_ids(each, shape.truncation) for each in shape.prompts]
                return PromptView(prompts=self._pack(fleet, request, ids), source="ids")
            if isinstance(shape, ChatShape) and shape.has_media:
                return await self._read_before_media(fleet, request, shape)
            tokens, source = await self._tokenize(fleet, request, shape)
            return PromptView(prompts=self._pack(fleet, request, tokens), source=source)
        except UnscorableError as error:
            return PromptView(unscorable=error.reason.value)

    async def _read_before_media(
        self, fleet: Fleet, request: GenerateRequest, shape: ChatShape
    ) -> PromptView:
        """Only the text before the first medium can be matched. Engines aren't asked: they fetch."""
        ends_s = asyncio.get_running_loop().time() + self._deadline_s
        try:
            ((known,), source) = await self._tokenize_here(request, shape, ends_s)
        except UnscorableError as error:
            reason = error.reason
            has_failed = reason in ENGINE_MAY_KNOW or reason is Unscorable.REFUSED
            raise UnscorableError(Unscorable.MULTIMODAL if has_failed else reason) from error
        ids = array("I", known)
        ids.extend([0] * guess_rest_tokens(shape))
        self._limits.check_lengths([len(ids)], find_model_tokens(fleet, request.model))
        prompts = _prompts(request, [ids], creditable_tokens=len(known))
        return PromptView(prompts=prompts, source=source)

    def _pack(
        self, fleet: Fleet, request: GenerateRequest, ids: Sequence[Sequence[int]]
    ) -> tuple[Prompt, ...]:
        self._limits.check_lengths(map(len, ids), find_model_tokens(fleet, request.model))
        return _prompts(request, ids)

    async def _tokenize(
        self, fleet: Fleet, request: GenerateRequest, shape: TextShape | ChatShape
    ) -> tuple[Tokens, str]:
        ends_s = asyncio.get_running_loop().time() + self._deadline_s
        try:
            return await self._tokenize_here(request, shape, ends_s)
        except UnscorableError as error:
            if error.reason not in ENGINE_MAY_KNOW or self._engine is None:
                raise
        tokens = await self._engine.encode(fleet, request, shape, ends_s)
        self._pool.remember(shape_digest(shape, request.model), tokens)
        return tokens, "engine"

    async def _tokenize_here(
        self, request: GenerateRequest, shape: TextShape | ChatShape, ends_s: float
    ) -> tuple[Tokens, str]:
        key = shape_digest(shape, request.model)
        remembered = self._pool.recall(key)
        if remembered is not None:
            return remembered, "cache"
        try:
            async with asyncio.timeout_at(ends_s):
                return await self._pool.encode(request.base_model, shape, key), "local"
        except TimeoutError as error:
            raise UnscorableError(Unscorable.TIMEOUT) from error


def _prompts(
    request: GenerateRequest,
    ids: Sequence[Sequence[int]],
    creditable_tokens: int | None = None,
) -> tuple[Prompt, ...]:
    namespace = Namespace(
        model=request.base_model, lora=request.lora, cache_salt=request.cache_salt
    )
    try:
        return tuple(Prompt(namespace, each, creditable_tokens=creditable_tokens) for each in ids)
    except (OverflowError, TypeError) as error:
        raise UnscorableError(Unscorable.BAD_TOKENS) from error


class EngineTokens:
    """Tokens from the engines' `/tokenize`: bounded, with a breaker per instance.

    An instance that fails is followed by the next one at once, one that is silent for half of the
    time that is left gets company: an engine may die without a word.
    """

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
        bodies = tokenize_bodies(shape, request.model)
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
