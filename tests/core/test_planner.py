"""Plans: decode first, then whether and where to prefill."""

import typing
from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.errors import NoInstanceError, OverloadedError
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.load.ledger import RankLoad, TransferRates
from balancer.core.routing.cost import LoadedCandidate, RequestShape
from balancer.core.routing.plan import Candidate, Reason, RoutePlan
from balancer.core.routing.planner import Planner
from balancer.core.routing.policies import named_policy, seeded_draw
from balancer.core.routing.prefill_policy import SplitFacts
from balancer.core.settings.routing import PdSettings, PolicyName
from indexer.core.types import InstanceId, RankId

DRAW = seeded_draw(7)
NIXL = frozenset({"nixl"})


def loaded(
    alias: str,
    role: Role,
    *,
    held_tokens: int = 0,
    connector: str = "nixl",
    requests: int = 0,
    queued_tokens: int = 0,
) -> LoadedCandidate:
    instance = Instance(
        id=InstanceId(f"http://{alias}:8000"), alias=alias, role=role, connector=connector
    )
    return LoadedCandidate(
        candidate=Candidate(
            rank=RankId(instance.id, 0), instance=instance, predicted_tokens=held_tokens
        ),
        load=RankLoad(
            requests=requests,
            decoding=requests,
            queued_tokens=queued_tokens,
            head_tokens=queued_tokens,
            oldest_queued_s=0.0 if queued_tokens else None,
        ),
    )


def plan(
    decode: Sequence[LoadedCandidate],
    prefill: Sequence[LoadedCandidate] = (),
    *,
    tokens: int = 4000,
    facts: SplitFacts | None = None,
    pd: PdSettings | None = None,
    policy: PolicyName = "kvlb",
    slow: tuple[str, ...] = (),
) -> RoutePlan:
    """`slow`: prefill instances that hand over slowly."""

    def transfer(source: RankId, _target: RankId) -> TransferRates:
        is_slow = any(source.instance == f"http://{alias}:8000" for alias in slow)
        return TransferRates(s_per_token=1e-3) if is_slow else TransferRates()

    planner = Planner(policy=named_policy(policy), pd=pd or PdSettings(), transfer=transfer)
    shape = RequestShape(prompt_tokens=tokens)
    facts = facts or SplitFacts(prompt_tokens=tokens, prefill_expected=connectors_of(prefill))
    return planner.plan(shape, facts, decode, prefill, DRAW)


def connectors_of(prefill: Sequence[LoadedCandidate]) -> frozenset[str]:
    return frozenset(each.candidate.instance.connector for each in prefill) - {"none"}


def route(made: RoutePlan) -> tuple[str | None, str]:
    source = made.prefill.candidate.instance.alias if made.prefill else None
    return source, made.decode.candidate.instance.alias


def test_a_cold_prompt_takes_a_prefill_leg() -> None:
    """On the cheapest prefill rank; everything considered is in the plan."""
    made = plan(
        [loaded("d0", Role.DECODE)],
        [loaded("p0", Role.PREFILL, queued_tokens=9000), loaded("p1", Role.PREFILL)],
    )

    assert route(made) == ("p1", "d0")
    assert made.reason is Reason.REMOTE_PREFILL
    assert made.prompt_tokens == 4000
    assert [each.candidate.instance.alias for each in made.considered_prefill] == ["p1", "p0"]


def test_the_decode_instance_that_holds_the_prompt_skips_the_leg() -> None:
    """Its cost is the little it lacks, so it also wins over a cold one."""
    made = plan(
        [loaded("d0", Role.DECODE), loaded("d1", Role.DECODE, held_tokens=3900)],
        [loaded("p0", Role.PREFILL)],
    )

    assert route(made) == (None, "d1")
    assert made.reason is Reason.DECODE_HAS_CACHE
    assert made.considered_prefill == ()


def test_the_prefill_rank_that_holds_the_prompt_is_preferred() -> None:
    """Where prefill runs, the prompt's blocks count as they do elsewhere."""
    made = plan(
        [loaded("d0", Role.DECODE)],
        [loaded("p0", Role.PREFILL), loaded("p1", Role.PREFILL, held_tokens=3000)],
    )

    assert route(made) == ("p1", "d0")


def test_a_remote_candidate_is_weighed_with_the_cheapest_prefill() -> None:
    """Not with its own prefill, which it won't do."""
    made = plan([loaded("d0", Role.DECODE)], [loaded("p0", Role.PREFILL)])

    assert made.prefill is not None
    assert made.decode.terms["prefill"] == made.prefill.cost_s
    assert "work" not in made.decode.terms


def test_a_mixed_instance_competes_in_the_same_seconds() -> None:
    """It wins idle (no transfer) and loses with a queue."""
    prefill = [loaded("p0", Role.PREFILL)]
    idle = plan([loaded("d0", Role.DECODE), loaded("m0", Role.MIXED)], prefill)
    queued = plan(
        [loaded("d0", Role.DECODE), loaded("m0", Role.MIXED, queued_tokens=20000)], prefill
    )

    assert (route(idle), idle.reason) == ((None, "m0"), Reason.AGGREGATED)
    assert route(queued) == ("p0", "d0")


KNOWN = SplitFacts(prompt_tokens=4000, prefill_expected=frozenset({"nixl"}), rates_known=True)


def test_with_known_rates_an_idle_decode_instance_spares_the_leg() -> None:
    """However long the prompt is, if nobody decodes there and the prefill instance is busy."""
    made = plan(
        [loaded("d0", Role.DECODE)],
        [loaded("p0", Role.PREFILL, queued_tokens=20_000)],
        facts=KNOWN,
    )

    assert (route(made), made.reason) == ((None, "d0"), Reason.LOCAL_FASTER)
    assert made.considered_prefill == ()
    assert made.decode.other is not None
    assert made.decode.other.remote


def test_with_known_rates_a_busy_decode_instance_is_spared() -> None:
    """Even a prompt below the limit goes elsewhere where it would stall many."""
    made = plan(
        [loaded("d0", Role.DECODE, held_tokens=3800, requests=100)],
        [loaded("p0", Role.PREFILL, held_tokens=3900)],
        facts=KNOWN,
    )

    assert (route(made), made.reason) == (("p0", "d0"), Reason.REMOTE_PREFILL)
    assert made.decode.other is not None
    assert not made.decode.other.remote


def test_a_slow_link_sends_the_prompt_to_another_prefill_rank() -> None:
    """Though its own cost is a little more."""
    prefill = [loaded("p0", Role.PREFILL), loaded("p1", Role.PREFILL, held_tokens=100)]

    made = plan([loaded("d0", Role.DECODE, requests=100)], prefill, facts=KNOWN, slow=("p1",))

    assert route(made) == ("p0", "d0")
    assert {each.candidate.instance.alias for each in made.considered_prefill} == {"p0", "p1"}


def test_policies_that_go_by_something_else_keep_their_order() -> None:
    """The link decides whether, not where."""
    prefill = [loaded("p0", Role.PREFILL, requests=1), loaded("p1", Role.PREFILL)]
    decode = [loaded("d0", Role.DECODE, requests=100)]

    made = plan(decode, prefill, facts=KNOWN, slow=("p1",), policy="least_loaded")

    assert route(made) == ("p1", "d0")


@pytest.mark.parametrize("connector", ["none", "other"])
def test_prefill_needs_the_same_connector(connector: str) -> None:
    """`none` hands over nothing, even to itself."""
    made = plan(
        [loaded("d0", Role.DECODE, connector=connector)],
        [loaded("p0", Role.PREFILL), loaded("p1", Role.PREFILL, connector="none")],
    )

    assert (route(made), made.reason) == ((None, "d0"), Reason.CONNECTOR_MISMATCH)


def test_each_decode_instance_gets_prefill_of_its_own_connector() -> None:
    """Two connectors may live in one fleet while it migrates."""
    made = plan(
        [
            loaded("d0", Role.DECODE, connector="a", requests=9),
            loaded("d1", Role.DECODE, connector="b"),
        ],
        [
            loaded("p0", Role.PREFILL, connector="a"),
            loaded("p1", Role.PREFILL, connector="b", queued_tokens=100),
        ],
    )

    assert route(made) == ("p1", "d1")


def test_who_needs_no_prefill_leg_is_preferred_while_prefill_is_down() -> None:
    """Only the one that holds the prompt may serve it, whatever the policy."""
    facts = SplitFacts(prompt_tokens=4000, prefill_expected=frozenset({"nixl"}))
    decode = [loaded("d0", Role.DECODE), loaded("d1", Role.DECODE, held_tokens=3900, requests=9)]

    for policy in ("kvlb", "round_robin", "least_loaded"):
        made = plan(decode, facts=facts, policy=policy)
        assert route(made) == (None, "d1")


@pytest.mark.parametrize(
    ("is_full", "error"),
    [(False, NoInstanceError), (True, OverloadedError)],
    ids=["down", "full"],
)
def test_a_prompt_that_nobody_may_prefill_is_refused(is_full: bool, error: type[Exception]) -> None:
    """With the error that says whether to come back (F26, F36)."""
    facts = SplitFacts(
        prompt_tokens=4000, prefill_expected=frozenset({"nixl"}), prefill_full=is_full
    )

    with pytest.raises(error):
        plan([loaded("d0", Role.DECODE)], facts=facts)


def test_an_unscorable_prompt_has_no_tokens_in_its_plan() -> None:
    """Its guessed length weighs, and is nobody's business."""
    made = plan(
        [loaded("d0", Role.DECODE)],
        [loaded("p0", Role.PREFILL)],
        facts=SplitFacts(prompt_tokens=4000, scored=False),
    )

    assert made.prompt_tokens is None
    assert (made.reason, route(made)) == (Reason.UNSCORABLE, ("p0", "d0"))


def test_another_prefill_rank_replaces_the_one_that_failed() -> None:
    """The decode leg stays; None if no rank fits."""
    made = plan([loaded("d0", Role.DECODE)], [loaded("p0", Role.PREFILL)])
    planner = Planner(policy=named_policy("kvlb"), pd=PdSettings())
    shape = RequestShape(prompt_tokens=4000)

    replaced = planner.replace_prefill(
        made, shape, [loaded("p1", Role.PREFILL), loaded("p2", Role.PREFILL, requests=3)], DRAW
    )
    missing = planner.replace_prefill(
        made, shape, [loaded("p3", Role.PREFILL, connector="other")], DRAW
    )

    assert replaced is not None
    assert route(replaced) == ("p1", "d0")
    assert replaced.decode is made.decode
    assert missing is None


def test_a_connector_that_pairs_ranks_gets_the_same_one_on_both_sides() -> None:
    """Also where another rank of the prefill side is cheaper, and when one is replaced."""
    decode = [on_rank(loaded("d0", Role.DECODE), 1)]
    prefill = [
        on_rank(loaded("p0", Role.PREFILL), 0),
        on_rank(loaded("p1", Role.PREFILL, queued_tokens=9000), 1),
        on_rank(loaded("p2", Role.PREFILL, queued_tokens=9999), 1),
    ]
    facts = SplitFacts(prompt_tokens=4000, prefill_expected=NIXL, paired=NIXL)

    made = plan(decode, prefill, facts=facts)
    unpaired = plan(decode, prefill)
    replaced = Planner(policy=named_policy("kvlb"), pd=PdSettings()).replace_prefill(
        made, RequestShape(prompt_tokens=4000), [prefill[0], prefill[2]], DRAW, paired=True
    )

    assert (route(made), route(unpaired)) == (("p1", "d0"), ("p0", "d0"))
    assert replaced is not None
    assert route(replaced) == ("p2", "d0")


def test_a_rank_without_its_like_is_paired_with_the_cheapest() -> None:
    """Engines with unequal numbers of ranks serve all the same."""
    facts = SplitFacts(prompt_tokens=4000, prefill_expected=NIXL, paired=NIXL)

    made = plan([on_rank(loaded("d0", Role.DECODE), 3)], [loaded("p0", Role.PREFILL)], facts=facts)

    assert route(made) == ("p0", "d0")


def on_rank(candidate: LoadedCandidate, rank: int) -> LoadedCandidate:
    """The same load on another rank."""
    moved = RankId(candidate.candidate.instance.id, rank)
    return msgspec.structs.replace(
        candidate, candidate=msgspec.structs.replace(candidate.candidate, rank=moved)
    )


candidates = st.lists(
    st.tuples(
        st.sampled_from([Role.DECODE, Role.MIXED]),
        st.sampled_from([0, 0, 1600, 3900]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=5,
)
sources = st.lists(st.tuples(st.sampled_from([0, 1600]), st.integers(0, 2)), max_size=4)


@given(
    decode=candidates,
    prefill=sources,
    order=st.randoms(use_true_random=False),
    force=st.sampled_from(["auto", "local", "remote"]),
)
def test_permuting_candidates_does_not_change_the_plan(
    decode: list[tuple[Role, int, int]],
    prefill: list[tuple[int, int]],
    order: Random,
    force: str,
) -> None:
    """Same input, same plan; and a prefill leg only where a decode instance gets it."""
    answering = [
        loaded(f"d{number}", role, held_tokens=held, requests=requests)
        for number, (role, held, requests) in enumerate(decode)
    ]
    filling = [
        loaded(f"p{number}", Role.PREFILL, held_tokens=held, requests=requests)
        for number, (held, requests) in enumerate(prefill)
    ]
    pd = PdSettings(force=force)  # type: ignore[arg-type]
    facts = SplitFacts(prompt_tokens=4000)
    made = plan(answering, filling, facts=facts, pd=pd)
    order.shuffle(answering)
    order.shuffle(filling)

    assert plan(answering, filling, facts=facts, pd=pd) == made
    if made.prefill:
        assert made.decode.candidate.instance.role is Role.DECODE
        assert made.prefill.candidate.instance.role is Role.PREFILL


@given(
    mixed=st.lists(
        st.tuples(st.sampled_from([0, 1600, 3900]), st.integers(0, 2), st.sampled_from([0, 700])),
        min_size=1,
        max_size=6,
    ),
    prefill=sources,
    policy=st.sampled_from(typing.get_args(PolicyName)),
    scored=st.booleans(),
)
def test_without_decode_instances_the_short_way_makes_the_same_plan(
    mixed: list[tuple[int, int, int]],
    prefill: list[tuple[int, int]],
    policy: PolicyName,
    scored: bool,
) -> None:
    """Whatever prefill instances there are beside the mixed ones: nobody asks them."""
    answering = [
        loaded(f"m{number}", Role.MIXED, held_tokens=held, requests=requests, queued_tokens=queued)
        for number, (held, requests, queued) in enumerate(mixed)
    ]
    filling = [
        loaded(f"p{number}", Role.PREFILL, held_tokens=held, requests=requests)
        for number, (held, requests) in enumerate(prefill)
    ]
    facts = SplitFacts(prompt_tokens=4000, scored=scored, rates_known=True)
    long = plan(answering, filling, facts=facts, policy=policy)
    planner = Planner(policy=named_policy(policy), pd=PdSettings())

    short = planner.plan_whole(RequestShape(prompt_tokens=4000), answering, DRAW, scored=scored)

    assert short == long
