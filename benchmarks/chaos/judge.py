"""Holds what clients saw against the simulator's own account. Pure.

Rules, each broken one is a complaint:

1. An answer is what the simulator's sampler says, whole. What came of one that broke off begins so.
2. Nobody waits longer than the deadline, and no connection ends without a word.
3. An error before the first word of an answer is 502, 503 or 504 with OpenAI's body; one after it
   is an error event, behind which nothing follows.
4. There is no error before the first word where an engine of each role that is needed had been
   well for `NOTICE_S`.
5. An error event has a reason: something befell the engine that answered, while it did.
6. After the leases nothing is reserved, running or held, no engine has read wrong blocks, and the
   balancer counts nothing as running.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.chaos.client import Outcome
from simulator.core.history import Attempt, FleetHistory
from simulator.life_counts import LifeCounts

NOTICE_S = 2.0
"""A balancer that probes every 0.5 s knows by then that an engine is back."""
ALLOWED_STATUSES = frozenset({502, 503, 504})
_LATE_S = 0.5
"""Between what befell an engine and the last its client hears of it, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """A broken rule."""

    rule: str
    request: str
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEnd:
    """What the engines say when all is over."""

    counts: LifeCounts
    stranded: int
    """Reservations and requests that are still there after every lease."""
    held_share: float
    """The largest share of a cache that somebody still holds."""
    legs_left: int = 0
    """That the balancer counts as running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One run."""

    ends: Mapping[str, int]
    statuses: Mapping[int, int]
    again: int
    """Attempts beyond the first of each kind of leg, that reached an engine."""
    fleet: FleetEnd
    complaints: Sequence[Complaint]


def judge(
    outcomes: Sequence[Outcome],
    history: FleetHistory,
    end: FleetEnd,
    needed: Mapping[str, Sequence[str]],
) -> Verdict:
    """`needed`: the engines of each role without which nobody is served."""
    attempts: dict[str, list[Attempt]] = {}
    for attempt in history.attempts:
        attempts.setdefault(_client_id(attempt.request_id), []).append(attempt)
    complaints = [
        complaint
        for outcome in outcomes
        for complaint in _judge_one(outcome, attempts.get(outcome.ask.id, []), history, needed)
    ]
    errors = [each.status for each in outcomes if each.end == "error" and each.status]
    return Verdict(
        ends=Counter(each.end for each in outcomes),
        statuses=Counter(errors),
        again=sum(_again(each) for each in attempts.values()),
        fleet=end,
        complaints=(*complaints, *_judge_fleet(end)),
    )


def _judge_one(
    outcome: Outcome,
    attempts: Sequence[Attempt],
    history: FleetHistory,
    needed: Mapping[str, Sequence[str]],
) -> Iterable[Complaint]:
    legs = ", ".join(f"{each.engine} {each.outcome}" for each in attempts)
    took_s = outcome.ended_s - outcome.began_s
    told = f"{outcome.status} {outcome.error} after {took_s:.1f} s; legs: {legs}"
    for rule, found in _broken_rules(outcome, attempts, history):
        yield Complaint(rule=rule, request=outcome.ask.id, told=f"{found} {told}".strip())
    is_avoidable = outcome.end in {"error", "error_event"} and not outcome.text
    if is_avoidable and _could_be_served(outcome.ended_s, history, needed):
        yield Complaint(rule="avoidable_error", request=outcome.ask.id, told=told)


def _broken_rules(
    outcome: Outcome, attempts: Sequence[Attempt], history: FleetHistory
) -> Iterable[tuple[str, str]]:
    """Rules and what was found, by how it ended."""
    match outcome.end:
        case "answered":
            yield from (("wrong_answer", found) for found in _faults_of_answer(outcome))
        case "left":
            if not outcome.ask.text.startswith(outcome.text):
                yield "wrong_answer", "before its client left"
        case "hung" | "broken":
            yield outcome.end, ""
        case "error":
            if outcome.status not in ALLOWED_STATUSES or not _is_openai_error(outcome.error):
                yield "error_form", ""
        case "error_event":
            yield from ((rule, "") for rule in _faults_of_event(outcome, attempts, history))


def _faults_of_answer(outcome: Outcome) -> Iterable[str]:
    ask = outcome.ask
    if outcome.text != ask.text:
        yield f"{outcome.text!r} for {ask.text!r}"
    if outcome.finish_reason != "length":
        yield f"ended by {outcome.finish_reason}"
    wants_usage = not ask.streams or "stream_options" in ask.body
    if outcome.completion_tokens != (ask.tokens if wants_usage else None):
        yield f"usage of {outcome.completion_tokens} for {ask.tokens} tokens"


def _faults_of_event(
    outcome: Outcome, attempts: Sequence[Attempt], history: FleetHistory
) -> Iterable[str]:
    if not outcome.ask.text.startswith(outcome.text):
        yield "wrong_answer"
    if outcome.finish_reason is not None or outcome.after_error:
        yield "made_up_end"
    if not _is_openai_error(outcome.error):
        yield "error_form"
    answering = [each for each in attempts if each.engine.startswith("d")]
    # P2P-NCCL's ids have the engines' addresses in them and not the client's: nobody can tell.
    if (
        outcome.text
        and answering
        and not any(
            history.was_disturbed(each.engine, each.received_s, outcome.ended_s + _LATE_S)
            for each in answering
        )
    ):
        yield "unfounded_event"


def _could_be_served(
    at_s: float, history: FleetHistory, needed: Mapping[str, Sequence[str]]
) -> bool:
    return all(
        any(history.was_well(name, at_s - NOTICE_S, at_s) for name in names)
        for names in needed.values()
    )


def _judge_fleet(end: FleetEnd) -> Iterable[Complaint]:
    if end.stranded or end.held_share:
        told = f"{end.stranded} left, {end.held_share:.1%} of a cache held"
        yield Complaint(rule="stranded", request="-", told=told)
    if end.legs_left:
        told = f"the balancer counts {end.legs_left} legs"
        yield Complaint(rule="leaked", request="-", told=told)
    if end.counts.corrupt_reads:
        told = f"{end.counts.corrupt_reads} reads of wrong blocks"
        yield Complaint(rule="corrupt", request="-", told=told)


def _is_openai_error(error: object) -> bool:
    if not isinstance(error, Mapping) or {"message", "type", "code"} - error.keys():
        return False
    return isinstance(error["message"], str) and isinstance(error["type"], str)


def _client_id(request_id: str) -> str:
    """What the client called it; a connector may have added to that."""
    start = request_id.find("chaos-")
    return "-".join(request_id[start:].split("-")[:3]) if start >= 0 else request_id


def _again(attempts: Sequence[Attempt]) -> int:
    by_role = Counter(each.engine[0] for each in attempts)
    return sum(count - 1 for count in by_role.values())
