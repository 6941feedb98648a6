"""What every load ledger gives back of legs that nothing was computed of."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from balancer.core.load.figures import RATE_TAU_S
from balancer.core.load.ledger import LegGuard, LegWork, LoadLedger, RankLoad
from indexer.core.types import BlockKey, InstanceId, RankId

Work = Callable[..., LegWork]

FIRST = RankId(InstanceId("http://e0:8000"), 0)
BLOCK = 512
CAPACITY_TOKENS = 40 * BLOCK
WORK_S = 2.0


def big(work: Work, number: int, *, kind: str = "whole") -> LegWork:
    """A prompt of four blocks, two of which it shares with the next one."""
    return replace(
        work(kind=kind),
        prompt_tokens=4 * BLOCK,
        uncached_tokens=2 * BLOCK,
        work_s=0.0 if kind == "decode" else WORK_S,
        keys=[BlockKey(10 * (number // 2) + at) for at in (1, 2)]
        + [BlockKey(1000 + 10 * number + at) for at in (1, 2)],
        block_size=BLOCK,
        cache_tokens=CAPACITY_TOKENS,
    )


def fail(guard: LegGuard) -> None:
    guard.__exit__(RuntimeError, RuntimeError(), None)


@pytest.fixture
def warm(ledger: LoadLedger, clock: Any, work: Work) -> RankLoad:
    """An idle rank that has computed something a while ago."""
    with ledger.hold(big(work, 0)) as guard:
        clock.now_s += WORK_S
        guard.first_token()
    clock.now_s += 5.0
    return ledger.load(FIRST)


@pytest.mark.parametrize("kind", ["whole", "prefill", "decode"])
def test_what_was_refused_at_once_leaves_no_load(
    ledger: LoadLedger, warm: RankLoad, work: Work, kind: str
) -> None:
    """However many they were: the rank is what it was before them."""
    for guard in [ledger.hold(big(work, number, kind=kind)) for number in range(2, 40)]:
        fail(guard)

    load = ledger.load(FIRST)
    assert load.arrivals_per_s == pytest.approx(warm.arrivals_per_s)
    assert load.work_share == pytest.approx(warm.work_share)
    assert (load.free_tokens, load.reuse_chance) == (warm.free_tokens, warm.reuse_chance)
    assert (load.queued_tokens, load.requests) == (0, 0)


def test_time_that_passed_counts_as_work_once(
    ledger: LoadLedger, clock: Any, warm: RankLoad, work: Work
) -> None:
    """A rank computes in turn: 40 that wait for a second and leave have taken a second of it."""
    begun_s, warm_s = clock.now_s, clock.now_s - WORK_S - 5.0
    guards = [ledger.hold(big(work, number)) for number in range(2, 42)]
    clock.now_s += 1.0
    for guard in guards:
        fail(guard)

    # Both sums fade alike, so their quotient is that of what was booked.
    quotients_s = [each.work_share / each.arrivals_per_s for each in (warm, ledger.load(FIRST))]
    took_s = (quotients_s[1] - quotients_s[0]) / exp((begun_s - warm_s) / RATE_TAU_S)
    assert took_s == pytest.approx(1.0)


def test_next_leg_begins_when_the_oldest_is_gone(
    ledger: LoadLedger, clock: Any, warm: RankLoad, work: Work
) -> None:
    """Its own progress counts from there."""
    first = ledger.hold(big(work, 2))
    ledger.hold(big(work, 4))
    clock.now_s += 1.0
    before_s = ledger.load(FIRST).head_progress_s
    fail(first)
    clock.now_s += 0.25

    assert before_s == pytest.approx(1.0)
    assert ledger.load(FIRST).head_progress_s == pytest.approx(0.25)


def test_computed_prompts_count_however_they_end(
    ledger: LoadLedger, clock: Any, warm: RankLoad, work: Work
) -> None:
    """A client that leaves after the first token has had its prompt computed."""
    guard = ledger.hold(big(work, 2))
    clock.now_s += WORK_S
    guard.first_token()
    before = ledger.load(FIRST)
    fail(guard)
    after = ledger.load(FIRST)

    assert after.work_share == before.work_share > warm.work_share
    assert after.free_tokens == before.free_tokens < warm.free_tokens
    assert after.arrivals_per_s == before.arrivals_per_s


def test_unseen_first_token_that_is_due_counts(
    ledger: LoadLedger, clock: Any, warm: RankLoad, work: Work
) -> None:
    """Of an answer that isn't streamed, after longer than its prompt should take."""
    guard = ledger.hold(replace(big(work, 2), streamed=False))
    clock.now_s += 3 * WORK_S
    fail(guard)

    assert ledger.load(FIRST).work_share > warm.work_share
    assert ledger.load(FIRST).free_tokens < warm.free_tokens


def test_what_never_came_pushes_nothing_out(ledger: LoadLedger, work: Work) -> None:
    """Prompts that were withdrawn don't end what is believed of others."""
    with ledger.hold(work(keys=4, believed_tokens=250)):
        pass
    for _ in range(9):
        fail(ledger.hold(work(keys=0)))

    ledger.hold(work(keys=0))
    assert ledger.predicted_blocks(FIRST, [BlockKey(number) for number in range(1, 5)], 0) == 4


@dataclass(slots=True)
class Leg:
    """What becomes of one."""

    work: LegWork
    booked_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    failed: bool = False


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["whole", "prefill", "decode", "first", "end", "drop", "drop"]),
        st.integers(0, 7),
        st.sampled_from([0.0, 0.05, 1.0, 4.0]),
    ),
    max_size=40,
)


def told(work: Work, steps: list[tuple[str, int, float]]) -> list[Leg]:
    """The legs of such steps: (what happens, to which leg in flight, and how long after the last)."""
    legs = [Leg(big(work, 0), 1.0, 1.5, 1.5)]
    in_flight: list[Leg] = []
    now_s = 1.5
    for act, which, after_s in steps:
        now_s += after_s
        if act in {"whole", "prefill", "decode"}:
            in_flight.append(Leg(big(work, len(legs), kind=act), now_s))
            legs.append(in_flight[-1])
        elif in_flight and act == "first":
            leg = in_flight[which % len(in_flight)]
            leg.first_s = now_s if leg.first_s is None else leg.first_s
        elif in_flight:
            leg = in_flight.pop(which % len(in_flight))
            leg.ended_s, leg.failed = now_s, act == "drop"
            if act == "end" and leg.first_s is None:
                leg.first_s = now_s
    for leg in in_flight:
        leg.ended_s, leg.failed = now_s + 1.0, True
    return legs


def play(ledger: LoadLedger, clock: Any, legs: list[Leg]) -> RankLoad:
    """Have them happen; the load in the end, which is always at the same moment."""
    guards: dict[int, LegGuard] = {}

    def first(number: int) -> None:
        guards[number].first_token()

    def end(number: int, leg: Leg) -> None:
        if leg.failed:
            fail(guards[number])
        else:
            guards[number].__exit__(None, None, None)

    def hold(number: int, leg: Leg) -> None:
        guards[number] = ledger.hold(leg.work)

    agenda: list[tuple[float, int, int, Callable[[], None]]] = []
    for number, leg in enumerate(legs):
        agenda.append((leg.booked_s, 0, number, partial(hold, number, leg)))
        if leg.first_s is not None:
            agenda.append((leg.first_s, 1, number, partial(first, number)))
        agenda.append((leg.ended_s, 2, number, partial(end, number, leg)))
    for at_s, _, _, act in sorted(agenda, key=lambda each: each[:3]):
        clock.now_s = at_s
        act()
        ledger.load(FIRST)
    clock.now_s = 200.0
    return ledger.load(FIRST)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(steps=STEPS)
def test_an_idle_rank_counts_what_it_computed_and_nothing_else(
    build_ledger: Callable[[Any], LoadLedger],
    clock: Any,
    work: Work,
    steps: list[tuple[str, int, float]],
) -> None:
    """As a ledger does that never saw the legs without a first token, but for the time those took."""
    legs = told(work, steps)
    computed = [leg for leg in legs if leg.first_s is not None]
    clock.now_s = 0.5
    load = play(build_ledger(clock), clock, legs)
    clock.now_s = 0.5
    expected = play(build_ledger(clock), clock, computed)

    assert (load.requests, load.queued_tokens, load.decoding, load.active_blocks) == (0, 0, 0, 0)
    assert load.arrivals_per_s == pytest.approx(expected.arrivals_per_s, rel=1e-6)
    assert load.free_tokens == expected.free_tokens
    # In seconds of the last moment that anything happened.
    last_s = max(leg.ended_s for leg in legs)
    seconds = RATE_TAU_S * exp((200.0 - last_s) / RATE_TAU_S)
    extra_s = (load.work_share - expected.work_share) * seconds
    assert -1e-6 <= extra_s <= last_s - 1.0 + 1e-6
