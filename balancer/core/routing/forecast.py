"""What the index alone promised of one leg, and the report on it once the engine has told.

Rules:

1. A forecast is of the index, not of what this balancer expects to come: only the index can be wrong
   about an engine's cache.
2. Not every answer can be held against it. Why not is a constant, known when the leg is sent
   (`incomparable_reason`) or when it has ended; such a leg is counted and never reported.
3. The engine's figure counts up to what could have been predicted at most.

Cost: constant; the prompt's keys are there already.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from balancer.core.record import LegRecord
from balancer.core.request import GenerateRequest, PromptView
from indexer.core.index import PrefixMatch, Prompt
from indexer.core.reports import CacheReport
from indexer.core.types import BlockKey, RankId, Trust

UNKNOWN_BLOCK_TOKENS = 2048
"""A prompt of so many tokens has a whole block on any engine."""
_TELLING = frozenset(
    {"n", "best_of", "use_beam_search", "prompt_logprobs", "echo", "prompt_embeds"}
)
"""Fields by which an answer may say nothing; most requests have none of them."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Of one leg on one rank, made when the index was asked."""

    rank: RankId
    model: str
    """Base model."""
    matched_s: float
    prompt: Prompt | None = None
    match: PrefixMatch | None = None
    incomparable: str | None = None
    """Why nothing can be learned of the index from this leg."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a finished leg has shown."""

    outcome: str
    """`exact`, `over`, `under`, or why it can't be told; a metric label."""
    report: CacheReport | None = None
    """If it contradicts the index. Its age is for the sender to fill in."""
    has_agreed: bool = False
    """The engine took from its cache exactly what was predicted, and that was something."""
    agreed_key: BlockKey | None = None
    """The last block of that."""
    has_computed: bool = False
    """The engine computed a whole block, which it has to announce."""


def incomparable_reason(
    request: GenerateRequest, prompt: PromptView, *, is_after_transfer: bool
) -> str | None:
    """Why the cached tokens of an answer would say nothing of the index; None if they do."""
    if not prompt.prompts:
        return "unscorable"
    if len(prompt.prompts) > 1:
        return "several_prompts"
    if is_after_transfer:
        return "after_transfer"  # the engine counts what it was sent as cached
    if request.body.keys().isdisjoint(_TELLING):
        return None
    return _reason_in(request.body)


def _reason_in(body: Mapping[str, Any]) -> str | None:
    if _has_several_answers(body):
        return "several_answers"  # the last one's figure is told
    if _reads_no_cache(body):
        return "no_cache_read"
    return None if body.get("prompt_embeds") is None else "prompt_embeds"


def conclude(forecast: Forecast, leg: LegRecord) -> Finding:
    """Hold a finished leg against what was promised."""
    if leg.error is not None:
        return Finding(outcome="failed")
    prompt, match = forecast.prompt, forecast.match
    if forecast.incomparable is not None or prompt is None:
        return Finding(outcome=forecast.incomparable or "unscorable")
    if leg.prompt_tokens is not None and leg.prompt_tokens != prompt.tokens:
        return Finding(outcome="other_prompt")
    if match is None or match.trust is Trust.LOAD_ONLY:
        return Finding(outcome="no_index")
    if match.block_size is None:
        has_computed = not leg.cached_tokens and prompt.tokens >= UNKNOWN_BLOCK_TOKENS
        return Finding(outcome="no_index", has_computed=has_computed)
    return _compare(forecast.rank, prompt, match, leg.cached_tokens)


def _compare(
    rank: RankId, prompt: Prompt, match: PrefixMatch, reported_tokens: int | None
) -> Finding:
    size = match.block_size or 1
    limit_tokens = prompt.hit_limit_blocks(size) * size
    predicted = match.tokens
    cached = predicted if reported_tokens is None else min(reported_tokens, limit_tokens)
    has_computed = len(prompt.keys(size)) * size - cached >= size
    if reported_tokens is None:
        return Finding(outcome="usage_unknown", has_computed=has_computed)
    if cached == predicted:
        key = prompt.keys(size)[cached // size - 1] if cached >= size else None
        return Finding(
            outcome="exact", has_agreed=cached > 0, agreed_key=key, has_computed=has_computed
        )
    is_over = predicted > cached
    block = cached // size if is_over else max(1, cached // size) - 1
    report = CacheReport(
        rank=rank,
        epoch=match.epoch,
        age_s=0.0,
        block_size=size,
        predicted_tokens=predicted,
        cached_tokens=cached,
        key=prompt.keys(size)[block],
    )
    return Finding(outcome="over" if is_over else "under", report=report, has_computed=has_computed)


def _has_several_answers(body: Mapping[str, Any]) -> bool:
    counts = (body.get("n"), body.get("best_of"))
    is_several = any(each is not None and each != 1 for each in counts)
    return is_several or bool(body.get("use_beam_search"))


def _reads_no_cache(body: Mapping[str, Any]) -> bool:
    """Logprobs of the prompt, under either name, need every token computed."""
    if body.get("prompt_logprobs") is not None:
        return True
    logprobs = body.get("logprobs")
    return bool(body.get("echo")) and logprobs is not None and logprobs is not False
