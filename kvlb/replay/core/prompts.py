"""Writes the bodies of requests; of a trace of block ids the prompts, too.

Rules:

1. A block id is a fixed pseudo-random list of tokens (or text of so many characters): the same in every
   run with the same seed. So prompts share exactly the blocks that the trace says they share, at any
   engine block size that divides the trace's.
2. A prompt is its blocks, cut to the trace's length. Where that is longer than its blocks (some rows
   of public traces), the prompt ends with the blocks.
3. Bodies ask for streams with usage; answers are exactly as long as the trace says unless
   `exact_output` is off.

Cost: a body is joined from blocks that are already JSON; of these the last `CACHED_BLOCKS` are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_128
from struct import unpack
from typing import Any, Final

import msgspec

from kvlb.replay.core.trace_rows import (
    ChatPrompt,
    TextPrompt,
    TracePrompt,
    TraceRequest,
)

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
FIRST_TOKEN: Final = 1000
"""Below are the special tokens and bytes of most vocabularies."""
CACHED_BLOCKS: Final = 16_384
_LETTERS: Final = b"etaoinshrdlucmfwypvbgkjqxz      "
_AS_TEXT: Final = bytes(_LETTERS[byte % len(_LETTERS)] for byte in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShape:
    """How block ids become prompts, and what else a request asks for."""

    model: str = ""
    block_tokens: int = 512
    seed: int = 0
    vocabulary: int = 32_000
    """Token ids stay below."""
    chars_per_token: float | None = None
    """None: prompts of token ids; else text, so many characters for a token."""
    exact_output: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRequest:
    """Path and body, ready to be sent."""

    path: str
    body: bytes


def block_tokens(block: int, *, tokens: int, seed: int, vocabulary: int) -> list[int]:
    """The tokens of a block id."""
    drawn = unpack(f"<{tokens}I", _draw(block, seed, 4 * tokens))
    span = vocabulary - FIRST_TOKEN
    return [FIRST_TOKEN + each % span for each in drawn]


def block_text(block: int, *, chars: int, seed: int) -> str:
    """The text of a block id: lower-case letters and spaces."""
    return _draw(block, seed, chars).translate(_AS_TEXT).decode("ascii")


def _draw(block: int, seed: int, size_bytes: int) -> bytes:
    return shake_128(f"{seed}:{block}".encode()).digest(size_bytes)


class PromptWriter:
    """Writes the requests of one trace."""

    def __init__(self, shape: PromptShape) -> None:
        self._shape = shape
        self._block = lru_cache(maxsize=CACHED_BLOCKS)(self._write_block)

    def write(self, request: TraceRequest) -> WrittenRequest:
        """Path and body of one request."""
        is_chat = isinstance(request.prompt, ChatPrompt)
        head: dict[str, Any] = {
            "model": self._shape.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._shape.exact_output:
            head |= {"ignore_eos": True}
        opened = msgspec.json.encode(head).removesuffix(b"}")
        field = b'"messages"' if is_chat else b'"prompt"'
        body = b"%b,%b:%b}" % (opened, field, self._write_prompt(request.prompt))
        return WrittenRequest(path=CHAT if is_chat else COMPLETIONS, body=body)

    def _write_prompt(self, prompt: TracePrompt) -> bytes:
        if isinstance(prompt, ChatPrompt):
            return msgspec.json.encode(prompt.messages)
        if isinstance(prompt, TextPrompt):
            return msgspec.json.encode(prompt.text)
        return self._write_blocks(prompt.hash_ids, prompt.input_tokens)

    def _write_blocks(self, hash_ids: Sequence[int], input_tokens: int) -> bytes:
        size, per_token = self._shape.block_tokens, self._shape.chars_per_token
        *whole, last = hash_ids[: -(-input_tokens // size)]
        rest_tokens = min(size, input_tokens - len(whole) * size)
        blocks = [self._block(each) for each in whole]
        if per_token is not None:
            rest = self._block(last)[: max(1, round(rest_tokens * per_token))]
            return b'"%b"' % b"".join([*blocks, rest])
        rest = b",".join(self._block(last).split(b",")[:rest_tokens])
        return b"[%b]" % b",".join([*blocks, rest])

    def _write_block(self, block: int) -> bytes:
        shape = self._shape
        if shape.chars_per_token is not None:
            chars = max(1, round(shape.block_tokens * shape.chars_per_token))
            return block_text(block, chars=chars, seed=shape.seed).encode()
        ids = block_tokens(
            block, tokens=shape.block_tokens, seed=shape.seed, vocabulary=shape.vocabulary
        )
        return b",".join(b"%d" % each for each in ids)
