"""Answers lookups from Redis: the balancer's side. One round trip; two when ranks have changed.

What is known of a model's ranks is kept between lookups. The script compares it with what Redis
has and answers with the present table instead of a match if it is outdated.

Whoever looks now and then (`look`) has ranks that no indexer keeps up answered as such, from
`heartbeat_s` times three on, at least three seconds (`core.pulse`).
"""

import time
from collections.abc import Callable
from typing import Final

from indexer.core.index import IndexUnavailableError, PrefixMatch, Prompt
from indexer.core.pulse import Pulses, lowered
from indexer.core.types import RankId
from indexer.redis_index.connection import RedisConnection, load_script
from indexer.redis_index.keys import model_keys
from indexer.redis_index.layout import Layout, build_layout
from indexer.redis_index.packing import PackedKeys

_MOST_TRIES = 16
"""A rank that joins changes the table a few times in a row, a millisecond apart; its caller has a
deadline, so this only ends what would never come to an end."""
_MOST_MODELS = 256
"""Layouts kept. Models asked for come from requests: unknown ones must not pile up."""
_MISSED_BEATS = 3
_LEAST_SILENCE_S = 3.0
_UNKNOWN: Final = b"unknown"


class RedisIndexReader:
    """The read side of a `BlockIndex`: a `WatchedLookup`. The deadline is the caller's."""

    def __init__(
        self, connection: RedisConnection, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._signs = load_script("signs", writes=False)
        self._pulses: dict[str, Pulses] = {}
        self._silent: dict[str, frozenset[RankId]] = {}
        """Ranks that nobody writes, by model."""
        self._match = load_script("match", writes=False)
        self._layouts: dict[str, Layout] = {}

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:
        """Overlap with every rank of the prompt's model.

        Raises IndexUnavailableError.
        """
        settings = self._connection.settings
        model = prompt.namespace.model
        keys = model_keys(settings.prefix, model)
        layout = self._layouts.get(model) or build_layout(keys, _UNKNOWN, ())
        for _ in range(_MOST_TRIES):
            arguments = layout.arguments(prompt, settings.max_lookup_blocks)
            answer = await self._connection.run(
                self._match, layout.keys, arguments, timeout_s=settings.read_timeout_s
            )
            if isinstance(answer, bytes):
                matches, silent = layout.matches(answer), self._silent.get(model)
                return lowered(matches, silent) if silent else matches
            layout = build_layout(keys, answer[0], answer[1])
            self._keep(model, layout)
        raise IndexUnavailableError("ranks changed faster than they could be looked up")

    async def look(self, model: str) -> None:
        layout = self._layouts.get(model)
        if layout is None:  # nobody has asked for it, or it has no ranks
            self._forget(model)
            return
        settings = self._connection.settings
        keys, ranks = model_keys(settings.prefix, model), [rank for rank, _ in layout.nothing_held]
        answer = await self._connection.run(
            self._signs,
            PackedKeys([keys.rank(rank).state for rank in ranks]),
            (),
            timeout_s=settings.read_timeout_s,
        )
        silent_after_s = max(_LEAST_SILENCE_S, _MISSED_BEATS * settings.heartbeat_s)
        pulses = self._pulses.setdefault(model, Pulses(silent_after_s))
        silent = pulses.take(dict(zip(ranks, answer, strict=True)), self._clock())
        self._silent[model] = silent

    def _forget(self, model: str) -> None:
        self._pulses.pop(model, None)
        self._silent.pop(model, None)

    def _keep(self, model: str, layout: Layout) -> None:
        self._layouts.pop(model, None)
        if layout.nothing_held:
            self._layouts[model] = layout
        while len(self._layouts) > _MOST_MODELS:
            oldest = next(iter(self._layouts))
            del self._layouts[oldest]
            self._forget(oldest)
