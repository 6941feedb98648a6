"""The in-memory ledger: figures over time. What every ledger must do is in conformance."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from balancer.core.load.chain_tree import Begun, ChainTree, run_blocks
from balancer.core.load.ledger import LegGuard, LegWork, RankLoad, RankRates
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.load.predictions import RankPredictions
from indexer.core.types import BlockKey, InstanceId, RankId

RANK = RankId(InstanceId("http://e0:8000"), 0)
KEYS = [BlockKey(number) for number in range(1, 9)]


@dataclass(slots=True)
class Clock:
    """Time as the test says."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def work(
    kind: str = "whole",
    *,
    tokens: int = 1000,
    keys: list[BlockKey] | None = None,
    streamed: bool = True,
    believed_s: float = 2.0,
) -> LegWork:
    return LegWork(
        rank=RANK,
        kind=kind,
        prompt_tokens=tokens,
        uncached_tokens=tokens,
        work_s=0.0 if kind == "decode" else tokens * 1e-4,
        keys=KEYS if keys is None else keys,
        streamed=streamed,
        believed_s=believed_s,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> LocalLedger:
    return LocalLedger(clock, max_predicted_blocks=16)


def predicted(ledger: LocalLedger, start: int = 0) -> int:
    return ledger.predicted_blocks(RANK, KEYS, start)


def test_the_oldest_queued_leg_makes_progress(ledger: LocalLedger, clock: Clock) -> None:
    """The head's progress counts from its dispatch, or from the rank's last first token."""
    first, _second = ledger.hold(work(tokens=500)), ledger.hold(work(tokens=300))
    clock.now_s += 0.04
    waiting = ledger.load(RANK)
    first.first_token()
    clock.now_s += 0.01
    after = ledger.load(RANK)

    assert (waiting.head_tokens, waiting.queued_tokens) == (500, 800)
    assert waiting.oldest_queued_s == 100.0
    assert waiting.head_progress_s == pytest.approx(0.04)
    assert (after.head_tokens, after.queued_tokens, after.decoding) == (300, 300, 1)
    assert after.head_progress_s == pytest.approx(0.01)


def test_rates_of_a_young_rank_are_corrected_and_fade(ledger: LocalLedger, clock: Clock) -> None:
    """Ten requests in the first two seconds are five a second, not half a one."""
    for _ in range(10):
        with ledger.hold(work(tokens=800)):
            clock.now_s += 0.2
    busy = ledger.load(RANK)
    clock.now_s += 60
    idle = ledger.load(RANK)

    assert busy.arrivals_per_s == pytest.approx(5, rel=0.2)
    assert busy.work_share == pytest.approx(5 * 0.1, rel=0.2)
    assert idle.arrivals_per_s < busy.arrivals_per_s / 5


def test_tiny_prompts_count_for_what_they_take(ledger: LocalLedger, clock: Clock) -> None:
    """A hundred of them share steps: a fixed part for each would fill a rank."""
    fixed_s = ledger.prefill_rates(RANK).fixed_s
    for _ in range(100):
        ledger.hold(replace(work(tokens=10), work_s=0.001))
    tiny = ledger.load(RANK)
    ledger.hold(replace(work(tokens=10_000), work_s=1.0))
    long = ledger.load(RANK)

    assert tiny.work_share == pytest.approx(100 * 0.002, rel=0.05)
    assert long.work_share - tiny.work_share == pytest.approx(1.0 + fixed_s, rel=0.05)


@pytest.mark.parametrize(
    ("faster", "is_corrected"),
    [pytest.param(10, True, id="far-off"), pytest.param(2, False, id="fair")],
)
def test_work_that_took_far_less_counts_as_what_it_took(
    ledger: LocalLedger, clock: Clock, faster: int, is_corrected: bool
) -> None:
    """Else a rate that is far off makes an idle rank seem full for half a minute."""
    work_s = 20.0
    with ledger.hold(replace(work(tokens=200_000), work_s=work_s)) as guard:
        clock.now_s += 0.1
        ledger.hold(work(kind="decode"))
        clock.now_s += work_s / faster - 0.1
        booked = ledger.load(RANK).work_share
        guard.first_token()
    share = ledger.load(RANK).work_share

    assert share == pytest.approx(booked / faster if is_corrected else booked, rel=0.05)


def test_recent_work_counts_once_it_is_done(ledger: LocalLedger, clock: Clock) -> None:
    """Queued work is not recent work; ten minutes later two thirds are forgotten."""
    leg = ledger.hold(work(tokens=1000))
    queued_s = ledger.load(RANK).recent_work_s
    leg.first_token()
    done_s = ledger.load(RANK).recent_work_s
    clock.now_s += 600
    later_s = ledger.load(RANK).recent_work_s

    assert queued_s == 0
    assert done_s == pytest.approx(0.1)
    assert later_s == pytest.approx(0.1 / 2.718, rel=0.01)


def test_an_unseen_first_token_is_expected(ledger: LocalLedger, clock: Clock) -> None:
    """An answer that isn't streamed counts as decoding once its prompt should be computed."""
    ledger.hold(work(tokens=1000))
    ledger.hold(work(tokens=1000, streamed=False))
    clock.now_s += 0.15
    before = ledger.load(RANK)
    clock.now_s += 0.1
    after = ledger.load(RANK)

    assert (before.queued_tokens, before.decoding) == (2000, 0)
    assert (after.queued_tokens, after.decoding) == (1000, 1)


def test_an_unseen_first_token_may_be_overtaken_by_the_end(
    ledger: LocalLedger, clock: Clock
) -> None:
    """The leg ended before its expected time: the expectation finds nothing."""
    ledger.hold(work(tokens=1000, streamed=False)).__exit__(None, None, None)
    clock.now_s += 1

    assert ledger.load(RANK).decoding == 0


def test_an_unseen_first_token_teaches_nothing(ledger: LocalLedger, clock: Clock) -> None:
    """The end of an answer says nothing about prefill or steps; its length is learned."""
    leg = ledger.hold(work(tokens=1000, streamed=False))
    clock.now_s += 30
    leg.first_token()
    leg.generated(500)
    leg.__exit__(None, None, None)

    rates = ledger.load(RANK).rates
    assert rates.output_tokens > RankRates().output_tokens
    assert rates.prefill_s_per_token == RankRates().prefill_s_per_token
    assert rates.step_s == RankRates().step_s


def test_rates_are_learned_from_legs(ledger: LocalLedger, clock: Clock) -> None:
    """2,000 tokens in a second, then ten steps of 50 ms, several times over."""
    for _ in range(4):
        leg = ledger.hold(work(tokens=2000))
        clock.now_s += 1.02
        leg.first_token()
        clock.now_s += 0.5
        leg.generated(11)
        leg.__exit__(None, None, None)
    ledger.hold(work())

    rates = ledger.load(RANK).rates
    assert rates.prefill_s_per_token == pytest.approx(5e-4)
    assert rates.step_s == pytest.approx(0.05)


def test_a_prefill_leg_says_nothing_about_output(ledger: LocalLedger) -> None:
    """Its one token is thrown away."""
    leg = ledger.hold(work("prefill"))
    leg.generated(1)
    leg.__exit__(None, None, None)

    assert ledger.load(RANK).rates.output_tokens == RankRates().output_tokens


def test_predictions_outlive_the_first_token_by_their_belief(
    ledger: LocalLedger, clock: Clock
) -> None:
    """However long the prompt queued; then events must tell."""
    leg = ledger.hold(work(believed_s=2.0))
    clock.now_s += 500
    queued = predicted(ledger)
    leg.first_token()
    clock.now_s += 1.9
    believed = predicted(ledger)
    clock.now_s += 0.2

    assert (queued, believed, predicted(ledger)) == (8, 8, 0)


def test_an_expired_prediction_was_withdrawn_before(ledger: LocalLedger, clock: Clock) -> None:
    """Failing after the first token leaves an expiry without a prediction."""
    leg = ledger.hold(work())
    leg.first_token()
    leg.__exit__(RuntimeError, RuntimeError(), None)
    clock.now_s += 10
    ledger.hold(work())

    assert predicted(ledger) == 8


def test_a_transferred_prompt_is_predicted_from_its_first_token(ledger: LocalLedger) -> None:
    """Until the transfer is done a sibling sent there would compute everything again."""
    leg = ledger.hold(work("decode"))
    before = predicted(ledger)
    queued = ledger.load(RANK)
    leg.first_token()

    assert (before, predicted(ledger)) == (0, 8)
    assert (queued.requests, queued.queued_tokens, queued.oldest_queued_s) == (1, 0, None)


def test_a_failed_transfer_predicts_nothing(ledger: LocalLedger) -> None:
    """It failed before its first token: nothing was ever predicted, nothing queued."""
    ledger.hold(work("decode")).__exit__(RuntimeError, RuntimeError(), None)

    assert predicted(ledger) == 0
    assert ledger.load(RANK).requests == 0


def test_predictions_are_bounded(ledger: LocalLedger) -> None:
    """Past the limit the oldest go first, whole; one that is too long is cut."""
    ledger.hold(work(keys=KEYS))
    ledger.hold(work(keys=[BlockKey(number) for number in range(100, 112)]))
    oldest = predicted(ledger)
    many = [BlockKey(number) for number in range(200, 300)]
    ledger.hold(work(keys=many))

    assert oldest == 0
    assert ledger.predicted_blocks(RANK, many, 0) == 16


def test_forgetting_an_idle_rank_leaves_nothing(ledger: LocalLedger) -> None:
    """A rank that left takes its book along."""
    ledger.forget(RANK)
    ledger.hold(work()).__exit__(None, None, None)
    ledger.forget(RANK)

    assert ledger.load(RANK) == RankLoad()


steps = st.lists(
    st.tuples(
        st.sampled_from(["whole", "unseen", "decode", "token", "end", "fail", "forget", "wait"]),
        st.integers(0, 3),
    ),
    min_size=8,
    max_size=24,
)


@given(steps)
def test_a_load_is_never_one_of_before(steps: list[tuple[str, int]]) -> None:
    """Whatever happened to a rank since it was last asked for, its load is what its book says."""
    clock = Clock()
    ledger = LocalLedger(clock, max_predicted_blocks=16)
    guards: list[LegGuard] = []
    for step, number in steps:
        ledger.load(RANK)
        guard = guards[number % len(guards)] if guards else None
        if step in {"whole", "unseen", "decode"}:
            leg = work("decode" if step == "decode" else "whole", keys=KEYS[number:])
            leg = replace(leg, streamed=step != "unseen", block_size=16, cache_tokens=4096)
            guards.append(ledger.hold(leg))
        elif step == "forget":
            ledger.forget(RANK)
        elif step == "wait":
            clock.now_s += number
        elif guard is not None and step == "token":
            guard.first_token()
        elif guard is not None:
            guard.generated(600)
            guard.__exit__(ValueError if step == "fail" else None, None, None)
        kept = ledger.load(RANK), ledger.promised_blocks(RANK, KEYS, 0)
        for book in ledger._books.values():
            book.changed()

        assert (ledger.load(RANK), ledger.promised_blocks(RANK, KEYS, 0)) == kept
        assert ledger.predicted_blocks(RANK, KEYS, 0) == kept[1][0]


def test_a_load_holds_whatever_a_peer_told(ledger: LocalLedger) -> None:
    """More tokens than can be counted are very many."""
    ledger.hold(work(tokens=2**64))

    assert ledger.load(RANK).queued_tokens > 2**61


chains = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 8), st.booleans()), min_size=1, max_size=12
)


@given(chains=chains)
def test_predictions_equal_a_naive_count(chains: list[tuple[int, int, bool]]) -> None:
    """A run ends where no live prediction covers the next key, whatever came and went."""
    begun: Begun = {}
    predictions = RankPredictions(10_000, ChainTree(begun, RANK))
    live: list[list[BlockKey]] = []
    for family, length, is_withdrawn in chains:
        keys = [BlockKey(family * 100 + number) for number in range(length)]
        prediction = predictions.add([keys])
        if is_withdrawn:
            predictions.withdraw(prediction)
            predictions.withdraw(prediction)
        else:
            live.append(keys)
    for family in range(3):
        prompt = [BlockKey(family * 100 + number) for number in range(8)]
        covered = max((len(keys) for keys in live if keys[0] == prompt[0]), default=0)

        assert run_blocks(begun.get(prompt[0], {}).get(RANK), prompt)[0] == covered
    assert predictions.blocks == sum(map(len, live))


def guessing(kind: str = "whole", *, keys: list[BlockKey] | None = None) -> LegWork:
    """A leg on a rank that has no events."""
    return replace(work(kind, keys=keys), remembered_s=60.0, block_size=16)


def test_rank_without_events_is_guessed_to_hold_what_legs_left(
    ledger: LocalLedger, clock: Clock
) -> None:
    """Until so long after the last of them."""
    with ledger.hold(guessing()) as leg:
        assert not ledger.has_guesses(RANK)
        leg.first_token()
    clock.now_s += 50.0
    assert (predicted(ledger), ledger.has_guesses(RANK)) == (8, True)

    clock.now_s += 11.0
    ledger.hold(guessing(keys=[BlockKey(99)])).__exit__(None, None, None)

    assert predicted(ledger) == 0


def test_cached_tokens_correct_the_guesses(ledger: LocalLedger, clock: Clock) -> None:
    """Less than guessed: what was used no later is gone, and the leg's own blocks are there."""
    with ledger.hold(guessing(keys=[BlockKey(98)])):
        pass
    with ledger.hold(guessing()):
        pass
    clock.now_s += 1.0

    with ledger.hold(guessing(keys=KEYS[:4])) as leg:
        leg.cached(2 * 16)

    assert predicted(ledger) == 4
    assert ledger.predicted_blocks(RANK, [BlockKey(98)], 0) == 0


@pytest.mark.parametrize(("kind", "cached"), [("decode", 0), ("whole", 8 * 16), ("whole", None)])
def test_figures_that_correct_nothing(
    ledger: LocalLedger, clock: Clock, kind: str, cached: int | None
) -> None:
    """A transfer's, one that agrees, and none at all."""
    with ledger.hold(guessing()):
        pass
    clock.now_s += 1.0

    with ledger.hold(guessing(kind)) as leg:
        if cached is not None:
            leg.cached(cached)

    assert predicted(ledger) == 8


def test_failed_leg_leaves_no_guess(ledger: LocalLedger) -> None:
    """Nor does one that is told of twice."""
    leg = ledger.hold(guessing())
    leg.__exit__(ValueError, ValueError(), None)
    leg.__exit__(None, None, None)

    assert not ledger.has_guesses(RANK)


def test_guesses_end_when_events_begin_and_when_the_rank_restarts(ledger: LocalLedger) -> None:
    """Events know better; a new process knows nothing."""
    for end in (lambda: ledger.hold(work()), lambda: ledger.forget(RANK)):
        with ledger.hold(guessing()):
            pass
        assert ledger.has_guesses(RANK)
        end()
        assert not ledger.has_guesses(RANK)
