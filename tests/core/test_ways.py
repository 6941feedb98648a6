"""The two ways to a first token, term by term."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.load.ledger import RankLoad, RankRates, TransferRates
from balancer.core.routing.plan import Candidate, Choice
from balancer.core.routing.ways import (
    Offer,
    best_offer,
    local_terms,
    own_s,
    remote_terms,
    way_s,
)
from indexer.core.types import InstanceId, RankId

RATES = RankRates(
    prefill_s_per_token=1e-3,
    fixed_s=0.01,
    step_s=0.02,
    step_s_per_request=0.001,
    output_tokens=100,
)


def choice(alias: str, cost_s: float, **terms: float) -> Choice:
    instance = Instance(id=InstanceId(f"http://{alias}:8000"), alias=alias, role=Role.PREFILL)
    candidate = Candidate(rank=RankId(instance.id, 0), instance=instance)
    return Choice(candidate=candidate, cost_s=cost_s, terms=terms)


def offer(alias: str, cost_s: float, *, fixed_s: float = 0.01, s_per_token: float = 1e-4) -> Offer:
    return Offer(
        prefill=choice(alias, cost_s),
        transfer=TransferRates(fixed_s=fixed_s, s_per_token=s_per_token),
    )


def local(load: RankLoad, uncached_tokens: float = 1000, memory_share: float = 0.0) -> float:
    terms = local_terms(
        load,
        uncached_tokens=uncached_tokens,
        output_tokens=100,
        loading_tokens=0,
        memory_share=memory_share,
        role=Role.DECODE,
    )
    return sum(terms.values())


def test_full_memory_is_a_share_of_time_sold() -> None:
    """Its square stands beside the prefill work in the price of work."""
    load = RankLoad(arrivals_per_s=1, work_share=0.3, rates=RATES)
    terms = local_terms(
        load,
        uncached_tokens=1000,
        output_tokens=100,
        loading_tokens=0,
        memory_share=0.8,
        role=Role.DECODE,
    )

    assert terms["delay"] == pytest.approx(0.25 + 0.51 / (1 - 0.64))


def test_loading_is_named_only_where_there_is_some() -> None:
    """Most fleets have no slower tier."""
    load = RankLoad(rates=RATES)
    with_some, without = (
        local_terms(
            load,
            uncached_tokens=0,
            output_tokens=100,
            loading_tokens=tokens,
            memory_share=0,
            role=Role.MIXED,
        )
        for tokens in (60, 0)
    )

    assert with_some["loading"] == pytest.approx(0.06)
    assert "loading" not in without


def test_a_hand_over_takes_the_prefill_the_transfer_and_a_step() -> None:
    """The step is slowed by everybody in flight."""
    load = RankLoad(requests=3, rates=RATES)

    assert remote_terms(load, offer("p0", 0.3), uncached_tokens=500) == pytest.approx(
        {"prefill": 0.3, "transfer": 0.06, "step": 0.023}
    )


@pytest.mark.parametrize(
    ("role", "is_priced"), [(Role.MIXED, True), (Role.DECODE, False), (Role.PREFILL, False)]
)
def test_what_is_pushed_out_counts_on_mixed_ranks_only(role: Role, *, is_priced: bool) -> None:
    """Between prefill and decode ranks it made the slowest answers of a trace slower."""
    terms = local_terms(
        RankLoad(reuse_chance=0.5, rates=RATES),
        uncached_tokens=1000,
        output_tokens=100,
        loading_tokens=0,
        memory_share=0.0,
        role=role,
    )
    remote = remote_terms(
        RankLoad(reuse_chance=0.5, rates=RATES), offer("p0", 0.3), uncached_tokens=500
    )

    assert ("eviction" in terms) is is_priced
    assert "eviction" not in remote


def test_what_was_handed_over_waits_for_prompts_computed_there() -> None:
    """Beyond what prefill and transfer take anyway: engines admit nobody beside a long prompt."""
    load = RankLoad(oldest_queued_s=0.0, queued_tokens=2000, head_tokens=2000, rates=RATES)
    quick, slow = (
        Offer(
            prefill=choice("p0", 9.0, work=work_s, delay=5.0), transfer=TransferRates(fixed_s=0.5)
        )
        for work_s in (0.25, 4.0)
    )

    assert remote_terms(load, quick, uncached_tokens=0)["wait"] == pytest.approx(2.01 - 0.75)
    assert remote_terms(load, slow, uncached_tokens=0)["wait"] == 0


def test_a_slow_link_can_lose_to_a_dearer_prefill_rank() -> None:
    """The longer the prompt, the more the link counts."""
    slow, dear = offer("p0", 0.1, s_per_token=1e-3), offer("p1", 0.2)

    assert best_offer((slow, dear), 10) is slow
    assert best_offer((slow, dear), 1000) is dear
    assert best_offer((slow,), 1000) is slow


def test_own_seconds_leave_out_what_others_pay() -> None:
    """Of a remote way: what the prefill rank makes it wait, not what it makes others wait."""
    here = choice("d0", 9.0, queue=1, fixed=2, work=4, delay=8, stall=16, in_flight=32)
    source = choice("p0", 9.0, queue=1, fixed=2, work=4, delay=8)
    there = Choice(
        candidate=here.candidate,
        cost_s=9.0,
        terms={"prefill": 15.0, "transfer": 0.5, "step": 0.25, "recent": 64},
        prefill=source,
    )

    assert (own_s(here), way_s(here)) == (7, 31)
    assert (own_s(there), way_s(there)) == (7.75, 15.75)


loads = st.builds(
    RankLoad,
    requests=st.integers(0, 200),
    decoding=st.integers(0, 200),
    queued_tokens=st.integers(0, 10**6),
    arrivals_per_s=st.floats(0, 100),
    work_share=st.floats(0, 10),
    rates=st.just(RATES),
)


@given(
    load=loads,
    uncached=st.integers(0, 100_000),
    more=st.integers(1, 1000),
    share=st.floats(0, 0.97),
)
def test_local_prefill_gets_dearer_with_work_decodes_and_memory(
    load: RankLoad, uncached: int, more: int, share: float
) -> None:
    """Each on its own, all else equal."""
    here = local(load, uncached, share)

    assert local(load, uncached + more, share) > here
    assert local(load, uncached, min(0.97, share + 0.1)) >= here
    assert local(load, uncached, 0.0) <= here
