"""Plans and records as people read them."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_choice

from balancer.core.decision_log import DecisionLog, render_record
from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.ledger import Learning
from balancer.core.prompt.encoded_items import EncodedItems
from balancer.core.prompt.media_items import media_items
from balancer.core.record import EncodeRecord, LegRecord, RequestRecord
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.explain import (
    SHOWN_CANDIDATES,
    explain_choice,
    explain_encode,
    explain_headers,
    render_plan,
)
from balancer.core.routing.plan import Candidate, Choice, OtherWay, Reason, RoutePlan
from balancer.core.settings.encode import EncodeSettings
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId, Tier, Trust


def choice(alias: str, cost_s: float, *, rank: int = 0, ranks: int = 1, **terms: float) -> Choice:
    """A candidate called `alias`."""
    instance = Instance(
        id=InstanceId(f"http://{alias}:1"),
        alias=alias,
        role=Role.DECODE,
        ranks=tuple(range(ranks)),
    )
    candidate = Candidate(
        rank=RankId(instance.id, rank),
        instance=instance,
        overlap_tokens=16,
        predicted_tokens=32,
        tokens_by_tier={Tier.GPU: 12, Tier.CPU: 4},
        trust=Trust.EXACT,
        block_size=16,
    )
    return Choice(candidate=candidate, cost_s=cost_s, terms=terms)


BEST = choice("a", 0.1, queue=0.0, work=0.1)
OTHER = choice("b", 0.4, queue=0.3, work=0.1)
PLAN = RoutePlan(
    decode=BEST, reason=Reason.DECODE_HAS_CACHE, prompt_tokens=100, considered=(BEST, OTHER)
)


def test_winner_is_explained_by_the_largest_difference() -> None:
    """One sentence names the term that decided."""
    assert explain_choice(BEST, (BEST, OTHER)) == (
        "a costs 0.3 less than b; the largest difference is `queue`: 0 against 0.3"
    )


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        pytest.param([], "a is the only candidate", id="alone"),
        pytest.param([choice("b", 0.1)], "cost the same", id="tie"),
        pytest.param([choice("b", 0.05)], "although b costs less", id="other-policy"),
        pytest.param([choice("b", 0.3, rank=1, ranks=2)], "than b/1", id="rank-of-several"),
        pytest.param([choice("b", 0.3, extra=0.5)], "`extra`: 0 against 0.5", id="own-term"),
    ],
)
def test_winner_is_explained(others: list[Choice], expected: str) -> None:
    """Whatever the figures are, there is a sentence."""
    assert expected in explain_choice(BEST, (BEST, *others))


def test_home_that_costs_more_is_named() -> None:
    """No weight is behind that: of a prompt that isn't scored the session is all that is known."""
    home = replace_choice(BEST, is_home=True)

    assert explain_choice(home, (home, choice("b", 0.05))) == (
        "a was chosen although b costs less: "
        "it is the session's home, and nothing is known of the prompt"
    )
    assert explain_choice(home, (home, OTHER)).startswith("a costs 0.3 less than b")


def test_where_nothing_was_weighed_it_is_said() -> None:
    """There is no candidate to compare with, not even the winner."""
    told = explain_choice(choice("a", 0.0), ())

    assert told == "a was next: the policy doesn't ask what a request costs"


def test_costs_without_terms_are_compared_as_they_are() -> None:
    """Simple policies have no terms."""
    assert explain_choice(choice("a", 1.0), (choice("b", 3.0),)) == "a costs 2 less than b"


def test_plan_shows_every_candidate_with_its_terms() -> None:
    """Numbers are those of the planner."""
    shown = render_plan(PLAN, PromptView(unscorable="timeout"))

    assert shown["prompt"] == {"tokens": 100, "source": "none", "unscorable": "timeout"}
    assert shown["reason"] == "decode_has_cache"
    assert shown["prefill"] is None
    assert shown["decode"]["considered"][1] == {
        "instance": "b",
        "role": "decode",
        "rank": 0,
        "overlap_tokens": 16,
        "predicted_tokens": 32,
        "tokens_by_tier": {"gpu": 12, "cpu": 4},
        "trust": "exact",
        "trust_reason": None,
        "block_size": 16,
        "cost": 0.4,
        "terms": {"queue": 0.3, "work": 0.1},
        "prefill": None,
        "other_way": None,
    }


def test_prefill_leg_is_shown_like_the_decode_leg() -> None:
    """Both legs were chosen."""
    plan = RoutePlan(
        decode=BEST, prefill=OTHER, reason=Reason.REMOTE_PREFILL, considered_prefill=(OTHER,)
    )

    shown = render_plan(plan, PromptView())

    assert shown["prefill"]["chosen"]["instance"] == "b"
    assert shown["prefill"]["why"] == "b is the only candidate"


def two_ways(*, remote: bool) -> Choice:
    """A choice between both ways, taken remote or not."""
    source = choice("p", 1.0, work=1.0) if remote else None
    terms = {"prefill": 1.0, "step": 0.5} if remote else {"work": 1.0, "stall": 0.5}
    return replace_choice(
        BEST,
        terms=terms,
        prefill=source,
        other=OtherWay(remote=not remote, cost_s=2.0, terms={"work": 2.0}),
    )


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        (False, "prefill where it decodes is estimated at 1.5, prefill elsewhere at 2"),
        (True, "prefill elsewhere is estimated at 1.5, prefill where it decodes at 2"),
    ],
)
def test_both_ways_are_shown_with_their_estimates(remote: bool, expected: str) -> None:
    """In one sentence, and term by term with the candidate."""
    chosen = two_ways(remote=remote)
    shown = render_plan(RoutePlan(decode=chosen, reason=Reason.LOCAL_FASTER), PromptView())

    assert shown["ways"] == expected
    assert shown["decode"]["chosen"]["prefill"] == ("p" if remote else None)
    assert shown["decode"]["chosen"]["other_way"] == {
        "way": "local" if remote else "remote",
        "cost": 2.0,
        "terms": {"work": 2.0},
    }


@pytest.mark.parametrize("remote", [False, True])
def test_a_finished_request_shows_what_became_of_the_choice(remote: bool) -> None:
    """Estimate, alternative, and what it took."""
    legs = [LegRecord(kind="decode", alias="a", overlap_tokens=0, started_s=1.0, first_byte_s=4.0)]
    if remote:
        legs.insert(0, LegRecord(kind="prefill", alias="p", overlap_tokens=0, started_s=0.0))
    chosen = two_ways(remote=remote)
    plan = RoutePlan(decode=chosen, prefill=chosen.prefill, reason=Reason.LOCAL_FASTER)

    shown = render_record(record(plan=plan, stream=True, legs=legs))
    assert shown["pd"] == {
        "way": "remote" if remote else "local",
        "estimated_s": 1.5,
        "alternative_s": 2.0,
        "first_token_s": 4.0 if remote else 3.0,
        "paid_s": 4.0 if remote else 3.5,
        "regret_s": 2.0 if remote else 1.5,
    }
    assert render_record(record(plan=plan, legs=legs))["pd"]["regret_s"] is None


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_meaning(reason: Reason) -> None:
    """A reason nobody can read explains nothing."""
    assert " " in render_plan(RoutePlan(decode=BEST, reason=reason), PromptView())["meaning"]


def test_infinite_cost_is_null_in_json() -> None:
    """JSON knows no infinity."""
    plan = RoutePlan(decode=choice("a", float("inf")), reason=Reason.AGGREGATED)

    assert (
        json.loads(json.dumps(render_plan(plan, PromptView())))["decode"]["chosen"]["cost"] is None
    )


def encoder(alias: str, **fields: Any) -> Instance:
    served = ServedModels(
        base="m", aliases=frozenset({"m"}), adapters=frozenset(), cards=({"id": "m"},)
    )
    known: dict[str, Any] = {"healthy": True, "models": served, "role": Role.ENCODE}
    return Instance(id=InstanceId(f"http://{alias}:1"), alias=alias, **(known | fields))


def explained(*encoders: Instance, seen: EncodedItems) -> Any:
    image = {"type": "image_url", "image_url": {"url": "data:,cat"}}
    asked = GenerateRequest(
        request_id="r",
        endpoint=Endpoint.CHAT,
        body={"messages": [{"role": "user", "content": [image]}]},
        raw_body=b"",
        headers=(),
        model="m",
        base_model="m",
        lora=None,
    )
    (key,) = [each.key for each in media_items(asked)]
    if seen.settings.reuse_s:
        seen.put(key, InstanceId("http://e1:1"), "handle", 0.0)
    return explain_encode(asked, Fleet(instances=encoders), seen, lambda _: 0, 1.0)


def test_who_would_encode_is_explained() -> None:
    """Nobody asked, nobody there, anyone, or the one that has it."""
    fresh, kept = EncodedItems(EncodeSettings(reuse_s=0)), EncodedItems(EncodeSettings())
    e0, e1, down = encoder("e0"), encoder("e1"), encoder("e0", healthy=False, models=None)

    def item(name: str | None, reason: str) -> dict[str, Any]:
        return {"items": [{"item": 0, "instance": name, "reason": reason}]}

    assert explained(seen=fresh) is None
    assert explained(down, seen=fresh) == item(None, "no_encode_instance")
    assert explained(e0, e1, seen=fresh) == item("e0", "least_loaded")
    assert explained(e0, e1, seen=kept) == item("e1", "reused")


def record(**fields: object) -> RequestRecord:
    """A finished request."""
    made = RequestRecord(request_id="r1", path="/v1/completions", arrived_s=10.0, model="secret")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_record_shows_predicted_chosen_and_delivered() -> None:
    """The three figures stand side by side."""
    leg = LegRecord(
        kind="decode", alias="a", overlap_tokens=32, started_s=10.5, first_byte_s=11.0, ended_s=12.0
    )
    leg.cached_tokens = 30

    shown = render_record(
        record(plan=PLAN, legs=[leg], available_tokens=64, chosen_tokens=32, ended_s=12.0)
    )

    assert shown["overlap_available_tokens"] == 64
    assert shown["overlap_chosen_tokens"] == 32
    assert shown["cached_tokens"] == 30
    assert shown["duration_s"] == 2.0
    assert shown["legs"][0]["first_byte_s"] == 0.5
    assert shown["why"] == explain_choice(BEST, (BEST, OTHER))


def test_record_shows_what_became_of_media() -> None:
    """Counts, who, and why; nothing where there was nothing to encode."""
    encode = EncodeRecord(items=3, encoded=1, reused=2, instances=["e0"])

    assert render_record(record())["encode"] is None
    assert render_record(record(encode=encode))["encode"] == {
        "reason": "encoded",
        "items": 3,
        "encoded": 1,
        "reused": 2,
        "local": 0,
        "instances": ["e0"],
    }


def test_unknown_model_names_are_not_kept() -> None:
    """Clients can send anything as a model."""
    assert render_record(record())["model"] is None
    assert render_record(record(base_model="m"))["model"] == "secret"


def test_request_without_a_plan_is_shown_as_such() -> None:
    """A refused request has a status, but no plan."""
    shown = render_record(record(status=404, error="model_not_found"))

    assert (shown["status"], shown["reason"], shown["why"]) == (404, None, None)


@given(st.lists(st.integers(0, 99)), st.integers(1, 5), st.integers(1, 7))
def test_log_keeps_the_last_ones(numbers: list[int], limit: int, count: int) -> None:
    """Law: the latest are the end of what was added, newest first, at most `limit`."""
    log = DecisionLog(limit=limit)
    for number in numbers:
        log.add(record(request_id=str(number)))

    latest: list[Mapping[str, object]] = list(log.latest(count))

    expected = [str(number) for number in reversed(numbers)][: min(limit, count)]
    assert [each["request_id"] for each in latest] == expected


def test_headers_tell_every_candidate_and_why_one_won() -> None:
    """The cheapest first, each with the terms of its cost."""
    assert dict(explain_headers(replace_choice(PLAN, considered=(OTHER, BEST)))) == {
        b"x-kvlb-why": b"a costs 0.3 less than b; the largest difference is `queue`: 0 against 0.3",
        b"x-kvlb-candidates": b"a/0 cost=0.1 overlap=16 predicted=32 queue=0 work=0.1; "
        b"b/0 cost=0.4 overlap=16 predicted=32 queue=0.3 work=0.1",
    }


def test_headers_tell_the_prefill_leg_apart() -> None:
    """If there is one."""
    plan = replace_choice(PLAN, prefill=OTHER, considered_prefill=(OTHER,))
    headers = dict(explain_headers(plan))

    assert headers[b"x-kvlb-prefill-why"] == b"b is the only candidate"
    assert headers[b"x-kvlb-prefill-candidates"].startswith(b"b/0 cost=0.4 ")


LEARNING = Learning(prefills=7, hand_overs=2, needed=3)


def test_times_that_are_not_compared_yet_say_what_is_missing() -> None:
    """In `/explain`, of a finished request, and in the headers of its answer."""
    plan = replace_choice(PLAN, learning=LEARNING)
    said = (
        "not compared by time yet, the limit pd.local_prefill_max_tokens decides: "
        "3 of 3 prefills and 2 of 3 hand-overs seen (only streams show one)"
    )

    assert render_plan(plan, PromptView())["ways"] == said
    assert render_record(record(plan=plan))["ways"] == said
    assert dict(explain_headers(plan))[b"x-kvlb-ways"] == said.encode()


def test_nothing_is_said_of_ways_where_there_is_one() -> None:
    """A mixed instance, a prompt that can't be split, an operator who decides otherwise."""
    assert render_plan(PLAN, PromptView())["ways"] is None
    assert render_record(record())["ways"] is None


def test_headers_hold_plain_characters_and_few_candidates() -> None:
    """A policy of somebody's own names its terms, and a fleet may be large."""
    many = [
        replace_choice(choice(f"e{number}", float(number)), terms={"a\r\nb": 1.0})
        for number in range(20)
    ]
    plan = replace_choice(PLAN, decode=many[0], considered=tuple(many))
    value = dict(explain_headers(plan))[b"x-kvlb-candidates"]

    assert value.count(b"; ") == SHOWN_CANDIDATES - 1
    assert b"a??b=1" in value
