"""What `/v1/models` of one engine says: one base model, its aliases and its adapters.

vLLM answers one card per served name. Cards without a parent are names of the one base model
(the first is its canonical name); a card with a parent is a LoRA adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """Names one engine answers to."""

    base: str
    """Canonical name: namespace of cache keys, label of metrics."""
    aliases: frozenset[str]
    """Every name of the base model, `base` among them."""
    adapters: frozenset[str]
    cards: tuple[Mapping[str, Any], ...]
    """The engine's cards, every field kept."""

    def serves(self, name: str) -> bool:
        return name in self.aliases or name in self.adapters


def parse_model_list(body: object) -> ServedModels:
    """Read the JSON body of `/v1/models`. Raises ValueError that says what is wrong."""
    data = body.get("data") if isinstance(body, Mapping) else None
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise ValueError("/v1/models did not answer an object with a list `data`")  # noqa: TRY004
    cards = tuple(card for card in data if isinstance(card, Mapping) and _name(card))
    bases = [_name(card) for card in cards if not card.get("parent")]
    if not bases:
        raise ValueError("/v1/models names no base model")
    return ServedModels(
        base=bases[0],
        aliases=frozenset(bases),
        adapters=frozenset(_name(card) for card in cards if card.get("parent")),
        cards=cards,
    )


def _name(card: Mapping[str, Any]) -> str:
    name = card.get("id")
    return name if isinstance(name, str) else ""
