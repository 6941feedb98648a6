"""Shows a plan to people: every candidate with its terms, and why the winner won.

Rules:

1. Numbers are those the planner used; nothing is computed anew but differences.
2. No token, prompt text, key or salt appears.
3. In headers the cheapest `SHOWN_CANDIDATES` stand, one after the other, in plain characters: a policy of
   somebody's own may call its terms what it likes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from math import isfinite
from typing import Any

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.load.ledger import Learning
from balancer.core.prompt.encoded_items import EncodedItems
from balancer.core.prompt.media_items import media_items
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.plan import Choice, OtherWay, RoutePlan
from balancer.core.routing.ways import way_s

SHOWN_CANDIDATES = 8
_NOT_PLAIN = re.compile(r"[^ -~]")

REASONS = {
    "aggregated": "the chosen instance is mixed: it prefills and decodes itself",
    "remote_prefill": "another instance prefills first and hands its cache over",
    "decode_has_cache": "no prefill leg: what the decode instance lacks is cheap to compute there",
    "short_prompt": "no prefill leg: the whole prompt is cheap to compute where it decodes",
    "local_faster": "no prefill leg: by estimate the decode instance computes it for less",
    "no_prefill_instance": "no prefill leg: no prefill instance is available",
    "connector_mismatch": "no prefill leg: every prefill instance has another connector",
    "not_splittable": "no prefill leg: such a request can't be split over two legs",
    "prefill_failed": "no prefill leg: prefill instances failed, and the operator allows local",
    "unscorable": "tokens are unknown: routed by load, and by how the text begins",
    "forced_local": "the operator forces prefill where the request decodes",
    "forced_remote": "the operator forces prefill elsewhere",
}


def render_plan(plan: RoutePlan, prompt: PromptView) -> Mapping[str, Any]:
    """`plan` as JSON values."""
    return {
        "prompt": {
            "tokens": plan.prompt_tokens,
            "source": prompt.source,
            "unscorable": prompt.unscorable,
        },
        "reason": plan.reason.value,
        "meaning": REASONS.get(plan.reason.value, plan.reason.value),
        "ways": explain_ways(plan),
        **render_legs(plan),
        "held_back": plan.held_back,
    }


def render_legs(plan: RoutePlan) -> Mapping[str, Any]:
    """Of each leg who was chosen, why, and every candidate with its terms."""
    return {
        "decode": _render_leg(plan.decode, plan.considered),
        "prefill": _render_leg(plan.prefill, plan.considered_prefill) if plan.prefill else None,
    }


def explain_encode(
    request: GenerateRequest,
    fleet: Fleet,
    seen: EncodedItems,
    legs: Callable[[Instance], int],
    now_s: float,
) -> Mapping[str, Any] | None:
    """What would become of images, audio and video; None: nothing to encode, or nobody for it."""
    serving = [
        each for each in fleet.encoders if each.models is None or each.models.serves(request.model)
    ]
    items = media_items(request) if serving else ()
    available = [each for each in serving if each.is_available]
    shown = []
    for number, item in enumerate(items):
        known = seen.usable(item.key, available, now_s)
        name, reason = None, "no_encode_instance"
        if known is not None:
            name = next(each.alias for each in available if each.id == known.instance)
            reason = "reused"
        elif available:
            choice = seen.choose(item.key, available, legs)
            name, reason = choice.instance.alias, choice.reason
        shown.append({"item": number, "instance": name, "reason": reason})
    return {"items": shown} if items else None


def render_choice(choice: Choice) -> Mapping[str, Any]:
    """One candidate with what its cost is made of."""
    candidate = choice.candidate
    return {
        "instance": candidate.instance.alias,
        "role": candidate.instance.role.value,
        "rank": candidate.rank.rank,
        "overlap_tokens": candidate.overlap_tokens,
        "predicted_tokens": candidate.predicted_tokens,
        "tokens_by_tier": {tier.value: each for tier, each in candidate.tokens_by_tier.items()},
        "trust": candidate.trust.value,
        "trust_reason": candidate.trust_reason,
        "block_size": candidate.block_size,
        "cost": _number(choice.cost_s),
        "terms": _terms(choice.terms),
        "prefill": _name(choice.prefill) if choice.prefill else None,
        "other_way": _render_other(choice.other) if choice.other else None,
    }


def explain_choice(chosen: Choice, considered: Sequence[Choice]) -> str:
    """One sentence: what set the winner apart from the cheapest other candidate."""
    others = [each for each in considered if each.candidate.rank != chosen.candidate.rank]
    name = _name(chosen)
    if not considered:
        return f"{name} was next: the policy doesn't ask what a request costs"
    if not others:
        return f"{name} is the only candidate"
    rival = min(others, key=lambda each: each.cost_s)
    gap = rival.cost_s - chosen.cost_s
    if gap == 0:
        return f"{name} and {_name(rival)} cost the same; chance or order of arrival decided"
    if gap < 0:
        why = "the policy weighs otherwise"
        if chosen.is_home:
            why = "it is the session's home, and nothing is known of the prompt"
        return f"{name} was chosen although {_name(rival)} costs less: {why}"
    names = [*chosen.terms, *(term for term in rival.terms if term not in chosen.terms)]
    if not names:
        return f"{name} costs {gap:.4g} less than {_name(rival)}"
    term = max(names, key=lambda each: rival.terms.get(each, 0.0) - chosen.terms.get(each, 0.0))
    return (
        f"{name} costs {gap:.4g} less than {_name(rival)}; the largest difference is `{term}`: "
        f"{chosen.terms.get(term, 0.0):.4g} against {rival.terms.get(term, 0.0):.4g}"
    )


def explain_ways(plan: RoutePlan) -> str | None:
    """One sentence: how prefill elsewhere compares with prefill where it decodes, or why it can't yet.

    None if there was nothing to compare.
    """
    chosen, other = plan.decode, plan.decode.other
    if other is None:
        return None if plan.learning is None else _explain_learning(plan.learning)
    taken_s = way_s(chosen)
    names = {True: "prefill elsewhere", False: "prefill where it decodes"}
    return (
        f"{names[not other.remote]} is estimated at {taken_s:.4g}, "
        f"{names[other.remote]} at {other.cost_s:.4g}"
    )


def _explain_learning(seen: Learning) -> str:
    """Counts stop to matter where there are enough."""
    needed = seen.needed
    return (
        "not compared by time yet, the limit pd.local_prefill_max_tokens decides: "
        f"{min(seen.prefills, needed)} of {needed} prefills and "
        f"{min(seen.hand_overs, needed)} of {needed} hand-overs seen (only streams show one)"
    )


def explain_headers(plan: RoutePlan) -> tuple[tuple[bytes, bytes], ...]:
    """Of an answer whose client asked why: the winner of each leg, and every candidate's terms."""
    legs = [("", plan.decode, plan.considered)]
    if plan.prefill is not None:
        legs.append(("prefill-", plan.prefill, plan.considered_prefill))
    found = []
    for name, chosen, considered in legs:
        cheapest = nsmallest(SHOWN_CANDIDATES, considered, key=lambda each: each.cost_s)
        found += [
            (f"x-kvlb-{name}why", explain_choice(chosen, considered)),
            (f"x-kvlb-{name}candidates", "; ".join(map(_in_a_line, cheapest))),
        ]
    ways = explain_ways(plan)
    if ways is not None:
        found.append(("x-kvlb-ways", ways))
    return tuple((name.encode(), _NOT_PLAIN.sub("?", value).encode()) for name, value in found)


def _in_a_line(choice: Choice) -> str:
    candidate = choice.candidate
    figures = {
        "cost": choice.cost_s,
        "overlap": candidate.overlap_tokens,
        "predicted": candidate.predicted_tokens,
        **choice.terms,
    }
    shown = " ".join(f"{name}={value:.4g}" for name, value in figures.items())
    return f"{candidate.instance.alias}/{candidate.rank.rank} {shown}"


def _render_leg(chosen: Choice, considered: Sequence[Choice]) -> Mapping[str, Any]:
    return {
        "chosen": render_choice(chosen),
        "why": explain_choice(chosen, considered),
        "considered": [render_choice(each) for each in considered],
    }


def _render_other(other: OtherWay) -> Mapping[str, Any]:
    return {
        "way": "remote" if other.remote else "local",
        "cost": _number(other.cost_s),
        "terms": _terms(other.terms),
    }


def _terms(terms: Mapping[str, float]) -> Mapping[str, float | None]:
    return {name: _number(value) for name, value in terms.items()}


def _name(choice: Choice) -> str:
    instance = choice.candidate.instance
    rank = choice.candidate.rank.rank
    return f"{instance.alias}/{rank}" if len(instance.ranks) > 1 else instance.alias


def _number(value: float) -> float | None:
    """JSON knows no infinity."""
    return round(value, 6) if isfinite(value) else None
