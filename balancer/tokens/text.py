"""A tokenizer that remembers: of a text whose beginning it has seen it reads the rest.

Rules:

1. Ids are those of one pass over the whole text. That cutting it changes nothing is tried out when the
   tokenizer is loaded; where it does, nothing is cut.
2. What is still to be read of a text is told first (`Reading.unread_chars`), so that long texts can be
   read where they hold up nobody.
3. What stands before and after every text (BOS, EOS) is put there once, whatever it was cut into.

Cost: of what is known a digest and a copy; of the rest tokenising, without the interpreter's lock.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tokenizers import Tokenizer
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from balancer.core.prompt.pieces import MIN_PIECE_CHARS, AddedToken, Cutter
from balancer.core.prompt.shape import Unscorable, UnscorableError
from balancer.core.prompt.token_cache import Tokens

_TRIED_BORDERS: Final = 16
_TRIED_TEXTS: Final = ("a", "Two words")


class KnownPieces(Protocol):
    """What has been read before, by digest. Thread-safe."""

    def recall(self, key: bytes, /) -> Tokens | None: ...

    def remember(self, key: bytes, tokens: Tokens, /) -> None: ...


class NothingKnown:
    """For those who read once."""

    def recall(self, _: bytes, /) -> Tokens | None:
        return None

    def remember(self, _: bytes, __: Tokens, /) -> None:
        return


@dataclass(slots=True, kw_only=True)
class Piece:
    """A stretch of one of the texts."""

    number: int
    """Of the text."""
    key: bytes
    ids: "array[int] | None"
    text: str
    """Empty if its ids are known."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """Texts that are being turned into ids."""

    texts: int
    pieces: list[Piece]
    add_special_tokens: bool

    @property
    def unread_chars(self) -> int:
        return sum(len(each.text) for each in self.pieces)


class TextTokenizer:
    """One model's tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """`name` tells its pieces from those of other tokenizers."""
        self._tokenizer = tokenizer
        self._seed = xxh3_64_intdigest(name.encode())
        self._ends = self._find_ends()
        self._cutter = self._find_cutter()

    def look_up(
        self, texts: Sequence[str], known: KnownPieces, *, add_special_tokens: bool
    ) -> Reading:
        """Find what is known of `texts`. Raises UnscorableError."""
        is_whole = add_special_tokens and self._ends is None
        pieces: list[Piece] = []
        for number, text in enumerate(texts):
            for each in [text] if is_whole else self._cutter.cut(text):
                key = self._key(each, is_whole)
                found = known.recall(key)
                ids = None if found is None else found[0]
                rest = each if found is None else ""
                pieces.append(Piece(number=number, key=key, ids=ids, text=rest))
        return Reading(texts=len(texts), pieces=pieces, add_special_tokens=add_special_tokens)

    def read(self, reading: Reading, known: KnownPieces) -> Tokens:
        """Tokenise what isn't known, and remember it. Raises UnscorableError."""
        is_whole = reading.add_special_tokens and self._ends is None
        unread = [each.text for each in reading.pieces if each.ids is None]
        fresh = iter(self._encode(unread, add_special_tokens=is_whole))
        before, after = self._ends or ((), ())
        if not reading.add_special_tokens:
            before, after = (), ()
        tokens = tuple(array("I", before) for _ in range(reading.texts))
        for each in reading.pieces:
            ids = each.ids
            if ids is None:
                ids = next(fresh)
                known.remember(each.key, (ids,))
            tokens[each.number].extend(ids)
        for ids in tokens:
            ids.extend(after)
        return tokens

    def _key(self, text: str, is_whole: bool) -> bytes:
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate
            raise UnscorableError(Unscorable.BAD_PROMPT) from error
        return xxh3_128_digest(encoded, self._seed ^ is_whole)

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list["array[int]"]:
        if not texts:
            return []
        try:
            encodings = self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=add_special_tokens
            )
        except BaseException as error:  # a panic of the native library is not an Exception
            raise UnscorableError(Unscorable.TOKENIZER_FAILED) from error
        return [array("I", encoding.ids) for encoding in encodings]

    def _find_ends(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """Ids before and after every text; None if they depend on it."""
        found = set()
        for text in _TRIED_TEXTS:
            bare = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
            full = list(self._tokenizer.encode(text).ids)
            begins = [at for at in range(len(full)) if full[at : at + len(bare)] == bare]
            if not begins:
                return None
            found.add((tuple(full[: begins[0]]), tuple(full[begins[0] + len(bare) :])))
        return found.pop() if len(found) == 1 else None

    def _find_cutter(self) -> Cutter:
        """Where its texts can be cut, if that changes nothing."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        cutter = Cutter(
            AddedToken(
                text=each.content,
                special=each.special,
                normalized=each.normalized,
                lstrip=each.lstrip,
                single_word=each.single_word,
            )
            for each in added
        )
        stretch = " Some words,\n\tand 123 more…" * (MIN_PIECE_CHARS // 20)
        borders = sorted(cutter.borders)[:_TRIED_BORDERS]
        text = stretch + "".join(f"{border}{stretch}{border} \n{stretch} " for border in borders)
        pieces = [
            self._tokenizer.encode(each, add_special_tokens=False).ids for each in cutter.cut(text)
        ]
        whole = self._tokenizer.encode(text, add_special_tokens=False).ids
        return cutter if [id_ for ids in pieces for id_ in ids] == list(whole) else Cutter(())
