"""A storage that several engines use: ExampleConnector's directory and LMCache.

Rules:

1. example: one entry per prompt, named by its tokens alone, in full blocks. Written as far as the
   prompt goes, looked for as far as all but its last token go: a prompt of one token more than full
   blocks is not found under its own name. If another prompt left an entry under that name the
   engine dies of it. Whose adapter or salt an entry was computed for isn't part of its name.
2. lmcache: an entry per chunk of 256 tokens, named by everything before it, adapter and salt too; a
   prompt finds its longest beginning.
3. Nothing is ever deleted.
4. Nothing is found before the step that computes it has ended.
"""

import math
from dataclasses import dataclass

from simulator.core.errors import EngineDiedError
from simulator.core.types import RemotePrefill, TokenArray

_CHUNK_TOKENS = 256

Extra = tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """An ExampleConnector's prompt."""

    extra: Extra
    computed_s: float


class SharedStorage:
    """One directory, or one cache server."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, _Entry] = {}
        self._chunks: dict[tuple[Extra, bytes], float] = {}
        """With the time at which each was first computed."""

    def write_prompt(
        self, tokens: TokenArray, block_size: int, extra: Extra, computed_s: float
    ) -> None:
        """ExampleConnector: a prompt will have been computed then."""
        end = _align(len(tokens), block_size)
        if not end:
            return
        name = tokens[:end].tobytes()
        before = self._prompts.get(name)
        if before is None or before.extra != extra:
            self._prompts[name] = _Entry(extra=extra, computed_s=computed_s)

    def find_prompt(
        self, tokens: TokenArray, block_size: int, extra: Extra, now_s: float
    ) -> RemotePrefill | None:
        """ExampleConnector: the prompt's own entry. Raises EngineDiedError."""
        end = _align(len(tokens) - 1, block_size)
        name = tokens[:end].tobytes()
        entry = self._prompts.get(name) if end else None
        if entry is None or entry.computed_s > now_s:
            return None
        if end != _align(len(tokens), block_size):
            raise EngineDiedError("FileNotFoundError: the prompt's entry has another name")
        return _found(end, is_foreign=entry.extra != extra)

    def write_chunks(self, tokens: TokenArray, extra: Extra, computed_s: float) -> None:
        """LMCache: a prompt will have been computed then."""
        for end in range(_CHUNK_TOKENS, len(tokens) + 1, _CHUNK_TOKENS):
            self._chunks.setdefault((extra, tokens[:end].tobytes()), computed_s)

    def find_chunks(self, tokens: TokenArray, extra: Extra, now_s: float) -> RemotePrefill | None:
        """LMCache: the prompt's longest known beginning."""
        found = 0
        for end in range(_CHUNK_TOKENS, len(tokens), _CHUNK_TOKENS):
            if self._chunks.get((extra, tokens[:end].tobytes()), math.inf) > now_s:
                break
            found = end
        return _found(found, is_foreign=False) if found else None


def _align(tokens: int, block_size: int) -> int:
    """Full blocks, at least one token short of the end."""
    return (tokens - 1) // block_size * block_size


def _found(tokens: int, *, is_foreign: bool) -> RemotePrefill:
    return RemotePrefill(
        engine_id="storage",
        request_id=None,
        block_ids=(),
        prefill_cached_tokens=None,
        num_tokens=tokens,
        is_shared=True,
        is_foreign=is_foreign,
    )
