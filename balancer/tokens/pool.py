"""Local tokenizers behind a few threads, with bounded queues and the memory of what was read.

Rules:

1. Rendering and looking up is quick at any length, reading what is new isn't. So a text with more than
   `LONG_CHARS` to read waits for a thread of its own: short prompts never wait for long ones.
2. A prompt that misses its deadline is still finished and remembered, so its repeat is quick. One that
   has to wait behind too many others is not even begun.
3. A tokenizer that can't be loaded is remembered as such: it costs one attempt, not one per request.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, TypeVar

import structlog

from balancer.core.prompt.shape import ChatShape, TextShape, Unscorable, UnscorableError
from balancer.core.prompt.token_cache import TokenCache, Tokens
from balancer.core.settings.control import EngineFlags
from balancer.tokens.directory import TokenizerLoadError, load_tokenizer
from balancer.tokens.local import LocalTokenizer
from balancer.tokens.text import Reading

QUEUED_PER_WORKER: Final = 4
"""Prompts that may wait for a thread; more would only wait for their deadline."""
LONG_CHARS: Final = 200_000
"""About a tenth of a second of tokenising."""

Result = TypeVar("Result")

logger = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Tokens of a prompt, and if all of them had been read before."""

    tokens: Tokens
    was_known: bool


class _Lane:
    """Threads with a bounded queue."""

    def __init__(self, workers: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._limit = workers * (1 + QUEUED_PER_WORKER)
        self._lock = Lock()
        self._queued = 0

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        """Raises UnscorableError if too much waits already, or nothing is taken any more."""
        with self._lock:
            if self._queued >= self._limit:
                raise UnscorableError(Unscorable.BUSY)
            try:
                job = self._pool.submit(work)
            except RuntimeError as error:  # closed
                raise UnscorableError(Unscorable.BUSY) from error
            self._queued += 1
        job.add_done_callback(self._leave)
        return job

    def close(self) -> None:
        """Drop what waits; what is under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _leave(self, _: object) -> None:
        with self._lock:
            self._queued -= 1


class TokenPool:
    """Owner of the threads and tokenizers; `close` ends them."""

    def __init__(
        self,
        directories: Mapping[str, str],
        *,
        workers: int,
        cache_bytes: int,
        strftime_now: Callable[[str], str],
        flags: Mapping[str, EngineFlags] | None = None,
    ) -> None:
        """`directories` maps base models to their tokenizer's directory."""
        self._directories = directories
        self._flags = flags or {}
        self._strftime_now = strftime_now
        self._short = _Lane(workers, "tokenize")
        self._long = _Lane(1, "tokenize-long")
        self._tokenizers: dict[str, Future[LocalTokenizer]] = {}
        self._lock = Lock()
        self._cache = TokenCache(limit_bytes=cache_bytes)

    @property
    def models(self) -> Sequence[str]:
        """Base models with a tokenizer of their own."""
        return tuple(self._directories)

    async def load(self) -> None:
        """Load every tokenizer now, in the threads. Failures are logged and remembered."""
        for model in self._directories:
            with suppress(TokenizerLoadError):  # logged where it happened
                await asyncio.wrap_future(self._tokenizer(model))

    def close(self) -> None:
        """Drop what waits; a prompt that is being tokenised ends by itself."""
        self._short.close()
        self._long.close()

    def recall(self, key: bytes) -> Tokens | None:
        with self._lock:
            return self._cache.get(key)

    def remember(self, key: bytes, tokens: Tokens) -> None:
        with self._lock:
            self._cache.put(key, tokens)

    def forget(self) -> None:
        """Everything: some of it was wrong."""
        with self._lock:
            self._cache.clear()

    async def encode(self, model: str, shape: TextShape | ChatShape) -> Encoded:
        """Render and tokenise in a thread. Raises UnscorableError."""
        tokenizer = await self._loaded(model)
        begun = await asyncio.wrap_future(self._short.submit(lambda: self._begin(tokenizer, shape)))
        return begun if isinstance(begun, Encoded) else await asyncio.wrap_future(begun)

    async def encode_anew(self, model: str, shape: TextShape | ChatShape) -> Tokens:
        """Without anything that is remembered. Raises UnscorableError."""
        tokenizer = await self._loaded(model)
        return await asyncio.wrap_future(self._long.submit(lambda: tokenizer.encode(shape)))

    async def _loaded(self, model: str) -> LocalTokenizer:
        if model not in self._directories:
            raise UnscorableError(Unscorable.NO_TOKENIZER)
        loading = self._tokenizer(model)
        try:
            # Shielded: a request that runs out of time must not cancel the load for all.
            return await asyncio.shield(asyncio.wrap_future(loading))
        except TokenizerLoadError as error:
            raise UnscorableError(Unscorable.TOKENIZER_FAILED) from error

    def _tokenizer(self, model: str) -> "Future[LocalTokenizer]":
        loading = self._tokenizers.get(model)
        if loading is None:
            loading = self._long.submit(lambda: self._load(model))
            self._tokenizers[model] = loading
        return loading

    def _load(self, model: str) -> LocalTokenizer:
        directory, flags = Path(self._directories[model]), self._flags.get(model)
        try:
            return load_tokenizer(directory, self._strftime_now, flags)
        except TokenizerLoadError as error:
            logger.error("tokenizer_load_failed", model=model, error=str(error))  # noqa: TRY400
            raise

    def _begin(
        self, tokenizer: LocalTokenizer, shape: TextShape | ChatShape
    ) -> "Encoded | Future[Encoded]":
        reading = tokenizer.look_up(shape, self)
        if reading.unread_chars > LONG_CHARS:
            return self._long.submit(lambda: self._finish(tokenizer, shape, reading))
        return self._finish(tokenizer, shape, reading)

    def _finish(
        self, tokenizer: LocalTokenizer, shape: TextShape | ChatShape, reading: Reading
    ) -> Encoded:
        was_known = not reading.unread_chars
        return Encoded(tokens=tokenizer.read(shape, reading, self), was_known=was_known)
