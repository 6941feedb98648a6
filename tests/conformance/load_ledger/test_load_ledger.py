"""What every load ledger counts: legs and their blocks, however they end."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from balancer.core.load.ledger import LegWork, LoadLedger, RankLoad
from indexer.core.types import BlockKey, InstanceId, RankId

Work = Callable[..., LegWork]

FIRST, OTHER = (RankId(InstanceId(f"http://e{number}:8000"), 0) for number in (0, 1))
KEYS = [BlockKey(number) for number in range(1, 7)]


def test_an_unknown_rank_is_idle(ledger: LoadLedger) -> None:
    """Nothing in flight, nothing predicted, nothing to forget."""
    ledger.forget(FIRST)

    assert ledger.load(FIRST).requests == 0
    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 0


def test_booking_counts_at_once_and_on_its_rank_only(ledger: LoadLedger, work: Work) -> None:
    """Before the `with` block is even entered."""
    ledger.hold(work())

    load = ledger.load(FIRST)
    assert (load.requests, load.queued_tokens, load.decoding) == (1, 100, 0)
    assert ledger.load(OTHER).requests == 0
    assert ledger.predicted_blocks(OTHER, KEYS, 0) == 0


def test_the_first_token_moves_a_leg_from_queued_to_decoding_once(
    ledger: LoadLedger, work: Work
) -> None:
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
    ledger: LoadLedger, kind: str, first_token: bool, error: RuntimeError | None, work: Work
) -> None:
    """However the leg ends, and however often it is told."""
    guard = ledger.hold(work(kind=kind))
    if first_token:
        guard.first_token()
    for _ in range(2):
        guard.__exit__(type(error) if error else None, error, None)

    load = ledger.load(FIRST)
    assert (load.requests, load.queued_tokens, load.decoding) == (0, 0, 0)


def test_predictions_last_while_the_leg_waits(ledger: LoadLedger, clock: Any, work: Work) -> None:
    """A sibling behind a long queue still finds them."""
    ledger.hold(work(keys=4))
    clock.now_s += 1000

    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 4
    assert ledger.predicted_blocks(FIRST, KEYS, 3) == 1
    assert ledger.predicted_blocks(FIRST, KEYS, 4) == 0


def test_predictions_outlive_a_leg_for_a_while(ledger: LoadLedger, clock: Any, work: Work) -> None:
    """Until `believed_s` after the prompt was computed."""
    with ledger.hold(work()):
        pass
    at_once = ledger.predicted_blocks(FIRST, KEYS, 0)
    clock.now_s += 3.1

    assert at_once == 6
    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 0


def test_predictions_end_when_the_cache_may_have_turned_over(
    ledger: LoadLedger, work: Work
) -> None:
    """Of a tiny cache the events that confirm a block and those that drop it come within moments."""
    with ledger.hold(work(keys=4, believed_tokens=250)):
        pass
    kept = []
    for _ in range(3):  # 100 new tokens each
        ledger.hold(work(keys=0))
        kept.append(ledger.predicted_blocks(FIRST, KEYS, 0))

    assert kept == [4, 4, 0]


def test_what_was_sent_before_the_first_token_pushes_nothing_out(
    ledger: LoadLedger, work: Work
) -> None:
    """The rank computes it first, or keeps the blocks of a prompt it is busy with."""
    guard = ledger.hold(work(keys=4, believed_tokens=150))
    for _ in range(3):
        ledger.hold(work(keys=0))
    guard.first_token()
    ledger.hold(work(keys=0))

    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 4


def test_a_failed_leg_takes_back_what_no_other_predicts(ledger: LoadLedger, work: Work) -> None:
    """The sibling's four blocks stay."""
    ledger.hold(work(keys=4))

    def fail() -> None:
        with ledger.hold(work(keys=6)):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 4


def test_each_of_several_prompts_is_predicted_and_in_use(ledger: LoadLedger, work: Work) -> None:
    """Their keys come in one sequence, and each prompt begins at the root."""
    others = [BlockKey(1000 + number) for number in range(3)]
    several = replace(work(), keys=[*KEYS[:4], *others], chain_ends=(4, 7))
    guard = ledger.hold(several)
    predicted = [ledger.predicted_blocks(FIRST, keys, 0) for keys in (KEYS, others)]
    in_use = [ledger.promised_blocks(FIRST, keys, 0)[1] for keys in (KEYS, others)]
    blocks = ledger.load(FIRST).active_blocks
    guard.__exit__(RuntimeError, RuntimeError(), None)

    assert (predicted, in_use, blocks) == ([4, 3], [4, 3], 7)
    assert ledger.predicted_blocks(FIRST, others, 0) == 0
    assert ledger.load(FIRST).active_blocks == 0


def test_forgetting_voids_predictions_and_keeps_legs(ledger: LoadLedger, work: Work) -> None:
    """The rank restarted; who was in flight ends in its own time."""
    guard = ledger.hold(work())
    ledger.forget(FIRST)
    load = ledger.load(FIRST)
    guard.__exit__(None, None, None)

    assert load.requests == 1
    assert ledger.load(FIRST).requests == 0


def test_emptied_cache_keeps_only_what_is_yet_to_be_computed(
    ledger: LoadLedger, work: Work
) -> None:
    """Of a rank nobody knows there is nothing to drop."""
    computed, coming = ledger.hold(work(keys=2)), ledger.hold(work(keys=1))
    computed.first_token()
    before = ledger.predicted_blocks(FIRST, KEYS, 0)

    ledger.empty(FIRST)
    ledger.empty(OTHER)

    assert (before, ledger.predicted_blocks(FIRST, KEYS, 0)) == (2, 1)
    for guard in (computed, coming):
        guard.__exit__(None, None, None)


def test_forgotten_predictions_stay_forgotten(ledger: LoadLedger, work: Work) -> None:
    """A leg that fails after the rank was forgotten withdraws nothing twice."""
    guard = ledger.hold(work())
    ledger.forget(FIRST)
    voided = ledger.predicted_blocks(FIRST, KEYS, 0)
    sibling = ledger.hold(work(keys=2))
    guard.__exit__(RuntimeError, RuntimeError(), None)

    assert voided == 0
    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 2
    sibling.__exit__(None, None, None)


def test_blocks_are_in_use_from_booking_to_end(ledger: LoadLedger, work: Work) -> None:
    """Whoever waits for a transfer needs its room, too; shared blocks count once."""
    whole, decode = ledger.hold(work(keys=4)), ledger.hold(work(kind="decode", keys=6))
    both = ledger.load(FIRST).active_blocks, ledger.promised_blocks(FIRST, KEYS, 0)[1]
    decode.__exit__(None, None, None)
    one = ledger.load(FIRST).active_blocks, ledger.promised_blocks(FIRST, KEYS, 0)[1]
    whole.__exit__(ValueError, ValueError(), None)

    assert both == (6, 6)
    assert one == (4, 4)
    assert (ledger.load(FIRST).active_blocks, ledger.promised_blocks(FIRST, KEYS, 0)[1]) == (0, 0)
    assert ledger.promised_blocks(OTHER, KEYS, 0)[1] == 0


def test_busy_is_a_part_of_the_load(ledger: LoadLedger, clock: Any, work: Work) -> None:
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
    ledger: LoadLedger, kind: str, remembered_s: float, work: Work
) -> None:
    """Of a prompt that nobody has read: in flight until its end, and never held by the rank."""
    with ledger.hold(replace(work(kind=kind, keys=0), remembered_s=remembered_s)) as leg:
        assert ledger.load(FIRST).requests == 1
        leg.first_token()
        assert ledger.load(FIRST).decoding == 1

    assert ledger.busy(FIRST) == (0, 0)
    assert not ledger.has_guesses(FIRST)
    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 0


def test_of_ranks_outside_the_fleet_only_legs_in_flight_are_kept(
    ledger: LoadLedger, work: Work, clock: Any
) -> None:
    """Those that end there later, and those that a peer books there later."""
    early = ledger.hold(work())
    ledger.retain(frozenset())
    late = ledger.hold(work())
    in_flight = ledger.load(FIRST).requests
    clock.now_s += 1.0
    for guard in (early, late):
        guard.first_token()
        clock.now_s += 1.0
        guard.generated(10)
        guard.__exit__(None, None, None)
    left, rates = ledger.load(FIRST), ledger.load(FIRST).rates

    assert in_flight == 2
    assert left == RankLoad(rates=rates)
    assert rates.decode_s == 0
    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 0


def test_ranks_of_the_fleet_are_kept(ledger: LoadLedger, work: Work) -> None:
    """What they did lately counts; of the others all is forgotten at once."""
    for rank in (FIRST, OTHER):
        with ledger.hold(work(rank)) as guard:
            guard.first_token()
    ledger.retain(frozenset({FIRST}))

    assert ledger.load(FIRST).recent_work_s > 0
    assert ledger.predicted_blocks(FIRST, KEYS, 0) == 6
    assert ledger.load(OTHER).recent_work_s == 0
