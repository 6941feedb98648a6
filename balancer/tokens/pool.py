"""Local tokenizers behind a few threads, with a bounded queue and the cache of known tokens.

A prompt that misses its deadline is still finished and remembered, so its repeat is free. A
tokenizer that can't be loaded is remembered as such: it costs one attempt, not one per request.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

import structlog

from balancer.core.prompt.shape import ChatShape, TextShape, Unscorable, UnscorableError
from balancer.core.prompt.token_cache import TokenCache, Tokens
from balancer.tokens.local import LocalTokenizer, TokenizerLoadError, load_tokenizer

QUEUED_PER_WORKER = 4
"""Prompts that may wait for a thread; more would only wait for their deadline."""

logger = structlog.stdlib.get_logger(__name__)


class TokenPool:
    """Owner of the threads and tokenizers; `close` ends them."""

    def __init__(
        self,
        directories: Mapping[str, str],
        *,
        workers: int,
        cache_bytes: int,
        strftime_now: Callable[[str], str],
    ) -> None:
        """`directories` maps base models to their tokenizer's directory."""
        self._directories = directories
        self._strftime_now = strftime_now
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        self._queue_limit = workers * (1 + QUEUED_PER_WORKER)
        self._tokenizers: dict[str, Future[LocalTokenizer]] = {}
        # The lock guards what threads and the loop share: the cache and the count.
        self._lock = Lock()
        self._cache = TokenCache(limit_bytes=cache_bytes)
        self._queued = 0

    async def load(self) -> None:
        """Load every tokenizer now, in the threads. Failures are logged and remembered."""
        for model in self._directories:
            with suppress(TokenizerLoadError):  # logged where it happened
                await asyncio.wrap_future(self._tokenizer(model))

    def close(self) -> None:
        """Drop what waits; a prompt that is being tokenised ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def recall(self, key: bytes) -> Tokens | None:
        with self._lock:
            return self._cache.get(key)

    def remember(self, key: bytes, tokens: Tokens) -> None:
        with self._lock:
            self._cache.put(key, tokens)

    async def encode(self, model: str, shape: TextShape | ChatShape, key: bytes) -> Tokens:
        """Tokenise in a thread and remember it under `key`. Raises UnscorableError."""
        if model not in self._directories:
            raise UnscorableError(Unscorable.NO_TOKENIZER)
        loading = self._tokenizer(model)
        try:
            # Shielded: a request that runs out of time must not cancel the load for all.
            tokenizer = await asyncio.shield(asyncio.wrap_future(loading))
        except TokenizerLoadError as error:
            raise UnscorableError(Unscorable.TOKENIZER_FAILED) from error
        return await asyncio.wrap_future(self._submit(tokenizer, shape, key))

    def _tokenizer(self, model: str) -> "Future[LocalTokenizer]":
        loading = self._tokenizers.get(model)
        if loading is None:
            loading = self._pool.submit(self._load, model)
            self._tokenizers[model] = loading
        return loading

    def _load(self, model: str) -> LocalTokenizer:
        try:
            return load_tokenizer(Path(self._directories[model]), self._strftime_now)
        except TokenizerLoadError as error:
            logger.error("tokenizer_load_failed", model=model, error=str(error))  # noqa: TRY400
            raise

    def _submit(
        self, tokenizer: LocalTokenizer, shape: TextShape | ChatShape, key: bytes
    ) -> "Future[Tokens]":
        with self._lock:
            if self._queued >= self._queue_limit:
                raise UnscorableError(Unscorable.BUSY)
            self._queued += 1
        job = self._pool.submit(self._encode, tokenizer, shape, key)
        job.add_done_callback(self._leave_queue)
        return job

    def _encode(
        self, tokenizer: LocalTokenizer, shape: TextShape | ChatShape, key: bytes
    ) -> Tokens:
        tokens = tokenizer.encode(shape)
        self.remember(key, tokens)
        return tokens

    def _leave_queue(self, _: "Future[Tokens]") -> None:
        with self._lock:
            self._queued -= 1
