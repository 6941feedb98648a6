"""Between equals: flat interleaved order over (instance, rank) slots, engines of unequal size."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.snapshot import Instance
from balancer.core.load.ledger import RankLoad
from balancer.core.routing import policies
from balancer.core.routing.cost import LoadedCandidate, RequestShape
from balancer.core.routing.plan import Candidate
from balancer.core.routing.policies import Policy, Turns, named_policy, seeded_draw
from balancer.core.settings.routing import PolicyName
from indexer.core.types import InstanceId, RankId, Trust

NAMES: Sequence[PolicyName] = get_args(PolicyName)
SHAPE = RequestShape(prompt_tokens=100)


def idle(sizes: Sequence[int], *, rank_base: int = 0) -> list[LoadedCandidate]:
    """Every rank of instances with so many ranks each, nothing cached, nothing running."""
    found = []
    for number, size in enumerate(sizes):
        ranks = tuple(range(rank_base, rank_base + size))
        instance = Instance(
            id=InstanceId(f"http://e{number}:1"),
            alias=f"e{number}",
            ranks=ranks,
            rank_base=rank_base,
        )
        for rank in ranks:
            candidate = Candidate(
                rank=RankId(instance.id, rank),
                instance=instance,
                overlap_tokens=0,
                predicted_tokens=0,
                trust=Trust.EXACT,
                block_size=16,
            )
            found.append(LoadedCandidate(candidate=candidate, load=RankLoad()))
    return found


def choose(policy: Policy, candidates: Sequence[LoadedCandidate], seed: int) -> RankId:
    chosen = policy.choose(SHAPE, candidates, seeded_draw(seed))[0].candidate.rank
    policy.chosen(chosen)
    return chosen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 4), (3, 1, 2), (4,)], ids=str)
@pytest.mark.parametrize("rank_base", [0, 8])
def test_slots_are_taken_in_flat_interleaved_order(
    name: PolicyName, sizes: tuple[int, ...], rank_base: int
) -> None:
    """First every instance's first rank, then every second one; those with fewer are passed over."""
    policy, candidates = named_policy(name), idle(sizes, rank_base=rank_base)

    taken = [choose(policy, candidates, seed) for seed in range(2 * len(candidates))]
    first, second = taken[: len(candidates)], taken[len(candidates) :]

    locals_ = [rank.rank - rank_base for rank in first]
    assert locals_ == sorted(locals_)
    assert Counter(locals_) == Counter(n for size in sizes for n in range(size))
    assert len(set(first)) == len(candidates)
    assert second == first


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from(NAMES),
    st.integers(0, 2**32),
)
def test_order_of_candidates_changes_nothing(sizes: list[int], name: PolicyName, seed: int) -> None:
    """Whoever lists the fleet otherwise decides alike."""
    candidates = idle(sizes)
    shuffled = list(candidates)
    Random(seed).shuffle(shuffled)  # noqa: S311 - a test's dice
    one, other = named_policy(name), named_policy(name)

    for step in range(len(candidates) + 2):
        assert choose(one, candidates, seed + step) == choose(other, shuffled, seed + step)


def test_explaining_takes_nobodys_turn() -> None:
    """Only `chosen` does."""
    policy, candidates = named_policy("kvlb"), idle((1, 1))

    plans = [policy.choose(SHAPE, candidates, seeded_draw(7))[0] for _ in range(3)]

    assert all(a.candidate.rank == b.candidate.rank for a, b in pairwise(plans))


def test_cost_still_decides_between_unequals() -> None:
    """A turn is no reason to go where more is to be computed."""
    policy, candidates = named_policy("kvlb"), idle((1, 1))
    busy = LoadedCandidate(candidate=candidates[0].candidate, load=RankLoad(requests=3))

    taken = {choose(policy, [busy, candidates[1]], seed) for seed in range(4)}

    assert taken == {candidates[1].candidate.rank}


def test_memory_of_turns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those chosen longest ago are forgotten first."""
    monkeypatch.setattr(policies, "MAX_TURNS", 2)
    turns, candidates = Turns(), idle((1, 1, 1))
    for each in candidates:
        turns.chosen(each.candidate.rank)

    assert [turns.place(each.candidate)[0] for each in candidates] == [0, 2, 3]
