"""The tokens stage as a whole: its threads, its comparisons, and who reads prompts through them."""

import asyncio
from collections.abc import Callable

import structlog
from prometheus_client import CollectorRegistry

from balancer.core.record import RequestRecord
from balancer.core.settings.control import TokensSettings
from balancer.tokens.engine_tokens import EngineTokenizer
from balancer.tokens.media import MediaWatch
from balancer.tokens.parity import ParityWatch
from balancer.tokens.pool import TokenPool
from balancer.tokens.reader import PromptReader

logger = structlog.stdlib.get_logger(__name__)


class TokensStage:
    """One per process."""

    def __init__(
        self,
        settings: TokensSettings,
        engine: EngineTokenizer,
        *,
        registry: CollectorRegistry,
        clock: Callable[[], float],
        strftime_now: Callable[[str], str],
    ) -> None:
        self.is_loaded = asyncio.Event()
        """What can be loaded of tokenizers has been."""
        self._pool = TokenPool(
            settings.models,
            workers=settings.workers,
            cache_bytes=settings.cache_bytes,
            strftime_now=strftime_now,
            flags=settings.engine_flags,
        )
        parity = ParityWatch(settings=settings, pool=self._pool, engine=engine, clock=clock)
        registry.register(parity)
        self._parity = parity
        self.status = parity.status
        """By model where tokens come from, and how they compare with the engine's."""
        self._media = MediaWatch(engine, clock)
        self.reader = PromptReader(
            settings=settings,
            pool=self._pool,
            engine=engine,
            clock=clock,
            parity=parity,
            media=self._media,
        )

    async def run(self) -> None:
        """Load tokenizers, then compare. What can't be loaded costs cache knowledge only."""
        try:
            await self._pool.load()
        except Exception:
            logger.exception("tokenizer_load_failed")
        self.is_loaded.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._parity.run())
            group.create_task(self._media.run())

    def on_record(self, record: RequestRecord) -> None:
        """A request has ended; what its engine counted may speak against our tokens."""
        if not record.counted_otherwise:
            return
        if record.prompt_source in {"local", "cache"}:
            self._parity.book.doubt(record.base_model or "")
        if record.prompt_source == "with_media":
            self._media.surprised(record.base_model or "")

    def close(self) -> None:
        """End the threads; a prompt that is being tokenised ends by itself."""
        self._pool.close()
