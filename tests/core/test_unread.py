"""Requests whose prompts nobody reads: which, where they go, and what is booked for them."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.errors import NoInstanceError, OverloadedError
from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.ledger import LegWork, RankLoad
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.request import Endpoint, GenerateRequest
from balancer.core.routing.candidates import MAX_GUESSED_TOKENS
from balancer.core.routing.cost import LoadedCandidate, RequestShape
from balancer.core.routing.plan import Candidate
from balancer.core.routing.policies import UnreadPolicy, named_policy, seeded_draw
from balancer.core.routing.unread import Sampling, unread_pool, unread_work, with_room
from balancer.core.settings.routing import PolicyName, RoutingSettings
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId

MODELS = ServedModels(base="m", aliases=frozenset({"m"}), adapters=frozenset(), cards=())
UNREAD_POLICIES: Sequence[PolicyName] = ("round_robin", "least_loaded")


def instance(
    alias: str, role: Role = Role.MIXED, connector: str = "none", ranks: int = 1
) -> Instance:
    return Instance(
        id=InstanceId(f"http://{alias}:8000"),
        alias=alias,
        role=role,
        models=MODELS,
        ranks=tuple(range(ranks)),
        connector=connector,
        healthy=True,
    )


def candidates(*names: str) -> list[Candidate]:
    each = [instance(name) for name in names]
    return [Candidate(rank=one.own_ranks[0], instance=one) for one in each]


def request(body: dict[str, object], raw_body: bytes = b"{}") -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        endpoint=Endpoint.COMPLETIONS,
        body=body,
        raw_body=raw_body,
        headers=(),
        model="m",
        base_model="m",
        lora=None,
    )


def unread_policy(name: PolicyName) -> UnreadPolicy:
    policy = named_policy(name)
    assert isinstance(policy, UnreadPolicy)
    return policy


@pytest.mark.parametrize("name", ["kvlb", "prefix_overlap", "session"])
def test_policies_that_ask_what_is_cached_say_so(name: PolicyName) -> None:
    """They have no way to choose without the prompt."""
    assert not isinstance(named_policy(name), UnreadPolicy)


@pytest.mark.parametrize("name", UNREAD_POLICIES)
@given(
    turns=st.lists(st.integers(0, 3), max_size=12),
    loads=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    seed=st.integers(0, 9),
)
def test_without_the_prompt_the_same_one_is_chosen(
    name: PolicyName,
    turns: list[int],
    loads: list[tuple[int, int]],
    order: list[int],
    seed: int,
) -> None:
    """`next_of` names whom `choose` puts first, whoever was chosen before and in whatever order."""
    ranks = [
        Candidate(rank=rank, instance=each)
        for each in (instance("a", ranks=2), instance("b", ranks=2))
        for rank in each.rank_ids()
    ]
    policy, draw = unread_policy(name), seeded_draw(seed)
    for turn in turns:
        policy.chosen(ranks[turn].rank)
    busy = {each.rank: load for each, load in zip(ranks, loads, strict=True)}
    shown = [ranks[place] for place in order]
    loaded = [
        LoadedCandidate(
            candidate=each,
            load=RankLoad(requests=busy[each.rank][0], queued_tokens=busy[each.rank][1]),
        )
        for each in shown
    ]

    found = policy.next_of(shown, busy.__getitem__, draw)

    assert found == policy.choose(RequestShape(prompt_tokens=9), loaded, draw)[0].candidate


@pytest.mark.parametrize(
    ("fleet", "is_read"),
    [
        pytest.param((instance("a"), instance("b")), False, id="mixed"),
        pytest.param((instance("a", connector="pulls"),), True, id="fetches-blocks-of-peers"),
        pytest.param(
            (instance("p", Role.PREFILL), instance("d", Role.DECODE)), True, id="two-legs"
        ),
        pytest.param(
            (instance("p", Role.PREFILL), instance("a")), False, id="nobody-to-prefill-for"
        ),
    ],
)
def test_prompts_are_read_where_anything_depends_on_the_cache(
    fleet: tuple[Instance, ...], is_read: bool
) -> None:
    """Who prefills, and whose blocks are fetched, isn't the policy's to say."""
    assert (unread_pool(Fleet(instances=fleet), "m", {"pulls"}) is None) == is_read


def test_a_fleet_without_instances_is_told_as_ever() -> None:
    """As one of a request that is read."""
    with pytest.raises(NoInstanceError):
        unread_pool(Fleet(), "m", frozenset())


def test_plans_of_one_snapshot_are_made_once() -> None:
    """Every rank has one, and it says that nothing was weighed."""
    fleet = Fleet(instances=(instance("a", ranks=2),))

    pool = unread_pool(fleet, "m", frozenset())

    assert pool is unread_pool(fleet, "m", frozenset())
    assert pool is not None
    assert [plan.decode.candidate.rank.rank for plan in pool.plans.values()] == [0, 1]
    assert all(plan.considered == () for plan in pool.plans.values())


def test_those_left_out_are_no_candidates() -> None:
    """Held back as an instance, or excluded as a rank."""
    parts = (instance("a", ranks=2), instance("b"))
    pool = unread_pool(Fleet(instances=parts), "m", frozenset())
    assert pool is not None

    found = pool.among(parts[:1], frozenset({parts[0].own_ranks[1]}))

    assert [each.rank for each in found] == [parts[0].own_ranks[0]]


def test_full_ranks_are_passed_over_until_all_are_full() -> None:
    """The limit of legs per rank holds without the prompt, too (F26)."""
    ledger, both = LocalLedger(lambda: 0.0), candidates("a", "b")

    def book(rank: RankId) -> None:
        ledger.hold(unread_work(request({}), rank, ledger, RoutingSettings()))

    assert with_room(both, ledger, 0) == both
    book(both[0].rank)
    assert with_room(both, ledger, 1) == both[1:]
    book(both[1].rank)
    with pytest.raises(OverloadedError):
        with_room(both, ledger, 1)
    with pytest.raises(NoInstanceError):
        with_room([], ledger, 1)


@pytest.mark.parametrize(
    ("body", "raw_body", "tokens"),
    [
        pytest.param({"prompt": [5, 6, 7]}, b"", 3, id="ids"),
        pytest.param({"prompt": "text"}, b"x" * 400, 100, id="text"),
        pytest.param({"prompt": [[1], [2]]}, b"x" * 40, 10, id="several-prompts"),
        pytest.param({"prompt": []}, b"x" * 40, 10, id="empty"),
        pytest.param({"messages": []}, b"x" * 10**6, MAX_GUESSED_TOKENS, id="media"),
    ],
)
def test_the_size_is_booked_as_work(body: dict[str, object], raw_body: bytes, tokens: int) -> None:
    """By the body's bytes if it has no ids; nothing of it is counted as cached."""
    ledger, (one,) = LocalLedger(lambda: 0.0), candidates("a")

    work = unread_work(request(body, raw_body), one.rank, ledger, RoutingSettings())

    assert work == LegWork(
        rank=one.rank,
        kind="whole",
        prompt_tokens=tokens,
        uncached_tokens=tokens,
        work_s=tokens * 1e-4,
        streamed=False,
        believed_s=RoutingSettings().confirm_s,
    )


@pytest.mark.parametrize(("share", "read"), [(0.0, 0), (0.02, 20), (0.25, 250), (1.0, 1000)])
def test_a_share_is_read_all_the_same(share: float, read: int) -> None:
    """Evenly, not in clusters."""
    sampling = Sampling(share)

    taken = [sampling.is_due() for _ in range(1000)]

    assert abs(sum(taken) - read) <= 1
    assert not share or any(taken[-round(1 / share) - 1 :])


def test_turns_go_round() -> None:
    """Nobody is chosen twice before everybody was once, wherever it began."""
    policy, ranks = unread_policy("round_robin"), candidates("a", "b", "c")
    dice = Random(3)  # noqa: S311 - a test's dice
    chosen = []
    for _ in range(9):
        draw = seeded_draw(dice.getrandbits(53))
        found = policy.next_of(ranks, lambda _: (0, 0), draw)
        policy.chosen(found.rank)
        chosen.append(found.instance.alias)

    assert sorted(chosen[:3]) == ["a", "b", "c"]
    assert chosen[:3] == chosen[3:6] == chosen[6:]
