"""Seeded multi-turn conversations as plain values: who asks what, and when.

The same seed and shape give the same conversations everywhere. Answers are not part of it: the
user's next turn follows whatever the assistant said, so whoever plays a conversation keeps the
messages and appends the answer it got.
"""

import random
from dataclasses import dataclass

_NOUNS = (
    "cache block router engine request prefix queue token window river garden harbor letter "
    "meadow signal candle station market island winter bridge mirror engine paper"
)
_VERBS = "holds moves finds reads keeps sends opens counts waits joins leaves follows"
_GLUE = "the a every another its some that with before after under near"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of the user."""

    text: str
    think_s: float
    """Pause between the previous answer and this message; 0 for the first."""
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A user's session."""

    name: str
    start_s: float
    system: str | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """How long, how many, how fast; a character is about one token of the simulated tokenizer."""

    conversations: int = 24
    turns: int = 5
    shared_system_chars: int = 600
    """Length of a system prompt that all conversations share; 0 is none."""
    first_message_chars: int = 2_000
    next_message_chars: int = 200
    answer_tokens: int = 48
    arrivals_per_s: float = 6.0
    """Mean rate at which conversations begin."""
    think_s: float = 0.5
    """Mean pause of a user."""


def conversations(seed: int, shape: WorkloadShape | None = None) -> list[Conversation]:
    """Return the conversations of a seed, in order of their beginning."""
    shape = shape if shape is not None else WorkloadShape()
    chance = random.Random(seed)  # noqa: S311 - a workload, not a secret
    system = _write(chance, shape.shared_system_chars) if shape.shared_system_chars else None
    start_s = 0.0
    written: list[Conversation] = []
    for index in range(shape.conversations):
        turns = tuple(_write_turn(chance, shape, number) for number in range(shape.turns))
        written.append(
            Conversation(name=f"conversation-{index}", start_s=start_s, system=system, turns=turns)
        )
        start_s += chance.expovariate(shape.arrivals_per_s)
    return written


def _write_turn(chance: random.Random, shape: WorkloadShape, number: int) -> Turn:
    is_first = number == 0
    chars = shape.first_message_chars if is_first else shape.next_message_chars
    return Turn(
        text=_write(chance, round(chars * chance.uniform(0.5, 1.5))),
        think_s=0.0 if is_first or not shape.think_s else chance.expovariate(1 / shape.think_s),
        max_tokens=shape.answer_tokens,
    )


def _write(chance: random.Random, chars: int) -> str:
    """Return a text of about this length."""
    words: list[str] = []
    length = 0
    while length < chars:
        for kind in (_GLUE, _NOUNS, _VERBS):
            word = chance.choice(kind.split())
            words.append(word)
            length += len(word) + 1
    return " ".join(words)
