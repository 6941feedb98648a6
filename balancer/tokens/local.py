"""Turns prompts into ids as their engine would, with its model's own tokenizer and templates.

Blocking: for threads only. What is read from where is in `balancer/tokens/directory.py`.
"""

from collections.abc import Sequence

from balancer.core.prompt.media_prefix import STAND_INS, common_prefix, with_stand_in
from balancer.core.prompt.shape import (
    ChatShape,
    TextShape,
    Unscorable,
    UnscorableError,
    check_text_length,
)
from balancer.core.prompt.token_cache import Tokens
from balancer.tokens.templates import Templates
from balancer.tokens.text import KnownPieces, NothingKnown, Reading, TextTokenizer


class LocalTokenizer:
    """One model's. Thread-safe."""

    def __init__(self, text: TextTokenizer, templates: Templates) -> None:
        self._text = text
        self._templates = templates

    def encode(self, shape: TextShape | ChatShape, known: KnownPieces | None = None) -> Tokens:
        """Ids of each prompt. Raises UnscorableError.

        Of a chat with media those before the first, and the whole with the template's own token for each
        of them, if it writes such.
        """
        known = NothingKnown() if known is None else known
        return self.read(shape, self.look_up(shape, known), known)

    def look_up(self, shape: TextShape | ChatShape, known: KnownPieces) -> Reading:
        """Render, and find what is known of it. Quick, whatever the length. Raises UnscorableError."""
        texts = shape.texts if isinstance(shape, TextShape) else self._render(shape)
        return self._text.look_up(texts, known, add_special_tokens=shape.add_special_tokens)

    def read(self, shape: TextShape | ChatShape, reading: Reading, known: KnownPieces) -> Tokens:
        """Tokenise the rest. Raises UnscorableError."""
        tokens = self._text.read(reading, known)
        if isinstance(shape, ChatShape) and shape.has_media:
            return _before_media(tokens)
        for each in tokens:
            check_text_length(len(each), shape.truncation)
        return tokens

    def _render(self, shape: ChatShape) -> Sequence[str]:
        """The chat; one with media several times, each with something else in their place."""
        template = self._templates.find(shape)
        if not shape.has_media:
            return (template.render(shape),)
        if shape.truncation is not None:
            raise UnscorableError(Unscorable.TRUNCATED)
        sees_parts = template.sees_parts
        shapes = [with_stand_in(shape, text, keeps_order=sees_parts) for text in STAND_INS]
        if sees_parts:
            shapes.append(shape)
        return [template.render(each) for each in shapes]


def _before_media(tokens: Tokens) -> Tokens:
    """What doesn't depend on the media, and, from a template that sees them, the whole of it."""
    return (tokens[0][: common_prefix(tokens)], *tokens[len(STAND_INS) :])
