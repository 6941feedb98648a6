"""What a request answers: a function of its prompt's tokens, the same on every engine.

The text is lower-case words, one byte per token. It ends by itself after 64 to 255 tokens unless
the request forbids it; it never depends on caches, load, time or the path the prompt took.
Cost: O(1) per token, one hash of the prompt per request.
"""

import hashlib
from array import array
from collections.abc import Sequence

from simulator.core.tokenizer import END_OF_TEXT_ID

_TEXT = (
    "the cache holds every block that was ever filled until another prompt needs its place so a "
    "warm prefix makes the first token come early while a cold one waits in the queue and reads "
    "slowly through all of its text then words follow one by one as river stone light garden "
    "winter summer engine router signal harbor meadow candle marble window letter morning evening"
)
_WORDS = tuple(_TEXT.encode().split())
_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
_MASK = (1 << 64) - 1
_SHORTEST_TOKENS = 64
_LENGTHS = 192


class WordStream:
    """An endless text chosen by a seed."""

    def __init__(self, seed: int) -> None:
        self._state = seed
        self._end = _SHORTEST_TOKENS + (seed >> 8) % _LENGTHS
        self._text = bytearray()

    def token_at(self, index: int, *, may_end: bool) -> int:
        if may_end and index >= self._end:
            return END_OF_TEXT_ID
        while index >= len(self._text):
            self._state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
            self._text += _WORDS[(self._state >> 33) % len(_WORDS)] + b" "
        return self._text[index]


class FixedTokens:
    """Tokens somebody wrote down, e.g. those of a recorded answer."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def token_at(self, index: int, *, may_end: bool) -> int:
        """Return the recorded token, and the end of text where the record ends."""
        if index < len(self._token_ids):
            return self._token_ids[index]
        return END_OF_TEXT_ID if may_end else ord(" ")


def seed_answer(prompt_token_ids: Sequence[int], choice: int = 0) -> WordStream:
    """Return the answer to a prompt; `choice` tells the `n` answers of one request apart."""
    digest = hashlib.blake2b(array("I", prompt_token_ids).tobytes(), digest_size=8)
    digest.update(choice.to_bytes(4, "big"))
    return WordStream(int.from_bytes(digest.digest(), "big"))
