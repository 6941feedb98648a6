"""The terms of the cost that stand alone, each as a figure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.load.ledger import RankLoad, RankRates
from balancer.core.routing.terms import (
    MemoryUse,
    eviction_s,
    queued_s,
    stall_weight,
    work_price,
)

RATES = RankRates(
    prefill_s_per_token=1e-3,
    fixed_s=0.01,
    step_s=0.02,
    step_s_per_request=0.001,
    output_tokens=100,
)


def queued(progress_s: float) -> float:
    load = RankLoad(
        oldest_queued_s=1.0,
        queued_tokens=500,
        head_tokens=200,
        head_progress_s=progress_s,
        rates=RATES,
    )
    return queued_s(load)


def test_the_queue_shrinks_as_its_head_gets_done() -> None:
    """By the time passed, but never by more than nine tenths of the head."""
    assert queued(0.0) == pytest.approx(0.51)
    assert queued(0.1) == pytest.approx(0.41)
    assert queued(9.0) == pytest.approx(0.51 - 0.9 * 0.21)
    assert queued_s(RankLoad(rates=RATES)) == 0


def test_a_full_decode_rank_makes_every_stalled_second_dearer() -> None:
    """Those who wait for memory wait longer; a mixed rank promised nothing."""
    assert stall_weight(0.0, on_decode=True) == 0.5
    assert stall_weight(0.5, on_decode=True) == pytest.approx(1.5)
    assert stall_weight(0.9, on_decode=False) == 0.15


def test_memory_share_counts_growth_and_stays_below_one() -> None:
    """Half the mean output for everybody in flight, and for the one that comes."""
    load = RankLoad(requests=3, rates=RATES)
    roomy = MemoryUse(active_tokens=100, need_tokens=100, capacity_tokens=1000)
    full = MemoryUse(active_tokens=900, need_tokens=900, capacity_tokens=1000)

    assert roomy.fullness(load).share == pytest.approx(0.4)
    assert full.fullness(load).share == 0.97


def test_work_costs_nobody_anything_on_an_idle_rank_but_the_least_price() -> None:
    """Arrivals that wait for it make it dearer, up to ten times where all time is sold."""
    idle, busy, drowned = (
        work_price(
            RankLoad(arrivals_per_s=arrivals, work_share=share, rates=RATES),
            queue_s=0.5,
            work_s=1.0,
            memory_share=0.0,
        )
        for arrivals, share in ((0, 0), (2, 0.5), (2, 7))
    )

    assert idle == 0.25
    assert busy == pytest.approx(0.25 + 2 * 1.01 / 0.5)
    assert drowned == pytest.approx(0.25 + 2 * 1.01 / 0.1)


def test_what_is_pushed_out_costs_its_prefill_as_far_as_it_is_asked_for_again() -> None:
    """Twice over: its next request waits, and so do those behind that one."""
    load = RankLoad(reuse_chance=0.25, free_tokens=300, rates=RATES)

    assert eviction_s(load, new_tokens=1100, work_price=1.0) == pytest.approx(2 * 0.25 * 0.8 * 2.0)


@pytest.mark.parametrize(
    ("chance", "free_tokens"), [(0.0, 0), (0.9, 5000)], ids=["nobody-asks", "room"]
)
def test_pushing_out_nothing_of_use_costs_nothing(chance: float, free_tokens: int) -> None:
    """Rooms that nobody uses, and blocks that nobody asks for."""
    load = RankLoad(reuse_chance=chance, free_tokens=free_tokens, rates=RATES)

    assert eviction_s(load, new_tokens=1100, work_price=1.0) == 0


@given(chance=st.floats(0, 1), new=st.integers(0, 10**5), free=st.integers(0, 10**5))
def test_the_price_of_evicting_rises_with_what_is_pushed_out(
    chance: float, new: int, free: int
) -> None:
    """And never pays for anything."""
    load = RankLoad(reuse_chance=chance, free_tokens=free, rates=RATES)
    less, more = (
        eviction_s(load, new_tokens=tokens, work_price=0.25) for tokens in (new, new + 1000)
    )

    assert 0 <= less <= more
