"""Answers lookups from Redis: the balancer's side. One round trip; two when ranks have changed.

What is known of a model's ranks is kept between lookups. The script compares it with what Redis
has and answers with the present table instead of a match if it is outdated.
"""

from typing import Final

from indexer.core.index import IndexUnavailableError, PrefixMatch, Prompt
from indexer.core.types import RankId
from indexer.redis_index.connection import RedisConnection, load_script
from indexer.redis_index.keys import model_keys
from indexer.redis_index.layout import Layout, build_layout

_MOST_TRIES = 4
_MOST_MODELS = 256
"""Layouts kept. Models asked for come from requests: unknown ones must not pile up."""
_UNKNOWN: Final = b"unknown"


class RedisIndexReader:
    """The read side of a `BlockIndex`: `match`. The deadline is the caller's."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
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
                return layout.matches(answer)
            layout = build_layout(keys, answer[0], answer[1])
            self._keep(model, layout)
        raise IndexUnavailableError("ranks changed faster than they could be looked up")

    def _keep(self, model: str, layout: Layout) -> None:
        self._layouts.pop(model, None)
        if layout.nothing_held:
            self._layouts[model] = layout
        while len(self._layouts) > _MOST_MODELS:
            del self._layouts[next(iter(self._layouts))]
