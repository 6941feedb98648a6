"""From a request to the tokens its engine will see, within a deadline, or a reason why not.

Ids are used as they are. Text and chat go to the model's own tokenizer in threads, or to an
engine's render endpoint or `/tokenize`; either way they are remembered, so that a repeated prompt is free, and of a
conversation's next turn only what is new is read. Local tokens are compared with the engine's by
sample (`balancer/tokens/parity.py`); a model that failed that is the engine's alone. Whatever goes
wrong here costs cache knowledge, never a request.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence

from balancer.core.fleet.snapshot import Fleet
from balancer.core.prompt.any_shape import shape_prompt
from balancer.core.prompt.known_ids import IdTexts
from balancer.core.prompt.limits import PromptLimits, find_model_tokens
from balancer.core.prompt.media_prefix import MIN_CREDITABLE_TOKENS, guess_rest_tokens
from balancer.core.prompt.rendered import answer_shape
from balancer.core.prompt.shape import (
    ChatShape,
    IdsShape,
    TextShape,
    Unscorable,
    UnscorableError,
    shape_digest,
    truncate_ids,
)
from balancer.core.prompt.token_cache import Tokens
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.settings.control import TokensSettings
from balancer.tokens.engine_tokens import ENGINE_MAY_KNOW, EngineTokenizer, EngineTokens
from balancer.tokens.media import MediaWatch
from balancer.tokens.parity import ParityWatch
from balancer.tokens.pool import TokenPool
from indexer.core.hashing import MediumPlace, Namespace
from indexer.core.index import Prompt

HAS_NO_OPENING = frozenset(
    {
        Unscorable.BAD_TOKENS,
        Unscorable.BAD_PROMPT,
        Unscorable.PROMPT_EMBEDS,
        Unscorable.TOO_MANY_PROMPTS,
    }
)
"""Where a request can't even be told from others by how it begins (`core.routing.sessions`)."""


class PromptReader:
    """Finds the tokens of a request, from whichever source knows them."""

    def __init__(
        self,
        *,
        settings: TokensSettings,
        pool: TokenPool,
        engine: EngineTokenizer | None,
        clock: Callable[[], float],
        parity: ParityWatch | None = None,
        media: MediaWatch | None = None,
    ) -> None:
        """`clock` is monotonic.

        `engine` None: engines are never asked. `parity` None: nor compared with. `media` None: nor
        learned from.
        """
        self._deadline_s = settings.deadline_s
        self._limits = PromptLimits(
            max_prompts=settings.max_prompts, max_tokens=settings.max_prompt_tokens
        )
        self.texts = IdTexts(limit_bytes=settings.cache_bytes)
        """Prompts of token ids that were read."""
        self._pool = pool
        self._parity = parity
        self._media = media if settings.engine_fallback else None
        self._engine = (
            EngineTokens(settings, engine, clock) if engine and settings.engine_fallback else None
        )

    async def read(self, fleet: Fleet, request: GenerateRequest) -> PromptView:
        """Find the request's tokens. Never raises for what the request or an engine does."""
        try:
            self._limits.check_count(request)
            shape = shape_prompt(request)
            if isinstance(shape, IdsShape):
                return PromptView(prompts=self._read_ids(fleet, request, shape), source="ids")
            if isinstance(shape, ChatShape) and shape.has_media:
                return await self._read_before_media(fleet, request, shape)
            tokens, source = await self._tokenize(fleet, request, shape)
            return PromptView(prompts=self._pack(fleet, request, tokens), source=source)
        except UnscorableError as error:
            source = "none" if error.reason in HAS_NO_OPENING else "opening"
            return PromptView(source=source, unscorable=error.reason.value)

    async def _read_before_media(
        self, fleet: Fleet, request: GenerateRequest, shape: ChatShape
    ) -> PromptView:
        """Media that are known are part of it; else only the text before the first can be matched.

        Engines aren't asked now: they fetch.
        """
        ends_s = asyncio.get_running_loop().time() + self._deadline_s
        try:
            ((known, *whole), _) = await self._tokenize_here(request, shape, ends_s)
        except UnscorableError as error:
            reason = error.reason
            has_failed = reason in ENGINE_MAY_KNOW or reason is Unscorable.REFUSED
            raise UnscorableError(Unscorable.MULTIMODAL if has_failed else reason) from error
        if whole and self._media is not None:
            placed = self._media.place(fleet, request, whole[0])
            if placed is not None:
                ids, places = placed
                self._limits.check_lengths([len(ids)], find_model_tokens(fleet, request.model))
                prompts = _prompts(request, [ids], media=places)
                return PromptView(prompts=prompts, source="with_media")
        if len(known) < MIN_CREDITABLE_TOKENS:
            raise UnscorableError(Unscorable.MULTIMODAL)
        ids = array("I", known)
        ids.extend([0] * guess_rest_tokens(shape))
        self._limits.check_lengths([len(ids)], find_model_tokens(fleet, request.model))
        prompts = _prompts(request, [ids], creditable_tokens=len(known))
        return PromptView(prompts=prompts, source="before_media")

    def _read_ids(
        self, fleet: Fleet, request: GenerateRequest, shape: IdsShape
    ) -> tuple[Prompt, ...]:
        ids: Sequence[Sequence[int]] = shape.prompts
        if shape.truncation is not None:
            ids = [truncate_ids(each, shape.truncation) for each in ids]
        elif request.ids is not None:
            self._limits.check_lengths([len(ids[0])], find_model_tokens(fleet, request.model))
            known = request.ids.prompt(request.base_model, request.lora, request.cache_salt)
            return (known,)
        return self._pack(fleet, request, ids)

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
            tokens, source = await self._tokenize_here(request, shape, ends_s)
        except UnscorableError as error:
            if self._engine is None or not self._engine.may_know(fleet, request, error.reason):
                raise
        else:
            if self._parity is not None:
                self._parity.offer(fleet, request, shape, tokens)
            return tokens, source
        key = shape_digest(shape, request.model, answer_shape(request))
        known = self._pool.recall(key)
        if known is not None:
            return known, "cache"
        tokens = await self._engine.encode(fleet, request, shape, ends_s)
        self._pool.remember(key, tokens)
        return tokens, "engine"

    async def _tokenize_here(
        self, request: GenerateRequest, shape: TextShape | ChatShape, ends_s: float
    ) -> tuple[Tokens, str]:
        if self._parity is not None and self._parity.book.is_distrusted(request.base_model):
            raise UnscorableError(Unscorable.PARITY)
        try:
            async with asyncio.timeout_at(ends_s):
                encoded = await self._pool.encode(request.base_model, shape)
        except TimeoutError as error:
            raise UnscorableError(Unscorable.TIMEOUT) from error
        return encoded.tokens, "cache" if encoded.was_known else "local"


def _prompts(
    request: GenerateRequest,
    ids: Sequence[Sequence[int]],
    creditable_tokens: int | None = None,
    media: Sequence[MediumPlace] = (),
) -> tuple[Prompt, ...]:
    namespace = Namespace(
        model=request.base_model, lora=request.lora, cache_salt=request.cache_salt
    )
    try:
        return tuple(
            [
                Prompt(namespace, each, creditable_tokens=creditable_tokens, media=media)
                for each in ids
            ]
        )
    except (OverflowError, TypeError) as error:
        raise UnscorableError(Unscorable.BAD_TOKENS) from error
