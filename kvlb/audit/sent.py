"""What each recorded request asked, and apart from it what the engine reported.

Rules:

1. `Sent` holds what a balancer can know when it sends; the reported figure is never part of it, so
   nothing that gets a `Sent` can read it.
2. Comparable is a request with status 200, one prompt of known token ids, a usage block with a
   cached figure, and a known publisher and rank. Everything else says why it isn't.
3. Token ids are the ones `/tokenize` gave, else the body's, else the answer's; the first of them
   whose length is what the engine counted, cut as the body asked if need be.
4. On the two completions paths a missing cached figure means 0: releases up to 0.16 say nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from indexer.core.hashing import Namespace
from indexer.core.types import InstanceId, RankId
from kvlb.audit.capture import RequestRow

COMPLETIONS_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
MEDIA_PARTS = ("image", "audio", "video", "input_image", "input_audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request, as it was known when it was sent."""

    position: int
    """Its place among the capture's requests: the recorder's own numbers may repeat."""
    rank: RankId
    path: str
    body: Mapping[str, Any]
    namespace: Namespace
    tokens: tuple[int, ...]
    t0: float
    t1: float

    def overlaps(self, other: "Sent") -> bool:
        """Whether both were under way at some moment."""
        return self.t0 <= other.t1 and other.t0 <= self.t1

    def shared_tokens(self, other: "Sent") -> int:
        """Length of the common beginning; 0 across namespaces."""
        if self.namespace != other.namespace:
            return 0
        low, high = 0, min(len(self.tokens), len(other.tokens))
        while low < high:
            middle = (low + high + 1) // 2
            if self.tokens[low:middle] == other.tokens[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low


def incomparable_reason(row: RequestRow) -> str | None:
    """Why nothing about this row's answer can be checked; None if it can."""
    body = row.body or {}
    faults = {
        "status": row.status != 200,
        "no_usage": not row.usage,
        "no_cached_figure": reported_tokens(row) is None,
        "prompt_embeds": bool(body.get("prompt_embeds")),
        "multimodal": any(_media_parts(body.get("messages"))),
        "several_prompts": _prompt_count(body.get("prompt")) > 1,
    }
    return next((reason for reason, holds in faults.items() if holds), None)


def reported_tokens(row: RequestRow) -> int | None:
    """Cached tokens as the engine reported them; None if it reported none."""
    usage = row.usage or {}
    figures = [usage.get("cache_read_input_tokens")]
    for details in ("input_tokens_details", "prompt_tokens_details"):
        if isinstance(found := usage.get(details), Mapping):
            figures.insert(0, found.get("cached_tokens"))
    figure = next((each for each in figures if each is not None), None)
    if figure is not None:
        return _count(figure)
    return 0 if row.path in COMPLETIONS_PATHS else None


def known_tokens(row: RequestRow) -> tuple[int, ...] | None:
    """The prompt's token ids; None if no source has them, or none that the engine agrees with."""
    body = row.body or {}
    counted = (row.usage or {}).get("prompt_tokens")
    kept = body.get("truncate_prompt_tokens")
    sources = [row.tokenize, _prompt_ids(body.get("prompt")), _answered_ids(row)]
    if isinstance(kept, int) and kept > 0:
        sources += [ids and ids[-kept:] for ids in sources]
    for ids in sources:
        if ids and (not _is_count(counted) or len(ids) == counted):
            return tuple(ids)
    return None


def find_rank(row: RequestRow, ranks: Sequence[int]) -> RankId | None:
    """The rank that served it, of the instance's known `ranks`; None if nothing says which."""
    headers = {name.lower(): value for name, value in (row.headers or {}).items()}
    wanted = str(headers.get("x-data-parallel-rank", "")).strip()
    if not wanted.isdigit():
        return RankId(InstanceId(row.src), ranks[0]) if len(ranks) == 1 else None
    number = int(wanted)
    # The header counts the server's own ranks, events count the whole fleet's.
    if number not in ranks and number < len(ranks):
        number = ranks[number]
    return RankId(InstanceId(row.src), number)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompt_count(prompt: object) -> int:
    if isinstance(prompt, list) and prompt and not _is_count(prompt[0]):
        return len(prompt)
    return 1


def _prompt_ids(prompt: object) -> list[int] | None:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(_is_count(token) for token in prompt):
        return prompt
    return None


def _answered_ids(row: RequestRow) -> list[int] | None:
    answer = row.response
    if not isinstance(answer, Mapping):
        return None
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    for holder in (answer, first):
        ids = _prompt_ids(holder.get("prompt_token_ids")) if isinstance(holder, Mapping) else None
        if ids:
            return ids
    return None


def _media_parts(messages: object) -> Iterator[object]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and str(part.get("type", "")).startswith(MEDIA_PARTS):
                yield part
