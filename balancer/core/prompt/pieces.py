"""Cuts text into pieces whose tokens don't depend on each other: a conversation's next turn pays for its own.

Rules:

1. A tokenizer takes its added tokens out of a text first, the leftmost and of those the longest, and
   tokenises what is between them stretch by stretch. Text that begins with such a token therefore
   has the same ids wherever it stands.
2. Cuts are made before special tokens that are found in the text as it is, swallow no white space to
   their left and need no border of a word beside them. The others are searched for as well: a
   longer one may cover one that would be cut at.
3. Where the cuts are is decided from left to right, so a text that goes on where another one ended
   is cut alike. A piece has at least `MIN_PIECE_CHARS`, but for the last.

Cost: one search over the text, about 5 ns a character.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

MIN_PIECE_CHARS = 256
"""Below this, remembering a piece costs about as much as tokenising it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that a tokenizer looks for in the text itself, before anything else."""

    text: str
    special: bool = True
    normalized: bool = False
    """Looked for in normalised text, after the others."""
    lstrip: bool = False
    single_word: bool = False

    @property
    def can_begin_a_piece(self) -> bool:
        return self.special and not (self.normalized or self.lstrip or self.single_word)


class Cutter:
    """Knows where a tokenizer's texts can be cut."""

    def __init__(self, added: Iterable[AddedToken]) -> None:
        found = [each for each in added if each.text and not each.normalized]
        self._borders = frozenset(each.text for each in found if each.can_begin_a_piece)
        self._pattern = re.compile(_any_of(each.text for each in found)) if found else None

    @property
    def borders(self) -> frozenset[str]:
        """Tokens before which text is cut."""
        return self._borders

    def cut(self, text: str) -> list[str]:
        """The pieces of `text`, which together are `text`; none of an empty one."""
        borders = pairwise([0, *self._cuts(text), len(text)])
        return [text[begin:end] for begin, end in borders if end > begin]

    def find_all(self, text: str) -> list[str]:
        """Every added token that the tokenizer takes out of `text`."""
        return [] if self._pattern is None else self._pattern.findall(text)

    def _cuts(self, text: str) -> Iterator[int]:
        if self._pattern is None or not self._borders:
            return
        last = 0
        for match in self._pattern.finditer(text):
            if match.start() - last >= MIN_PIECE_CHARS and match.group() in self._borders:
                last = match.start()
                yield last


@dataclass(slots=True)
class _Branch:
    """All words with one beginning."""

    children: "dict[str, _Branch]" = field(default_factory=dict)
    is_word: bool = False


def _any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of `words`; as a tree, since models have thousands of them."""
    root = _Branch()
    for word in words:
        branch = root
        for letter in word:
            branch = branch.children.setdefault(letter, _Branch())
        branch.is_word = True
    return _pattern(root)


def _pattern(branch: _Branch) -> str:
    """Whatever of its words comes after their beginning, the longest first."""
    if not branch.children:
        return ""
    ways = [re.escape(letter) + _pattern(child) for letter, child in branch.children.items()]
    if len(ways) == 1 and not branch.is_word:
        return ways[0]
    return f"(?:{'|'.join(ways)}){'?' if branch.is_word else ''}"
