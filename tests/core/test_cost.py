"""The cost formula, term by term."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.load.ledger import RankLoad, RankRates, TransferRates
from balancer.core.routing.cost import LoadedCandidate, RequestShape, estimate_all
from balancer.core.routing.plan import Candidate, Choice
from balancer.core.routing.terms import MemoryUse, eviction_s, memory_s, work_price
from balancer.core.routing.ways import Offer
from indexer.core.types import InstanceId, RankId

RATES = RankRates(
    prefill_s_per_token=1e-3,
    fixed_s=0.01,
    step_s=0.02,
    step_s_per_request=0.001,
    output_tokens=101,
)
SHAPE = RequestShape(prompt_tokens=1000)


def loaded(
    load: RankLoad,
    *,
    overlap_tokens: int = 0,
    predicted_tokens: int = 0,
    loading_tokens: float = 0.0,
    role: Role = Role.MIXED,
    offer_s: float | None = None,
    may_local: bool = True,
    memory: MemoryUse | None = None,
) -> LoadedCandidate:
    instance = Instance(id=InstanceId("http://e0:8000"), alias="e0", role=role)
    return LoadedCandidate(
        candidate=Candidate(
            rank=RankId(instance.id, 0),
            instance=instance,
            overlap_tokens=overlap_tokens,
            predicted_tokens=predicted_tokens,
            loading_tokens=loading_tokens,
        ),
        load=load,
        memory=memory,
        offers=() if offer_s is None else (offer(offer_s),),
        may_local=may_local,
    )


def offer(cost_s: float, alias: str = "p0") -> Offer:
    instance = Instance(id=InstanceId(f"http://{alias}:8000"), alias=alias, role=Role.PREFILL)
    candidate = Candidate(rank=RankId(instance.id, 0), instance=instance)
    return Offer(
        prefill=Choice(candidate=candidate, cost_s=cost_s),
        transfer=TransferRates(fixed_s=0.01, s_per_token=1e-4),
    )


def estimate(candidate: LoadedCandidate, shape: RequestShape = SHAPE) -> Choice:
    return estimate_all(shape, [candidate])[0]


def test_an_idle_rank_costs_its_work_and_its_steps() -> None:
    """Every term of a request nobody else disturbs."""
    terms = estimate(loaded(RankLoad(rates=RATES), predicted_tokens=200)).terms

    assert terms == pytest.approx(
        {
            "queue": 0,
            "fixed": 0.01,
            "work": 0.8,
            "delay": 0.2,
            "stall": 0,
            "in_flight": 0.3 * 100 * 0.021,
            "recent": 0,
        }
    )


def test_the_cost_is_the_sum_of_its_terms() -> None:
    """Nothing decides that explain doesn't show."""
    choice = estimate(loaded(RankLoad(rates=RATES, decoding=3, requests=3)))

    assert choice.cost_s == pytest.approx(sum(choice.terms.values()))


def test_the_longer_of_both_overlaps_counts() -> None:
    """Predicted blocks are worth what held ones are."""
    held = estimate(loaded(RankLoad(rates=RATES), overlap_tokens=600))
    predicted = estimate(loaded(RankLoad(rates=RATES), predicted_tokens=600))

    assert held.terms == predicted.terms


def test_overlap_beyond_the_prompt_is_no_negative_work() -> None:
    """A guessed length may be too short."""
    assert estimate(loaded(RankLoad(rates=RATES), overlap_tokens=5000)).terms["work"] == 0


def test_work_is_dearer_where_many_arrive() -> None:
    """The price of work rises with arrivals and with the share of time already sold.

    Who arrives while it is computed waits for half of it, on average.
    """
    idle = estimate(loaded(RankLoad(rates=RATES))).terms["delay"]
    visited = estimate(loaded(RankLoad(arrivals_per_s=2, rates=RATES))).terms["delay"]
    busy = estimate(loaded(RankLoad(arrivals_per_s=2, work_share=0.8, rates=RATES)))
    drowned = estimate(loaded(RankLoad(arrivals_per_s=2, work_share=5.0, rates=RATES)))

    assert idle == pytest.approx(0.25)
    assert visited == pytest.approx(0.25 + 2 * 0.51)
    assert busy.terms["delay"] == pytest.approx(0.25 + 2 * 0.51 / 0.2)
    assert drowned.terms["delay"] == pytest.approx(0.25 + 2 * 0.51 / 0.1)


@pytest.mark.parametrize(("role", "stall"), [(Role.MIXED, 0.15), (Role.DECODE, 0.5)])
def test_prefill_beside_decodes_stalls_them(role: Role, stall: float) -> None:
    """More so on an instance that promised to decode only."""
    choice = estimate(loaded(RankLoad(decoding=4, rates=RATES), role=role))

    assert choice.terms["stall"] == pytest.approx(stall * 4 * 1.0)


def test_a_remote_prefill_replaces_the_work_here() -> None:
    """Its price, the transfer of what is missing, and the first step."""
    choice = estimate(
        loaded(
            RankLoad(requests=2, rates=RATES), predicted_tokens=400, offer_s=0.3, may_local=False
        )
    )

    assert choice.terms == pytest.approx(
        {
            "prefill": 0.3,
            "transfer": 0.01 + 600e-4,
            "step": 0.022,
            "in_flight": 0.3 * 100 * 0.025,
            "recent": 0,
        }
    )
    assert choice.prefill is not None
    assert choice.other is None


@pytest.mark.parametrize(
    ("held_tokens", "is_remote"), [(0, True), (900, False)], ids=["cold", "warm"]
)
def test_of_two_open_ways_the_cheaper_one_is_taken(held_tokens: int, is_remote: bool) -> None:
    """What the other one would have cost stays in the choice."""
    candidate = loaded(
        RankLoad(rates=RATES), predicted_tokens=held_tokens, role=Role.DECODE, offer_s=0.4
    )
    choice = estimate(candidate)
    other = choice.other

    assert (choice.prefill is not None) is is_remote
    assert other is not None
    assert other.remote is not is_remote
    assert other.cost_s == pytest.approx(sum(other.terms.values()))
    assert choice.cost_s - choice.terms["in_flight"] <= other.cost_s


def test_memory_costs_nothing_where_its_size_is_unknown() -> None:
    """The term is left out, not 0."""
    assert "memory" not in estimate(loaded(RankLoad(rates=RATES))).terms


def test_memory_that_runs_out_is_waited_for() -> None:
    """What is missing, at the pace at which decodes free what is in use."""
    rates = RankRates(output_tokens=100, decode_s=4.0)
    load = RankLoad(requests=1, rates=rates)
    full = MemoryUse(active_tokens=900, need_tokens=300, capacity_tokens=1000)
    roomy = MemoryUse(active_tokens=900, need_tokens=300, capacity_tokens=100_000)

    congestion_s = 0.3 * 4.0 * (400 / 1000) * 0.97 / 0.03
    assert memory_s(load, full, full.fullness(load)) == pytest.approx(
        4.0 * 300 / 900 + congestion_s
    )
    assert memory_s(load, roomy, roomy.fullness(load)) == pytest.approx(
        0.3 * 4.0 * (400 / 1e5) * 0.013 / 0.987
    )
    assert estimate(loaded(load, memory=full)).terms["memory"] == memory_s(
        load, full, full.fullness(load)
    )


def test_what_is_pushed_out_is_priced_as_work_is() -> None:
    """With what the rank lacks of the prompt, and the answer it is expected to give."""
    load = RankLoad(
        arrivals_per_s=2, work_share=0.5, reuse_chance=0.5, free_tokens=100, rates=RATES
    )
    shape = RequestShape(prompt_tokens=1000, max_output_tokens=50)
    price = work_price(load, queue_s=0, work_s=0.4, memory_share=0)

    assert estimate(loaded(load, overlap_tokens=600), shape).terms["eviction"] == pytest.approx(
        eviction_s(load, new_tokens=450, work_price=price)
    )


def test_where_nothing_is_asked_for_again_no_eviction_is_named() -> None:
    """Most decisions of a young fleet."""
    assert "eviction" not in estimate(loaded(RankLoad(rates=RATES))).terms


def test_loading_from_a_slower_tier_takes_its_time_and_nobody_elses() -> None:
    """Between computing it anew and having it on the GPU; nothing else changes."""
    load = RankLoad(requests=2, decoding=2, rates=RATES)
    on_gpu = estimate(loaded(load, overlap_tokens=600))
    on_cpu = estimate(loaded(load, overlap_tokens=600, loading_tokens=60))

    assert on_cpu.terms == {**on_gpu.terms, "loading": 0.06}
    assert on_gpu.cost_s < on_cpu.cost_s < estimate(loaded(load)).cost_s


@pytest.mark.parametrize(("limit", "steps"), [(1, 0), (11, 10), (5000, 100)])
def test_a_short_answer_cares_little_for_decodes(limit: int, steps: int) -> None:
    """A limit below the fleet's mean length counts."""
    shape = RequestShape(prompt_tokens=1000, max_output_tokens=limit)

    choice = estimate(loaded(RankLoad(rates=RATES)), shape)

    assert choice.terms["in_flight"] == pytest.approx(0.3 * steps * 0.021)


LAZY_S = 100.0
"""Recent work of each of three ranks that did less than a fourth."""


def among_lazy(first: LoadedCandidate, *, dear: RankLoad) -> list[Choice]:
    """The first of four candidates, three of which are alike."""
    return estimate_all(SHAPE, [first, *(loaded(dear) for _ in range(3))])


def test_low_prices_of_a_rank_over_its_share_count_less() -> None:
    """Where long prompts go nothing lasts, so nothing there looks dear: they would all go there."""
    dear = RankLoad(recent_work_s=LAZY_S, reuse_chance=0.5, rates=RATES)

    def evenness_s(recent_work_s: float) -> float:
        cheap = loaded(RankLoad(recent_work_s=recent_work_s, rates=RATES))
        return among_lazy(cheap, dear=dear)[0].terms.get("evenness", 0.0)

    found = among_lazy(loaded(RankLoad(recent_work_s=140, rates=RATES)), dear=dear)
    prices_s = [each.terms["delay"] + each.terms.get("eviction", 0.0) for each in found]

    assert evenness_s(106) == 0  # less than a twentieth over
    assert 0 < evenness_s(110) < evenness_s(121)
    assert evenness_s(140) == evenness_s(500) == pytest.approx(sum(prices_s) / 4 - prices_s[0])
    assert not any("evenness" in each.terms for each in found[1:])


def test_dear_ranks_over_their_share_get_no_discount() -> None:
    """Evenness takes a low price away, and never a high one."""
    dear = RankLoad(recent_work_s=LAZY_S, rates=RATES)
    busy = loaded(RankLoad(recent_work_s=200, reuse_chance=0.5, rates=RATES))

    assert "evenness" not in among_lazy(busy, dear=dear)[0].terms


def test_who_holds_the_prompt_keeps_it_however_busy() -> None:
    """Prices are compared, not costs: what little it has to compute is cheap at any of them."""
    dear = RankLoad(recent_work_s=LAZY_S, reuse_chance=0.5, rates=RATES)
    holder = loaded(RankLoad(recent_work_s=400, rates=RATES), overlap_tokens=900)
    whole = loaded(RankLoad(recent_work_s=400, rates=RATES), overlap_tokens=1000)

    found = among_lazy(holder, dear=dear)

    assert found[0].terms["evenness"] == pytest.approx(
        found[0].terms["work"] * evenness_price(found) - found[0].terms["delay"]
    )
    assert min(found, key=lambda each: each.cost_s) is found[0]
    assert "evenness" not in among_lazy(whole, dear=dear)[0].terms


def evenness_price(found: list[Choice]) -> float:
    """What a second of work costs others on the mean candidate."""
    others_s = sum(each.terms["delay"] + each.terms.get("eviction", 0.0) for each in found)
    return others_s / sum(each.terms["work"] for each in found)


def test_ranks_that_compute_nothing_have_no_prices() -> None:
    """All of them hold the prompt."""
    busy = loaded(RankLoad(recent_work_s=400, rates=RATES), overlap_tokens=1000)
    idle = loaded(RankLoad(rates=RATES), overlap_tokens=1000)

    assert not any("evenness" in each.terms for each in estimate_all(SHAPE, [busy, idle]))


def test_recent_work_breaks_ties_only() -> None:
    """All recent work on one of two ranks is worth 0.6 of a prompt's work at most."""
    shape = RequestShape(prompt_tokens=1000)
    busy, idle = estimate_all(
        shape,
        [loaded(RankLoad(recent_work_s=1000, rates=RATES)), loaded(RankLoad(rates=RATES))],
    )

    gap_s = busy.terms["recent"] - idle.terms["recent"]
    assert gap_s == pytest.approx(0.6, rel=0.01)


def test_no_candidates_cost_nothing() -> None:
    """And divide by nothing."""
    assert estimate_all(SHAPE, []) == []


loads = st.builds(
    RankLoad,
    requests=st.integers(0, 500),
    queued_tokens=st.integers(0, 10**6),
    decoding=st.integers(0, 500),
    arrivals_per_s=st.floats(0, 1000),
    work_share=st.floats(0, 50),
    recent_work_s=st.floats(0, 1e5),
)


@given(load=loads, overlap=st.integers(0, 900), more=st.integers(1, 99))
def test_more_overlap_never_costs_more(load: RankLoad, overlap: int, more: int) -> None:
    """All else equal, holding more of the prompt is cheaper."""
    less = estimate(loaded(load, overlap_tokens=overlap))
    better = estimate(loaded(load, overlap_tokens=overlap + more))

    assert better.cost_s <= less.cost_s
