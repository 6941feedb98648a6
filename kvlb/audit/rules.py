"""Why a prediction may rightly differ from what an engine reported. Pure.

Rules of the rules:

1. A rule sees the request, its neighbours on the rank, the engine's version and settings, and the times of
   events. It never sees the reported figure: it answers which figures its cause would make an engine
   report, and the comparison is somebody else's.
2. The answer is as narrow as the cause allows, mostly one figure; an empty one means "not my case".
3. The first rule that fits names the cause; causes that need no other request come first.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvlb.audit.engines import Version
from kvlb.audit.forecast import Forecast
from kvlb.audit.sent import Sent

CHAT_PATH = "/v1/chat/completions"
EXTRA_KEYS_SINCE: Version = (0, 17)
REPORT_MODE_SINCE: Version = (0, 26)
NOTHING: Collection[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything a rule may look at."""

    sent: Sent
    forecast: Forecast
    version: Version | None = None
    loads_remote: bool = False
    saves_remote: bool = False
    drafts: bool = False
    neighbours: Sequence[Sent] = ()
    """Other requests of the rank."""
    producers: Sequence[Sent] = ()
    """Requests of other instances that save what they compute."""

    def is_before(self, version: Version) -> bool:
        return self.version is not None and self.version < version

    def whole_blocks(self, tokens: int) -> int:
        """`tokens`, cut to full blocks an engine may take from its cache."""
        size = self.forecast.block_size
        return min(self.forecast.limit_tokens, tokens // size * size) if size else 0

    def shared_with(self, others: Sequence[Sent]) -> int:
        """Longest beginning in full blocks that any of `others` has in common."""
        return max(
            (self.whole_blocks(self.sent.shared_tokens(other)) for other in others), default=0
        )


def no_cache_read(evidence: Evidence) -> Collection[int]:
    """Logprobs of the prompt need every token computed, so the engine doesn't look at its cache."""
    body = evidence.sent.body
    wanted = body.get("prompt_logprobs")
    if wanted is None and body.get("echo"):
        # vLLM turns the answer's logprobs into the prompt's when the prompt is echoed.
        is_chat = evidence.sent.path == CHAT_PATH
        wanted = body.get("top_logprobs", 0) if is_chat else body.get("logprobs")
    return NOTHING if wanted is None else (0,)


def later_child(evidence: Evidence) -> Collection[int]:
    """Of n answers the last one's figure is reported; its prompt was computed for the first."""
    body = evidence.sent.body
    children = max(
        (c for c in (body.get("n"), body.get("best_of")) if isinstance(c, int)), default=1
    )
    return (evidence.forecast.limit_tokens,) if children > 1 else NOTHING


def reset_seen_late(evidence: Evidence) -> Collection[int]:
    """The cache was reset while the engine was silent; the event came with this request's step."""
    return (0,) if evidence.forecast.cleared else NOTHING


def restart_seen_late(evidence: Evidence) -> Collection[int]:
    """The engine had been restarted; its first event came with this request's step."""
    return (0,) if evidence.forecast.restarted else NOTHING


def report_mode_full(evidence: Evidence) -> Collection[int]:
    """Blocks announced again without a new copy were counted twice and outlived their removal."""
    forecast = evidence.forecast
    if evidence.is_before(REPORT_MODE_SINCE) or forecast.counted_once_tokens == forecast.tokens:
        return NOTHING
    return (forecast.counted_once_tokens,)


def salt_unpublished(evidence: Evidence) -> Collection[int]:
    """Before 0.17 events don't tell salted blocks from plain ones; the engine does."""
    if not evidence.is_before(EXTRA_KEYS_SINCE):
        return NOTHING
    sent = evidence.sent
    earlier = [other for other in evidence.neighbours if other.t0 < sent.t0]
    if sent.namespace.cache_salt is None and not any(
        other.namespace.cache_salt is not None for other in earlier
    ):
        return NOTHING
    return (min(evidence.forecast.unsalted_tokens, evidence.shared_with(earlier)),)


def remote_load(evidence: Evidence) -> Collection[int]:
    """Blocks an engine loaded from elsewhere count as cached, and no event announces them first."""
    sent, forecast = evidence.sent, evidence.forecast
    transfer = sent.body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("do_remote_prefill"):
        told = transfer.get("remote_prefill_cached_tokens")
        if isinstance(told, int):
            return (told,)
        return (forecast.limit_tokens, len(sent.tokens) - 1, len(sent.tokens))
    if not evidence.loads_remote:
        return NOTHING
    own = evidence.neighbours if evidence.saves_remote else ()
    saved = [other for other in (*evidence.producers, *own) if other.t0 < sent.t0]
    found = evidence.shared_with(saved)
    return (found,) if found > forecast.tokens else NOTHING


def drafting_drops_block(evidence: Evidence) -> Collection[int]:
    """With speculative decoding the last block of a hit is computed anew."""
    forecast = evidence.forecast
    if not evidence.drafts or not forecast.tokens:
        return NOTHING
    return (forecast.tokens - forecast.block_size,)


def concurrent(evidence: Evidence) -> Collection[int]:
    """A request under way at the same time shares the prefix: it may store or displace blocks."""
    sent, forecast = evidence.sent, evidence.forecast
    shared = evidence.shared_with([o for o in evidence.neighbours if sent.overlaps(o)])
    if not shared:
        return NOTHING
    size = forecast.block_size
    joined = range(forecast.tokens + size, shared + size, size)
    displaced = {
        step.tokens
        for step in forecast.steps
        if step.stamped_s <= sent.t1 and step.tokens < forecast.tokens
    }
    return displaced.union(joined)


def late_event(evidence: Evidence) -> Collection[int]:
    """Events about what was cached before came only after the request had been sent.

    Blocks that appear must be another request's doing, sent earlier and after they were last
    seen to go: the request's own blocks appear after it, too, and were no hit.
    """
    sent, forecast = evidence.sent, evidence.forecast
    others = [
        other
        for other in evidence.neighbours
        if other.t0 < sent.t0 and other.t1 >= forecast.missing_since
    ]
    appeared = evidence.shared_with(others)
    came = {step.tokens for step in forecast.steps if forecast.tokens < step.tokens <= appeared}
    gone = {step.tokens for step in forecast.steps if step.stamped_s <= sent.t1}
    return came | {tokens for tokens in gone if tokens < forecast.tokens}


def events_lost(evidence: Evidence) -> Collection[int]:
    """Lost batches may have told of what others had stored, or that what was credited is gone."""
    sent, forecast = evidence.sent, evidence.forecast
    size = forecast.block_size
    if not forecast.events_lost or not size:
        return NOTHING
    earlier = [other for other in evidence.neighbours if other.t0 < sent.t0]
    left = max((_left_tokens(sent, other) for other in earlier), default=0)
    return range(0, max(forecast.tokens, evidence.whole_blocks(left) + size), size)


def _left_tokens(sent: Sent, other: Sent) -> int:
    """How much of a prompt an earlier request may have left: its prompt, and its answer after that."""
    shared = sent.shared_tokens(other)
    if shared < len(other.tokens):
        return shared
    most = other.body.get("max_completion_tokens", other.body.get("max_tokens"))
    return shared + most if isinstance(most, int) else len(sent.tokens)


def windows_unnamed(evidence: Evidence) -> Collection[int]:
    """Before 0.22 events don't say which groups are windows: a hit may end earlier than predicted."""
    forecast = evidence.forecast
    return range(0, forecast.tokens, forecast.block_size) if forecast.windows_unnamed else NOTHING


class Rule(NamedTuple):
    """A cause by its name, and the figures it would make an engine report."""

    name: str
    figures: Callable[[Evidence], Collection[int]]


RULES: Sequence[Rule] = (
    Rule("no_cache_read", no_cache_read),
    Rule("later_child", later_child),
    Rule("reset_seen_late", reset_seen_late),
    Rule("restart_seen_late", restart_seen_late),
    Rule("report_mode_full", report_mode_full),
    Rule("salt_unpublished", salt_unpublished),
    Rule("remote_load", remote_load),
    Rule("drafting_drops_block", drafting_drops_block),
    Rule("concurrent", concurrent),
    Rule("late_event", late_event),
    Rule("windows_unnamed", windows_unnamed),
    Rule("events_lost", events_lost),
)


def explain(evidence: Evidence, reported_tokens: int) -> str | None:
    """Name of the first cause under which `reported_tokens` is what an engine reports."""
    for rule in RULES:
        if reported_tokens in rule.figures(evidence):
            return rule.name
    return None
