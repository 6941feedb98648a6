"""Who may answer or prefill a request, and what of its prompt each rank holds."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from balancer.core.errors import ModelNotFoundError, NoInstanceError, OverloadedError
from balancer.core.fleet.roster import Hold
from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.ledger import LegWork
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.routing.candidates import CandidateSource, PromptMatches, find_pool
from balancer.core.routing.terms import MemoryUse
from indexer.core.hashing import Namespace
from indexer.core.index import PrefixMatch, Prompt
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId, Tier, Trust

NO_ONE: frozenset[RankId] = frozenset()


def served(name: str) -> ServedModels:
    return ServedModels(
        base=name, aliases=frozenset({name}), adapters=frozenset({f"{name}-lora"}), cards=()
    )


def instance(
    alias: str,
    *,
    role: Role = Role.MIXED,
    model: str | None = "m",
    healthy: bool = True,
    draining: bool = False,
    enabled: bool = True,
    ranks: tuple[int, ...] = (0,),
) -> Instance:
    return Instance(
        id=InstanceId(f"http://{alias}:8000"),
        alias=alias,
        role=role,
        models=served(model) if model else None,
        ranks=ranks,
        connector="none" if role is Role.MIXED else "nixl",
        healthy=healthy,
        draining=draining,
        enabled=enabled,
    )


def held(alias: str, hold: Hold) -> Instance:
    return replace(instance(alias, role=Role.PREFILL), hold=hold)


def rank(alias: str, number: int = 0) -> RankId:
    return RankId(InstanceId(f"http://{alias}:8000"), number)


def prompt(tokens: int, first: int = 0) -> Prompt:
    return Prompt(Namespace(model="m"), range(first, first + tokens))


def match(tokens: int, block_size: int = 16, trust: Trust = Trust.EXACT) -> PrefixMatch:
    return PrefixMatch(
        tokens_by_tier={Tier.GPU: tokens}, block_size=block_size, trust=trust, epoch=1
    )


@pytest.fixture
def ledger() -> LocalLedger:
    return LocalLedger(lambda: 0.0)


def predict(ledger: LocalLedger, on: RankId, what: Prompt, block_size: int = 16) -> None:
    ledger.hold(
        LegWork(
            rank=on,
            kind="whole",
            prompt_tokens=what.tokens,
            uncached_tokens=0,
            work_s=0,
            keys=what.keys(block_size),
        )
    )


@pytest.mark.parametrize("model", ["m", "m-lora"])
def test_a_model_is_found_by_any_of_its_names(model: str) -> None:
    """Adapters are served by whoever lists them."""
    pool = find_pool(Fleet(instances=(instance("a"), instance("b", model="other"))), model)

    assert [each.alias for each in pool.answering] == ["a"]


def test_a_pool_has_only_who_may_get_requests() -> None:
    """By role; not the unhealthy, the draining, the disabled."""
    fleet = Fleet(
        instances=(
            instance("m0"),
            instance("d0", role=Role.DECODE),
            instance("p0", role=Role.PREFILL),
            instance("down", healthy=False),
            instance("leaving", draining=True),
            instance("off", enabled=False),
        )
    )

    pool = find_pool(fleet, "m")

    assert [each.alias for each in pool.answering] == ["m0", "d0"]
    assert [each.alias for each in pool.prefill] == ["p0"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(instance("p0", role=Role.PREFILL, healthy=False), {"nixl"}, id="down"),
        pytest.param(instance("p0", role=Role.PREFILL, model=None), {"nixl"}, id="never-seen"),
        pytest.param(instance("p0", role=Role.PREFILL, model="other"), set(), id="other-model"),
        pytest.param(instance("p0", role=Role.PREFILL, draining=True), {"nixl"}, id="health-503"),
        pytest.param(held("p0", Hold.SILENT), {"nixl"}, id="silent"),
        pytest.param(held("p0", Hold.DRAINED), set(), id="drained"),
        pytest.param(held("p0", Hold.ASLEEP), set(), id="asleep"),
        pytest.param(instance("p0", role=Role.PREFILL, enabled=False), set(), id="disabled"),
        pytest.param(instance("m1"), set(), id="none"),
    ],
)
def test_prefill_is_expected_of_configured_instances(source: Instance, expected: set[str]) -> None:
    """Whom the operator took out isn't missed; who is down is."""
    pool = find_pool(Fleet(instances=(instance("d0", role=Role.DECODE), source)), "m")

    assert pool.prefill_expected == expected


@pytest.mark.parametrize(
    ("fleet", "error"),
    [
        pytest.param((), NoInstanceError, id="empty-fleet-F27"),
        pytest.param((instance("a", model=None),), NoInstanceError, id="models-unknown"),
        pytest.param((instance("a", model="other"),), ModelNotFoundError, id="unknown-model-F59"),
        pytest.param((instance("a", healthy=False),), NoInstanceError, id="known-model-down"),
        pytest.param((instance("p", role=Role.PREFILL),), NoInstanceError, id="prefill-only"),
    ],
)
def test_no_pool_has_its_own_error(fleet: tuple[Instance, ...], error: type[Exception]) -> None:
    """404 only if the client has to change its request."""
    with pytest.raises(error):
        find_pool(Fleet(instances=fleet), "m")


def test_every_rank_is_a_candidate_of_its_own(ledger: LocalLedger) -> None:
    """One instance with two ranks; the excluded one is left out."""
    source = CandidateSource(matches=PromptMatches(block_sizes={}), ledger=ledger)

    found, some_full = source.load([instance("a", ranks=(4, 5))], frozenset({rank("a", 4)}))

    assert [each.candidate.rank for each in found] == [rank("a", 5)]
    assert not some_full


def test_a_full_rank_is_passed_over(ledger: LocalLedger) -> None:
    """Below the limit it is a candidate; at the limit it isn't."""
    predict(ledger, rank("a"), prompt(32))
    source = CandidateSource(
        matches=PromptMatches(block_sizes={}), ledger=ledger, max_requests_per_rank=1
    )

    found, some_full = source.load([instance("a"), instance("b")], NO_ONE)

    assert [each.candidate.instance.alias for each in found] == ["b"]
    assert some_full


def test_all_full_is_not_nobody_there(ledger: LocalLedger) -> None:
    """Clients and alarms tell an overload from an outage (F26)."""
    predict(ledger, rank("a"), prompt(32))
    source = CandidateSource(
        matches=PromptMatches(block_sizes={}), ledger=ledger, max_requests_per_rank=1
    )

    with pytest.raises(OverloadedError):
        source.load_answering([instance("a")], NO_ONE)
    with pytest.raises(NoInstanceError):
        source.load_answering([instance("a")], frozenset({rank("a")}))
    assert source.load_answering([instance("b")], NO_ONE)


def by_tier(**tokens: int) -> PrefixMatch:
    return PrefixMatch(
        tokens_by_tier={Tier(tier): each for tier, each in tokens.items()},
        block_size=16,
        trust=Trust.EXACT,
        epoch=1,
    )


@pytest.mark.parametrize(
    ("matches", "overlap_tokens", "loading_tokens"),
    [
        pytest.param([by_tier(gpu=64)], 64, 0, id="gpu"),
        pytest.param([by_tier(cpu=64)], 64, 16, id="cpu"),
        pytest.param([by_tier(gpu=32, cpu=32, storage=64)], 128, 40, id="all-three"),
        pytest.param([by_tier(gpu=32, cpu=32), by_tier(cpu=16)], 80, 12, id="two-prompts"),
    ],
)
def test_slower_tiers_are_held_and_have_to_be_loaded(
    ledger: LocalLedger,
    matches: list[PrefixMatch],
    overlap_tokens: int,
    loading_tokens: float,
) -> None:
    """With weights of three quarters and a half."""
    held = PromptMatches(
        prompts=tuple(prompt(200) for _ in matches),
        by_rank=tuple({rank("a"): each} for each in matches),
        block_sizes={rank("a"): 16},
        tier_weights={Tier.CPU: 0.75, Tier.STORAGE: 0.5},
    )

    candidate = held.candidate(rank("a"), instance("a"), ledger)

    assert (candidate.overlap_tokens, candidate.loading_tokens) == (overlap_tokens, loading_tokens)
    assert sum(candidate.tokens_by_tier.values()) == overlap_tokens


def test_predicted_blocks_continue_what_is_held(ledger: LocalLedger) -> None:
    """32 tokens by events, the rest on its way, but never the last token."""
    asked = prompt(64)
    predict(ledger, rank("a"), asked)
    matches = PromptMatches(
        prompts=(asked,), by_rank=({rank("a"): match(32)},), block_sizes={rank("a"): 16}
    )

    candidate = matches.candidate(rank("a"), instance("a"), ledger)

    assert (candidate.overlap_tokens, candidate.predicted_tokens) == (32, 48)
    assert (candidate.trust, candidate.block_size) == (Trust.EXACT, 16)


def test_an_untrusted_rank_holds_what_we_sent_it_only(ledger: LocalLedger) -> None:
    """Its index entries don't count; our own prediction does."""
    asked = prompt(64)
    predict(ledger, rank("a"), prompt(33))
    matches = PromptMatches(
        prompts=(asked,),
        by_rank=({rank("a"): match(48, trust=Trust.LOAD_ONLY)},),
        block_sizes={rank("a"): 16},
    )

    candidate = matches.candidate(rank("a"), instance("a"), ledger)

    assert (candidate.overlap_tokens, candidate.predicted_tokens) == (0, 32)


def test_several_prompts_add_up(ledger: LocalLedger) -> None:
    """A rank that one of the answers doesn't name holds nothing of that prompt."""
    asked = (prompt(64), prompt(64, 1000), prompt(64, 2000))
    matches = PromptMatches(
        prompts=asked,
        by_rank=({rank("a"): match(32)}, {}, {rank("a"): match(16)}),
        block_sizes={rank("a"): 16},
    )

    candidate = matches.candidate(rank("a"), instance("a"), ledger)

    assert candidate.overlap_tokens == 48
    assert len(matches.keys(rank("a"))) == 12


@pytest.mark.parametrize(
    ("block_sizes", "expected"),
    [
        pytest.param({rank("a"): 32, rank("b"): 64}, 32, id="its-own"),
        pytest.param({rank("b"): 64}, 64, id="any-in-the-fleet"),
        pytest.param({}, 16, id="the-usual"),
    ],
)
def test_the_block_size_of_predictions(
    block_sizes: Mapping[RankId, int], expected: int, ledger: LocalLedger
) -> None:
    """Its own from events, else any in the fleet, else 16."""
    matches = PromptMatches(prompts=(prompt(640),), block_sizes=block_sizes)

    assert matches.block_size(rank("a")) == expected
    assert len(matches.keys(rank("a"))) == 640 // expected
    assert matches.candidate(rank("a"), instance("a"), ledger).overlap_tokens == 0


def test_rank_without_events_is_approximate_once_something_was_routed_there(
    ledger: LocalLedger,
) -> None:
    """Its guessed blocks count as predicted, never as held."""
    what = prompt(64)
    matches = PromptMatches(prompts=(what,), block_sizes={})
    before = matches.candidate(rank("a"), instance("a"), ledger)
    left = LegWork(
        rank=rank("a"),
        kind="whole",
        prompt_tokens=64,
        uncached_tokens=64,
        work_s=0,
        keys=what.keys(16),
        remembered_s=60.0,
    )
    with ledger.hold(left):
        pass

    after = matches.candidate(rank("a"), instance("a"), ledger)

    assert (before.trust, before.predicted_tokens) == (Trust.LOAD_ONLY, 0)
    assert (after.trust, after.predicted_tokens) == (Trust.APPROXIMATE, 48)
    assert after.overlap_tokens == 0


def test_memory_is_weighed_where_its_size_is_known(ledger: LocalLedger) -> None:
    """In use now, and what of the prompt nobody uses there yet."""
    known = replace(instance("a"), rank_cache_tokens=5000)
    source = CandidateSource(
        matches=PromptMatches(prompts=(prompt(64),), block_sizes={rank("a"): 16, rank("b"): 16}),
        ledger=ledger,
    )
    predict(ledger, rank("a"), prompt(32))
    predict(ledger, rank("a"), prompt(48, first=900))
    found, _ = source.load((known, instance("b")), NO_ONE)

    assert found[0].memory == MemoryUse(active_tokens=80, need_tokens=32, capacity_tokens=5000)
    assert found[1].memory is None


@pytest.mark.parametrize(
    ("is_predicted", "trust"),
    [(False, Trust.LOAD_ONLY), (True, Trust.APPROXIMATE)],
    ids=["nothing-sent", "sent-there"],
)
def test_failed_lookup_is_never_exact(
    ledger: LocalLedger, is_predicted: bool, trust: Trust
) -> None:
    """Whatever was told before: nothing is known by events now, and the lookup is why."""
    asked = prompt(160)
    if is_predicted:
        predict(ledger, rank("a"), asked)
    matches = PromptMatches(
        prompts=(asked,),
        unanswered="lookup_timeout",
        block_sizes={},
        trusts={rank("a"): Trust.EXACT},
    )

    found = matches.candidate(rank("a"), instance("a"), ledger)

    assert (found.trust, found.trust_reason) == (trust, "lookup_timeout")
    assert found.overlap_tokens == 0
    assert matches.is_confirmed(found)


def test_what_lowered_trust_is_told_of_the_rank_it_is_of(ledger: LocalLedger) -> None:
    """A rank nobody keeps up has a reason, and one that the index is without; an exact one has none."""
    silent = PrefixMatch(
        tokens_by_tier={}, block_size=16, trust=Trust.DEGRADED, epoch=1, reason="indexer_silent"
    )
    matches = PromptMatches(
        prompts=(prompt(160),),
        by_rank=({rank("a"): silent, rank("b"): match(16)},),
        block_sizes={},
    )

    found = [matches.candidate(rank(each), instance(each), ledger) for each in "abc"]

    assert [each.trust_reason for each in found] == ["indexer_silent", None, "not_indexed"]
    assert [matches.is_confirmed(each) for each in found] == [True, True, False]
