"""Judges finished requests of a running balancer: what it predicted against what engines reported.

Rules:

1. A leg is compared with what was predicted for its rank: blocks held by events, and those believed
   to be on their way. A decode leg after a transfer is not: its engine counts what it was sent.
2. If the indexer weighed a rank's contradictions itself, its causes are taken, as many of each as it
   counted. It has the tables that a balancer has not.
3. Else a cause is looked for in what is known of the rank before and after the request: another
   epoch, less than exact trust, events that came in between. That is what may explain the
   difference, not what is proved to.
4. `ghost`, `unseen` and `index_differs` are no excuses: the index was `wrong`.

Causes have the names of `kvlb.audit.rules` and of the indexer's weighing. Cost: constant per leg.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from kvlb.audit.report import LIVE, Row, Verdict

COMPARED = frozenset({"exact", "over", "under", "no_index"})
"""Outcomes that the balancer itself gives to legs it could compare, or to a rank of which it knew
nothing yet: then it has predicted nothing, which can be right or wrong."""
DIFFERING = frozenset({Verdict.EXPLAINED, Verdict.WRONG, Verdict.UNEXPLAINED})
GUESSED = "predicted_blocks"
UNDER_CAUSES = frozenset({"stored_since", "unseen", "doubted"})
EITHER_WAY = frozenset({"index_differs", "too_long_ago"})
"""Causes that are counted for too little as for too much."""
FAULTS = frozenset({"ghost", "unseen", "index_differs"})
CLIENT_LEFT = "ClientClosedRequest"
"""What a balancer says of a request whose client went away."""
LEFT_ALONE = frozenset({"cancelled", CLIENT_LEFT})
"""What it says of a leg that did nothing wrong when that happened."""


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One leg in `/explain/recent`; releases may add fields."""

    leg: str
    instance: str
    rank: int | None = None
    error: str | None = None
    overlap_tokens: int | None = None
    held_tokens: int | None = None
    trust: str | None = None
    outcome: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request in `/explain/recent`."""

    request_id: str
    error: str | None = None
    unscorable: str | None = None
    duration_s: float | None = None
    first_byte_s: float | None = None
    legs: list[Leg] = []


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What `/status` says of one rank's part of the index; nothing where another process has it."""

    epoch: int | None = None
    last_seq: int | None = None
    contradictions: Mapping[str, int] | None = None
    """By cause, since the indexer started; None: it isn't told here."""


RankName = tuple[str, int]
"""Alias and global number."""


def read_facts(index: object) -> RankFacts:
    """Read the `index` part of a rank in `/status`."""
    shown = index if isinstance(index, Mapping) else {}
    counts = shown.get("counts")
    weighed = counts.get("contradictions") if isinstance(counts, Mapping) else None
    return RankFacts(
        epoch=shown.get("epoch"),
        last_seq=shown.get("last_seq"),
        contradictions=weighed if isinstance(weighed, Mapping) else None,
    )


def judge(
    decision: Decision,
    before: Mapping[RankName, RankFacts],
    after: Mapping[RankName, RankFacts],
) -> Iterator[Row]:
    """One row per leg; facts of the ranks are from before and after the request ended."""
    has_transfer = False
    for leg in decision.legs:
        is_after_transfer = has_transfer and leg.leg == "decode"
        has_transfer = has_transfer or (leg.leg == "prefill" and leg.error is None)
        reason = _incomparable(decision, leg, is_after_transfer=is_after_transfer)
        verdict, rule = Verdict.NOT_COMPARABLE, None
        if reason is None:
            rank = (leg.instance, leg.rank or 0)
            nothing = RankFacts()
            verdict, rule = _compare(leg, before.get(rank, nothing), after.get(rank, nothing))
        yield Row(
            i=0,
            phase=LIVE,
            label=leg.leg,
            src=leg.instance,
            rank=leg.rank,
            prompt_tokens=leg.prompt_tokens,
            predicted=leg.overlap_tokens,
            reported=leg.cached_tokens,
            verdict=verdict,
            rule=rule,
            reason=reason,
        )


def _incomparable(decision: Decision, leg: Leg, *, is_after_transfer: bool) -> str | None:
    known = leg.outcome if leg.outcome not in COMPARED else None
    has_client_left = decision.error == CLIENT_LEFT and leg.error in LEFT_ALONE
    reasons = {
        "client_left": has_client_left,
        "failed": leg.error is not None,
        "forwarded": leg.leg == "forward",
        "after_transfer": is_after_transfer,
        known or "": known is not None,
        decision.unscorable or "unscorable": leg.overlap_tokens is None,
        "no_cached_figure": leg.cached_tokens is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _compare(leg: Leg, before: RankFacts, after: RankFacts) -> tuple[Verdict, str | None]:
    predicted, cached = leg.overlap_tokens or 0, leg.cached_tokens or 0
    if cached == predicted:
        return Verdict.EXACT, None
    held = predicted if leg.held_tokens is None else leg.held_tokens
    if held <= cached < predicted:
        # What events vouched for was there; what was believed to come hadn't, or is gone.
        return Verdict.EXPLAINED, GUESSED
    rule = next((name for name, holds in _causes(leg, before, after) if holds), None)
    return (Verdict.UNEXPLAINED if rule is None else Verdict.EXPLAINED), rule


def _causes(leg: Leg, before: RankFacts, after: RankFacts) -> Iterator[tuple[str, bool]]:
    is_over = (leg.cached_tokens or 0) < (leg.overlap_tokens or 0)
    has_heard = before.last_seq != after.last_seq
    yield "restart_seen_late", is_over and before.epoch != after.epoch
    yield "degraded_trust", leg.trust not in {None, "exact"}
    yield "evicted_since", is_over and has_heard
    yield "stored_since", not is_over and has_heard


def assign_causes(rows: Iterable[Row], weighed: Mapping[RankName, Mapping[str, int]]) -> list[Row]:
    """Give differing rows the causes that the indexer counted for their rank meanwhile."""
    left = {rank: _by_direction(counts) for rank, counts in weighed.items()}
    return [_assigned(row, left) for row in rows]


def _by_direction(counts: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Causes one by one: of too little predicted, of too much. What can be either is both, last."""
    names = [name for name, count in counts.items() for _ in range(count)]
    either = [name for name in names if name in EITHER_WAY]
    under = [name for name in names if name in UNDER_CAUSES]
    over = [name for name in names if name not in UNDER_CAUSES | EITHER_WAY]
    return under + either, over + either


def _assigned(row: Row, left: Mapping[RankName, tuple[list[str], list[str]]]) -> Row:
    is_compared = row.predicted is not None and row.reported is not None
    if row.verdict not in DIFFERING or row.rule == GUESSED or not is_compared:
        return row
    causes = left.get((row.src, row.rank or 0), ([], []))[row.is_over]
    if not causes:
        return row
    cause = causes.pop(0)
    verdict = Verdict.WRONG if cause in FAULTS else Verdict.EXPLAINED
    return msgspec.structs.replace(row, verdict=verdict, rule=cause)
