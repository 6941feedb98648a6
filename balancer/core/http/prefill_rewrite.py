"""The prefill leg's body: the client's prompt, one token of output, nothing that can refuse.

Rules (vLLM protocol, common to every PD connector):

1. Whatever shapes the prompt stays: messages, tools, tool_choice, template arguments, documents,
   truncation, cache_salt, model, media, response_format (some models render it).
2. One token: `max_tokens` 1, `max_completion_tokens` 1 if present (it wins), `n` 1. `min_tokens`
   is set to 1, not removed: it masks EOS and stop ids, and connectors hand over only the KV of
   a request that ended by length.
3. Not a stream, and no `stream_options`: engines refuse them without `stream`.
4. What asks for more than the first token needs (logprobs, echo, beams) is removed, and with it what
   engines refuse alone (`logprob_token_ids` without `logprobs`).
5. The client's body is never mutated; every other field is passed on as it is.
"""

from collections.abc import Mapping
from typing import Any

REMOVED_FIELDS = frozenset(
    {
        "stream_options",
        "min_completion_tokens",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "echo",
        "best_of",
        "use_beam_search",
    }
)


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `body` for the prefill leg."""
    leg = {name: value for name, value in body.items() if name not in REMOVED_FIELDS}
    leg.update(stream=False, max_tokens=1, min_tokens=1, n=1)
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg
