"""How large the demo's engines and conversations are, so that a minute shows a difference.

Rules:

1. Simulated prefill is slow (6,000 tokens/s): simulated time must dwarf what Python itself needs
   on a busy laptop.
2. A cache holds about a third of all conversations: enough for those that a cache-aware router
   sends to an engine, not for all of them. Busy engines are like that.
3. The load per second does not depend on the number of conversations: more users think longer.

Cost: none worth naming.
"""

from dataclasses import dataclass

from simulator.core.settings import EngineSettings
from simulator.workload import WorkloadShape

PREFILL_TOKENS_PER_S = 6_000.0
INTER_TOKEN_MS = 12.0
BLOCK_TOKENS = 16
CACHED_SHARE = 0.31
"""Of what all conversations come to in the end, on each engine."""
SYSTEM_CHARS = 400
FIRST_MESSAGE_CHARS = 1_800
NEXT_MESSAGE_CHARS = 180
ANSWER_TOKENS = 40
TEMPLATE_TOKENS = 30
LARGEST_MESSAGE = 1.5
"""The workload draws lengths up to so many times the mean."""
TURNS_PER_S = 7.0
CONVERSATIONS_PER_S = 4.0
LEAST_THINK_S = 0.4
ANSWER_ALLOWANCE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything but the seed."""

    engine: EngineSettings
    shape: WorkloadShape
    answer_allowance_s: float = ANSWER_ALLOWANCE_S
    """Planned time for an answer, before the user begins to think."""


def set_stage(conversations: int, turns: int) -> Stage:
    """Size engines and workload for so many conversations of so many turns."""
    turn_tokens = NEXT_MESSAGE_CHARS + ANSWER_TOKENS + TEMPLATE_TOKENS
    context_tokens = SYSTEM_CHARS + FIRST_MESSAGE_CHARS + turns * turn_tokens
    cache_tokens = max(
        CACHED_SHARE * conversations * context_tokens,
        LARGEST_MESSAGE * context_tokens,  # the longest one must fit
    )
    return Stage(
        engine=EngineSettings(
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            inter_token_ms=INTER_TOKEN_MS,
            block_size=BLOCK_TOKENS,
            num_blocks=round(cache_tokens / BLOCK_TOKENS),
        ),
        shape=WorkloadShape(
            conversations=conversations,
            turns=turns,
            shared_system_chars=SYSTEM_CHARS,
            first_message_chars=FIRST_MESSAGE_CHARS,
            next_message_chars=NEXT_MESSAGE_CHARS,
            answer_tokens=ANSWER_TOKENS,
            arrivals_per_s=CONVERSATIONS_PER_S,
            think_s=max(LEAST_THINK_S, conversations / TURNS_PER_S - ANSWER_ALLOWANCE_S),
        ),
    )
