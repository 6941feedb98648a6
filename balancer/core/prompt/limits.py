"""How much of a request is worth scoring: so many prompts, so many tokens.

Rules:

1. What one client sends must not stop the loop for the others: packing and hashing cost about
   30 ms per million tokens, and each prompt its own lookup. Beyond the limits nothing is packed,
   hashed or looked up; the request is routed by load.
2. What every instance would refuse as too long isn't scored either. Only what cards tell counts.

Cost: one look at each instance, one at each prompt's length.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from balancer.core.fleet.snapshot import Fleet
from balancer.core.prompt.shape import Unscorable, UnscorableError
from balancer.core.request import Endpoint, GenerateRequest
from indexer.core.model_cards import ServedModels


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """Limits of one request."""

    max_prompts: int
    max_tokens: int
    """Of all its prompts together."""

    def check_count(self, request: GenerateRequest) -> None:
        """Raises UnscorableError before anybody looks at each prompt."""
        prompt = request.body.get("prompt")
        if request.endpoint is not Endpoint.COMPLETIONS or not isinstance(prompt, list):
            return
        if len(prompt) > self.max_prompts and not isinstance(prompt[0], int):
            raise UnscorableError(Unscorable.TOO_MANY_PROMPTS)

    def check_lengths(self, lengths_tokens: Iterable[int], model_tokens: int | None) -> None:
        """Raises UnscorableError if they are too long together, or one for the model."""
        lengths = list(lengths_tokens)
        if sum(lengths) > self.max_tokens:
            raise UnscorableError(Unscorable.TOO_LONG)
        if model_tokens is not None and max(lengths, default=0) > model_tokens:
            raise UnscorableError(Unscorable.TOO_LONG)


def find_model_tokens(fleet: Fleet, model: str) -> int | None:
    """The longest context of `model` in the fleet; None unless every instance tells its own."""
    asked = ("context", model)
    if asked not in fleet.found:
        fleet.found[asked] = _find_model_tokens(fleet, model)
    found: int | None = fleet.found[asked]
    return found


def _find_model_tokens(fleet: Fleet, model: str) -> int | None:
    told = [_context_tokens(each.models) for each in fleet.serving(model) if each.models]
    known = [tokens for tokens in told if tokens is not None]
    return max(known) if known and len(known) == len(told) else None


def _context_tokens(models: ServedModels) -> int | None:
    """Adapters' cards don't tell it; their base model's do."""
    for card in models.cards:
        tokens = card.get("max_model_len")
        if isinstance(tokens, int) and tokens > 0:
            return tokens
    return None
