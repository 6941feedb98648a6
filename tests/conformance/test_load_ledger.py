"""What every `LoadLedger` must do, whatever it is made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from balancer.core.load.ledger import (
    Learning,
    LegGuard,
    LegWork,
    LoadLedger,
    RankLoad,
    RankRates,
    TransferRates,
)
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.load.shared_ledger import SharedLedger
from indexer.core.types import BlockKey, InstanceId, RankId

FIRST, OTHER = (RankId(InstanceId(f"http://e{number}:8000"), 0) for number in (0, 1))
KEYS = [BlockKey(number) for number in range(1, 7)]


@dataclass(slots=True)
class Clock:
    """Time as the test says."""

    now_s: float = 5.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


class NobodyListens:
    """Of news that the ledger doesn't keep."""

    def on_booked(self, rank: RankId) -> None:
        """Nobody's turn changes."""

    def on_outcome(self, instance: InstanceId, ok: bool, reason: str | None) -> None:
        """Nobody's breaker opens."""


def shared(clock: Clock, me: str = "me") -> SharedLedger:
    return SharedLedger(clock, me=me, lease_s=60.0, news=NobodyListens())


class SeenByPeer:
    """Legs are booked in one process, and looked at from another."""

    def __init__(self, clock: Clock) -> None:
        self._here = shared(clock, "here")
        self._there = shared(clock, "there")

    def hold(self, work: LegWork) -> LegGuard:
        return self._here.hold(work)

    def forget(self, rank: RankId) -> None:
        self._told().forget(rank)
        self._here.forget(rank)

    def load(self, rank: RankId) -> RankLoad:
        return self._told().load(rank)

    def busy(self, rank: RankId) -> tuple[int, int]:
        return self._told().busy(rank)

    def prefill_rates(self, rank: RankId) -> RankRates:
        return self._told().prefill_rates(rank)

    def predicted_blocks(self, rank: RankId, keys: Sequence[BlockKey], start: int) -> int:
        return self._told().predicted_blocks(rank, keys, start)

    def has_guesses(self, rank: RankId) -> bool:
        return self._told().has_guesses(rank)

    def active_blocks(self, rank: RankId, keys: Sequence[BlockKey]) -> int:
        return self._told().active_blocks(rank, keys)

    def transfer(self, source: RankId, target: RankId) -> TransferRates:
        return self._told().transfer(source, target)

    @property
    def learning(self) -> Learning | None:
        return self._told().learning

    def _told(self) -> SharedLedger:
        for message in self._here.outgoing():
            self._there.on_message(message)
        return self._there


@pytest.fixture(params=[LocalLedger, shared, SeenByPeer], ids=["local", "shared", "seen-by-a-peer"])
def ledger(request: pytest.FixtureRequest, clock: Clock) -> LoadLedger:
    build: Callable[[Clock], LoadLedger] = request.param
    return build(clock)


def work(
    rank: RankId = FIRST, *, kind: str = "whole", keys: int = 6, believed_tokens: int = 0
) -> LegWork:
    return LegWork(
        rank=rank,
        kind=kind,
        prompt_tokens=100,
        uncached_tokens=100,
        work_s=0.01,
        keys=KEYS[:keys],
        believed_s=3.0,
        believed_tokens=believed_tokens,
    )


def test_an_unknown_rank_is_idle(ledger: LoadLedger) -> None:
    """Nothing in flight, nothing predicted, nothing to forget."""
    ledger.forget(FIRST)

    assert ledger.load(FIRST).requests == 0
    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 0


def test_booking_counts_at_once_and_on_its_rank_only(ledger: LoadLedger) -> None:
    """Before the `with` block is even entered."""
    ledger.hold(work())

    load = ledger.load(FIRST)
    assert (load.requests, load.queued_tokens, load.decoding) == (1, 100, 0)
    assert ledger.load(OTHER).requests == 0
    assert ledger.predicted_blocks(OTHER, KEYS, 0) == 0


def test_the_first_token_moves_a_leg_from_queued_to_decoding_once(ledger: LoadLedger) -> None:
    """Calling again changes nothing, nor does calling after the end."""
    guard = ledger.hold(work())
    guard.first_token()
    guard.first_token()
    load = ledger.load(FIRST)
    guard.__exit__(None, None, None)
    guard.first_token()

    assert (load.requests, load.queued_tokens, load.decoding) == (1, 0, 1)
    assert ledger.load(FIRST).decoding == 0


@pytest.mark.parametrize("kind", ["whole", "prefill", "decode"])
@pytest.mark.parametrize("first_token", [False, True], ids=["queued", "decoding"])
@pytest.mark.parametrize("error", [None, RuntimeError()], ids=["done", "failed"])
def test_every_end_counts_down_once(
    ledger: LoadLedger, kind: str, first_token: bool, error: RuntimeError | None
) -> None:
    """However the leg ends, and however often it is told."""
    guard = ledger.hold(work(kind=kind))
    if first_token:
        guard.first_token()
    for _ in range(2):
        guard.__exit__(type(error) if error else None, error, None)

    load = ledger.load(FIRST)
    assert (load.requests, load.queued_tokens, load.decoding) == (0, 0, 0)


def test_predictions_last_while_the_leg_waits(ledger: LoadLedger, clock: Clock) -> None:
    """A sibling behind a long queue still finds them."""
    ledger.hold(work(keys=4))
    clock.now_s += 1000

    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 4
    assert ledger.predicted_blocks(FIRST, KEYS, 3) == 1
    assert ledger.predicted_blocks(FIRST, KEYS, 4) == 0


def test_predictions_outlive_a_leg_for_a_while(ledger: LoadLedger, clock: Clock) -> None:
    """Until `believed_s` after the prompt was computed."""
    with ledger.hold(work()):
        pass
    at_once = ledger.predicted_blocks(FIRST, KEYS, 0)
    clock.now_s += 3.1

    assert at_once == 6
    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 0


def test_predictions_end_when_the_cache_may_have_turned_over(ledger: LoadLedger) -> None:
    """Of a tiny cache the events that confirm a block and those that drop it come within moments."""
    with ledger.hold(work(keys=4, believed_tokens=250)):
        pass
    kept = []
    for _ in range(3):  # 100 new tokens each
        ledger.hold(work(keys=0))
        kept.append(ledger.predicted_blocks(FIRST, KEYS, 0))

    assert kept == [4, 4, 0]


def test_what_was_sent_before_the_first_token_pushes_nothing_out(ledger: LoadLedger) -> None:
    """The rank computes it first, or keeps the blocks of a prompt it is busy with."""
    guard = ledger.hold(work(keys=4, believed_tokens=150))
    for _ in range(3):
        ledger.hold(work(keys=0))
    guard.first_token()
    ledger.hold(work(keys=0))

    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 4


def test_a_failed_leg_takes_back_what_no_other_predicts(ledger: LoadLedger) -> None:
    """The sibling's four blocks stay."""
    ledger.hold(work(keys=4))

    def fail() -> None:
        with ledger.hold(work(keys=6)):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 4


def test_each_of_several_prompts_is_predicted_and_in_use(ledger: LoadLedger) -> None:
    """Their keys come in one sequence, and each prompt begins at the root."""
    others = [BlockKey(1000 + number) for number in range(3)]
    several = replace(work(), keys=[*KEYS[:4], *others], chain_ends=(4, 7))
    guard = ledger.hold(several)
    predicted = [ledger.predicted_blocks(FIRST, keys, 0) for keys in (KEYS, others)]
    in_use = [ledger.active_blocks(FIRST, keys) for keys in (KEYS, others)]
    blocks = ledger.load(FIRST).active_blocks
    guard.__exit__(RuntimeError, RuntimeError(), None)

    assert (predicted, in_use, blocks) == ([4, 3], [4, 3], 7)
    assert ledger.predicted_blocks(FIRST, others, 0) == 0
    assert ledger.load(FIRST).active_blocks == 0


def test_forgetting_voids_predictions_and_keeps_legs(ledger: LoadLedger) -> None:
    """The rank restarted; who was in flight ends in its own time."""
    guard = ledger.hold(work())
    ledger.forget(FIRST)
    load = ledger.load(FIRST)
    guard.__exit__(None, None, None)

    assert load.requests == 1
    assert ledger.load(FIRST).requests == 0


def test_forgotten_predictions_stay_forgotten(ledger: LoadLedger) -> None:
    """A leg that fails after the rank was forgotten withdraws nothing twice."""
    guard = ledger.hold(work())
    ledger.forget(FIRST)
    voided = ledger.predicted_blocks(FIRST, KEYS, 0)
    sibling = ledger.hold(work(keys=2))
    guard.__exit__(RuntimeError, RuntimeError(), None)

    assert voided == 0
    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 2
    sibling.__exit__(None, None, None)


def test_blocks_are_in_use_from_booking_to_end(ledger: LoadLedger) -> None:
    """Whoever waits for a transfer needs its room, too; shared blocks count once."""
    whole, decode = ledger.hold(work(keys=4)), ledger.hold(work(kind="decode", keys=6))
    both = ledger.load(FIRST).active_blocks, ledger.active_blocks(FIRST, KEYS)
    decode.__exit__(None, None, None)
    one = ledger.load(FIRST).active_blocks, ledger.active_blocks(FIRST, KEYS)
    whole.__exit__(ValueError, ValueError(), None)

    assert both == (6, 6)
    assert one == (4, 4)
    assert (ledger.load(FIRST).active_blocks, ledger.active_blocks(FIRST, KEYS)) == (0, 0)
    assert ledger.active_blocks(OTHER, KEYS) == 0


def test_outputs_are_guessed_by_the_pace(ledger: LoadLedger, clock: Clock) -> None:
    """Nobody counts tokens as they pass; a leg that ended has none."""
    first, second = ledger.hold(work()), ledger.hold(work())
    first.first_token()
    clock.now_s += 1
    second.first_token()
    clock.now_s += 1
    rates = ledger.load(FIRST).rates
    step_s = rates.step_s + 2 * rates.step_s_per_request

    assert ledger.load(FIRST).output_tokens == pytest.approx(3 / step_s)
    first.__exit__(None, None, None)
    second.__exit__(ValueError, ValueError(), None)
    assert ledger.load(FIRST).output_tokens == 0


def hand_over(ledger: LoadLedger, clock: Clock, seconds: float, *, streamed: bool = True) -> None:
    """A decode leg on FIRST whose prompt OTHER computed."""
    booked = replace(work(kind="decode"), streamed=streamed)
    with ledger.hold(booked) as guard:
        clock.now_s += 0.3
        guard.handed_over(OTHER)
        clock.now_s += seconds
        guard.first_token()
        guard.handed_over(OTHER)


def test_transfers_are_learned_from_hand_overs(ledger: LoadLedger, clock: Clock) -> None:
    """From the end of the prefill leg to the first token, less the step that computes it."""
    prior = ledger.transfer(OTHER, FIRST)
    for _ in range(3):
        hand_over(ledger, clock, 1.0)
    learned = ledger.transfer(OTHER, FIRST)
    step_s = ledger.load(FIRST).rates.step_s

    assert learned.seconds(100) == pytest.approx(1.0 - step_s)
    ledger.forget(OTHER)
    assert ledger.transfer(OTHER, FIRST).seconds(100) > prior.seconds(100)


def test_a_transfer_that_nobody_saw_teaches_nothing(ledger: LoadLedger, clock: Clock) -> None:
    """An answer that isn't streamed, or a leg that was never handed anything."""
    prior = ledger.transfer(OTHER, FIRST)
    for _ in range(9):
        hand_over(ledger, clock, 1.0, streamed=False)
        with ledger.hold(work(kind="decode")) as guard:
            guard.first_token()

    assert ledger.transfer(OTHER, FIRST) == prior


def test_rates_are_known_once_prefill_and_transfer_are(ledger: LoadLedger, clock: Clock) -> None:
    """Comparing a learned time with a prior would decide by the prior."""
    for _ in range(3):
        hand_over(ledger, clock, 1.0)
    seen = ledger.learning
    assert seen is not None
    assert (seen.hand_overs, seen.needed) == (3, 3)
    assert seen.prefills < 3

    for _ in range(5):
        with ledger.hold(work()) as guard:
            clock.now_s += 1
            guard.first_token()
    assert ledger.learning is None


def test_arrivals_by_transfer_are_arrivals(ledger: LoadLedger) -> None:
    """A local prefill delays them as it delays others; they bring no work."""
    ledger.hold(work(kind="decode"))

    load = ledger.load(FIRST)
    assert load.arrivals_per_s > 0
    assert load.work_share == 0


def test_a_full_cache_is_known_by_what_was_sent_there(ledger: LoadLedger, clock: Clock) -> None:
    """Prompts and answers fill it; what leaves next is likely to be asked for if others were."""
    big = replace(work(), block_size=512, cache_tokens=10 * 512)
    for _ in range(20):
        with ledger.hold(big) as guard:
            clock.now_s += 1
            guard.first_token()
        clock.now_s += 2
    roomy = ledger.load(FIRST)
    with ledger.hold(big) as guard:
        clock.now_s += 1
        guard.first_token()
        guard.generated(5 * 512)
    full = ledger.load(FIRST)
    ledger.forget(FIRST)

    assert roomy.free_tokens == 4 * 512
    assert full.free_tokens == 0
    assert full.reuse_chance > 0.5
    assert ledger.load(OTHER).reuse_chance == ledger.load(OTHER).free_tokens == 0


def test_prompts_without_a_block_size_say_nothing_of_the_cache(ledger: LoadLedger) -> None:
    """Several in one request: their keys have no depth."""
    ledger.hold(replace(work(), block_size=0, cache_tokens=10 * 512))

    assert ledger.load(FIRST).reuse_chance == 0


def test_busy_is_a_part_of_the_load(ledger: LoadLedger, clock: Clock) -> None:
    """Requests and queued tokens, also when a first token that nobody sees is due."""
    for streamed in (True, False):
        ledger.hold(replace(work(), streamed=streamed))
    queued = ledger.busy(FIRST)
    clock.now_s += 60.0

    assert queued == (2, 2 * work().uncached_tokens)
    assert ledger.busy(FIRST) == (2, work().uncached_tokens)
    load = ledger.load(FIRST)
    assert ledger.busy(FIRST) == (load.requests, load.queued_tokens)
    assert ledger.prefill_rates(FIRST).fixed_s == load.rates.fixed_s
    assert ledger.busy(OTHER) == (0, 0)


@pytest.mark.parametrize("kind", ["whole", "prefill", "decode"])
@pytest.mark.parametrize("remembered_s", [0.0, 60.0])
def test_leg_without_keys_counts_and_promises_nothing(
    ledger: LoadLedger, kind: str, remembered_s: float
) -> None:
    """Of a prompt that nobody has read: in flight until its end, and never held by the rank."""
    with ledger.hold(replace(work(kind=kind, keys=0), remembered_s=remembered_s)) as leg:
        assert ledger.load(FIRST).requests == 1
        leg.first_token()
        assert ledger.load(FIRST).decoding == 1

    assert ledger.busy(FIRST) == (0, 0)
    assert not ledger.has_guesses(FIRST)
    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 0
