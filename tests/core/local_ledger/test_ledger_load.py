"""What the in-memory ledger says is queued and running on a rank. What every ledger must do is in conformance."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from balancer.core.load.ledger import LegGuard, LegWork, RankLoad
from balancer.core.load.local_ledger import LocalLedger
from indexer.core.types import BlockKey, InstanceId, RankId

RANK = RankId(InstanceId("http://e0:8000"), 0)
KEYS = [BlockKey(number) for number in range(1, 9)]
Work = Callable[..., LegWork]


def test_the_oldest_queued_leg_makes_progress(ledger: LocalLedger, clock: Any, work: Work) -> None:
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


def test_an_unseen_first_token_is_expected(ledger: LocalLedger, clock: Any, work: Work) -> None:
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
    ledger: LocalLedger, clock: Any, work: Work
) -> None:
    """The leg ended before its expected time: the expectation finds nothing."""
    ledger.hold(work(tokens=1000, streamed=False)).__exit__(None, None, None)
    clock.now_s += 1

    assert ledger.load(RANK).decoding == 0


def test_forgetting_an_idle_rank_leaves_nothing(ledger: LocalLedger, work: Work) -> None:
    """A rank that left takes its book along."""
    ledger.forget(RANK)
    ledger.hold(work()).__exit__(None, None, None)
    ledger.forget(RANK)

    assert ledger.load(RANK) == RankLoad()


def test_a_load_holds_whatever_a_peer_told(ledger: LocalLedger, work: Work) -> None:
    """More tokens than can be counted are very many."""
    ledger.hold(work(tokens=2**64))

    assert ledger.load(RANK).queued_tokens > 2**61


steps = st.lists(
    st.tuples(
        st.sampled_from(["whole", "unseen", "decode", "token", "end", "fail", "forget", "wait"]),
        st.integers(0, 3),
    ),
    min_size=8,
    max_size=24,
)


@given(steps)
def test_a_load_is_never_one_of_before(
    work: Work, make_ledger: Any, make_clock: Any, steps: list[tuple[str, int]]
) -> None:
    """Whatever happened to a rank since it was last asked for, its load is what its book says."""
    clock = make_clock()
    ledger = make_ledger(clock)
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
