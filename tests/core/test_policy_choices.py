"""Single choices of policies: load, sessions, turns, ties."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.load.ledger import RankLoad
from balancer.core.routing.cost import LoadedCandidate, RequestShape
from balancer.core.routing.plan import Candidate, Choice
from balancer.core.routing.policies import named_policy, seeded_draw
from balancer.core.settings.routing import PolicyName
from indexer.core.types import InstanceId, RankId, Trust

POLICIES: Sequence[PolicyName] = get_args(PolicyName)


def candidate(number: int, *, overlap_tokens: int = 0, role: Role = Role.MIXED) -> Candidate:
    instance = Instance(id=InstanceId(f"http://e{number}:8000"), alias=f"e{number}", role=role)
    return Candidate(
        rank=RankId(instance.id, 0),
        instance=instance,
        overlap_tokens=overlap_tokens,
        predicted_tokens=overlap_tokens,
        trust=Trust.EXACT,
        block_size=16,
    )


def loaded(
    number: int,
    *,
    overlap_tokens: int = 0,
    requests: int = 0,
    decoding: int = 0,
    queued_tokens: int = 0,
    oldest_queued_s: float | None = None,
) -> LoadedCandidate:
    return LoadedCandidate(
        candidate=candidate(number, overlap_tokens=overlap_tokens),
        load=RankLoad(
            requests=requests,
            decoding=decoding,
            queued_tokens=queued_tokens,
            oldest_queued_s=oldest_queued_s,
            head_tokens=queued_tokens,
        ),
    )


def aliases(choices: Sequence[Choice]) -> list[str]:
    return [choice.candidate.instance.alias for choice in choices]


@pytest.mark.parametrize("name", ["kvlb", "prefix_overlap"])
def test_one_overloaded_rank_leaves_affinity_to_another_alone(name: PolicyName) -> None:
    """In flight [100, 2, 2, 2], the prefix on the third: it is chosen (F23)."""
    candidates = [
        loaded(0, requests=100, decoding=100),
        loaded(1, requests=2, decoding=2),
        loaded(2, requests=2, decoding=2, overlap_tokens=800),
        loaded(3, requests=2, decoding=2),
    ]

    choices = named_policy(name).choose(
        RequestShape(prompt_tokens=1000), candidates, seeded_draw(1)
    )

    assert aliases(choices)[0] == "e2"


def test_session_passes_over_a_full_rank_and_keeps_the_others() -> None:
    """Only the overloaded rank loses its session."""
    policy = named_policy("session")
    shape = RequestShape(prompt_tokens=100, session="s")
    even = [loaded(number, requests=2) for number in range(4)]
    home = aliases(policy.choose(shape, even, seeded_draw(1)))
    busy = [loaded(number, requests=100 if f"e{number}" == home[0] else 2) for number in range(4)]

    assert aliases(policy.choose(shape, busy, seeded_draw(1)))[0] == home[1]
    assert aliases(policy.choose(shape, even, seeded_draw(2))) == home


def test_session_moves_little_when_a_rank_joins() -> None:
    """A fifth rank takes about a fifth of the sessions, and no session moves among the rest."""
    policy = named_policy("session")
    before, after = {}, {}
    for session in map(str, range(200)):
        shape = RequestShape(prompt_tokens=100, session=session)
        before[session] = aliases(policy.choose(shape, [loaded(n) for n in range(4)], len_draw))[0]
        after[session] = aliases(policy.choose(shape, [loaded(n) for n in range(5)], len_draw))[0]

    moved = {session for session in before if before[session] != after[session]}
    assert {after[session] for session in moved} == {"e4"}
    assert 20 <= len(moved) <= 60


def len_draw(rank: RankId) -> float:
    return float(len(rank.instance))


def test_session_without_a_session_goes_by_load() -> None:
    """There is nothing to hash."""
    candidates = [loaded(0, requests=3), loaded(1, requests=1)]

    choices = named_policy("session").choose(
        RequestShape(prompt_tokens=100), candidates, seeded_draw(1)
    )

    assert aliases(choices) == ["e1", "e0"]


def unscored(session: str | None) -> RequestShape:
    return RequestShape(prompt_tokens=1000, session=session, is_scored=False)


def test_unknown_prompts_of_a_session_stay_together() -> None:
    """While nobody is busy; other sessions have other homes, and one that joins moves few."""
    policy = named_policy("kvlb")
    homes: dict[str, str] = {}
    for session in map(str, range(40)):
        chosen = set()
        for seed in range(3):
            choices = policy.choose(
                unscored(session), [loaded(n) for n in range(4)], seeded_draw(seed)
            )
            policy.chosen(choices[0].candidate.rank)
            chosen.add(aliases(choices)[0])
        assert len(chosen) == 1
        homes[session] = chosen.pop()

    assert set(homes.values()) == {"e0", "e1", "e2", "e3"}


def test_a_home_is_worth_no_more_than_the_prompt() -> None:
    """A queue of more than that, and the session is served elsewhere; a choice says if that decided."""
    policy = named_policy("kvlb")
    idle = [loaded(number) for number in range(4)]
    home = aliases(policy.choose(unscored("s"), idle, seeded_draw(1)))[0]

    def chosen_with(queued_tokens: int) -> tuple[str, bool]:
        busy = [
            loaded(number, requests=1, queued_tokens=queued_tokens, oldest_queued_s=0.0)
            if f"e{number}" == home
            else loaded(number)
            for number in range(4)
        ]
        chosen = policy.choose(unscored("s"), busy, seeded_draw(1))[0]
        return chosen.candidate.instance.alias, chosen.is_home

    assert chosen_with(500) == (home, True)
    elsewhere, is_home = chosen_with(5000)
    assert elsewhere != home
    assert not is_home


def test_what_is_known_needs_no_hint() -> None:
    """The cost of a scored prompt decides, and without a session there is nothing to go by."""
    policy = named_policy("kvlb")
    candidates = [loaded(number, requests=number, decoding=number) for number in range(4)]
    scored = RequestShape(prompt_tokens=1000, session="3")
    chosen = [
        aliases(policy.choose(shape, candidates, seeded_draw(1)))[0]
        for shape in (scored, unscored(None))
    ]

    assert chosen == ["e0", "e0"]


def test_session_names_may_hold_lone_surrogates() -> None:
    """JSON allows them; they are hashed, not printed."""
    shape = RequestShape(prompt_tokens=100, session="\ud800")

    assert named_policy("session").choose(shape, [loaded(0)], seeded_draw(1))


def test_round_robin_takes_turns_whatever_was_only_explained() -> None:
    """Each rank once per round; choosing without `chosen` takes no turn."""
    policy = named_policy("round_robin")
    candidates = [loaded(number) for number in range(3)]
    shape = RequestShape(prompt_tokens=100)
    taken: list[str] = []
    for turn in range(6):
        policy.choose(shape, candidates, seeded_draw(turn + 100))
        choice = policy.choose(shape, candidates, seeded_draw(turn))[0]
        policy.chosen(choice.candidate.rank)
        taken.append(choice.candidate.instance.alias)

    assert sorted(taken[:3]) == ["e0", "e1", "e2"]
    assert taken[3:] == taken[:3]


def test_least_loaded_ignores_the_cache() -> None:
    """Fewest requests, then fewest queued tokens."""
    candidates = [
        loaded(0, requests=2, overlap_tokens=90),
        loaded(1, requests=1, queued_tokens=50),
        loaded(2, requests=1, queued_tokens=10),
    ]

    choices = named_policy("least_loaded").choose(
        RequestShape(prompt_tokens=100), candidates, seeded_draw(1)
    )

    assert aliases(choices) == ["e2", "e1", "e0"]


@given(
    name=st.sampled_from(POLICIES),
    loads=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 16, 64])), min_size=1, max_size=6
    ),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**60),
)
def test_permuting_candidates_changes_nothing(
    name: PolicyName, loads: list[tuple[int, int]], order: Random, seed: int
) -> None:
    """The order in which candidates are listed never decides."""
    candidates = [
        loaded(number, requests=requests, overlap_tokens=overlap)
        for number, (requests, overlap) in enumerate(loads)
    ]
    shuffled = list(candidates)
    order.shuffle(shuffled)
    shape = RequestShape(prompt_tokens=100, session="s")

    def chosen(given_order: list[LoadedCandidate]) -> list[str]:
        return aliases(named_policy(name).choose(shape, given_order, seeded_draw(seed)))

    assert chosen(candidates) == chosen(shuffled)


@pytest.mark.parametrize("name", POLICIES)
def test_ties_spread(name: PolicyName) -> None:
    """Equal candidates share by chance what is equal."""
    wins: Counter[str] = Counter()
    for seed in range(300):
        shape = RequestShape(prompt_tokens=100, session=str(seed))
        choices = named_policy(name).choose(
            shape, [loaded(number) for number in range(3)], seeded_draw(seed)
        )
        wins[aliases(choices)[0]] += 1

    assert min(wins.values()) > 60


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_to_choose_from_is_no_choice(name: PolicyName) -> None:
    """An empty list in, an empty list out."""
    policy = named_policy(name)
    policy.chosen(candidate(0).rank)

    assert policy.choose(RequestShape(prompt_tokens=1), [], seeded_draw(1)) == []
