"""Calls of a workload: who asks what, when, known to the last block key.

A call has no tokens. What routing and caching need of them is which blocks are equal, and that
traces tell by ids and synthetic workloads by how they are made; hashing 30,000 tokens per call,
five hundred times per table, would take longer than everything else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.types import BlockKey

MODEL = "m"
NAMESPACE = Namespace(model=MODEL)


class KeyedPrompt(Prompt):
    """A prompt whose keys were worked out beforehand, in one block size."""

    __slots__ = ()

    def __init__(self, tokens: int, keys: Sequence[BlockKey], block_size: int) -> None:
        super().__init__(NAMESPACE, ())
        self.tokens = tokens
        self._creditable_tokens = tokens
        self._keys[block_size] = keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of a workload."""

    at_s: float
    """When it is sent; with `after`, how long after that one's end."""
    prompt: Prompt
    keys: Sequence[BlockKey]
    """Of the full blocks of prompt and answer."""
    output_tokens: int
    session: str | None = None
    after: int | None = None
    """Number of the call whose answer it waits for."""


def sized_keys(keys: Sequence[BlockKey], tokens: int, block_size: int) -> Sequence[BlockKey]:
    """Those of the first `tokens` tokens."""
    return keys[: tokens // block_size]
