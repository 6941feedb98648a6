"""Several processes' legs in each one's ledger: sums, repeated prompts, moments, leases."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from balancer.core.load.ledger import LegGuard, LegWork
from balancer.core.load.peers import ASK_S, MAX_AGE_S
from indexer.core.types import BlockKey, InstanceId, RankId

Two = tuple[Any, Any]
MakeProcess = Callable[..., Any]
Deliver = Callable[..., Sequence[bytes]]
Settle = Callable[..., None]

FIRST, OTHER = (RankId(InstanceId(f"http://e{number}:8000"), 0) for number in (0, 1))
KEYS = [BlockKey(2**63 + number) for number in range(8)]
LEASE_S = 3.0
WORK = LegWork(
    rank=FIRST,
    kind="whole",
    prompt_tokens=130,
    uncached_tokens=130,
    work_s=0.013,
    keys=KEYS,
    block_size=16,
)


def fail(guard: LegGuard) -> None:
    guard.__exit__(RuntimeError, RuntimeError(), None)


def test_loads_are_sums_over_processes(two: Two, settle: Settle) -> None:
    """Each counts its own and the other's."""
    here, there = two
    mine, others = here.ledger.hold(WORK), there.ledger.hold(WORK)
    settle(here, there)
    both = (here.requests, there.requests)
    mine.first_token()
    mine.__exit__(None, None, None)
    fail(others)
    settle(here, there)

    assert both == (2, 2)
    assert (here.requests, there.requests) == (0, 0)
    assert here.ledger.peers.legs == there.ledger.peers.legs == 0


def test_a_peers_prompt_is_found_by_its_sibling(two: Two, settle: Settle) -> None:
    """Its blocks are predicted here, and whose turn it is is known, too."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)

    assert here.ledger.predicted_blocks(FIRST, KEYS, 0) == len(KEYS)
    assert here.news.booked == [FIRST]
    assert there.news.booked == []


def test_a_prompt_booked_twice_in_ignorance_is_computed_once(two: Two, settle: Settle) -> None:
    """The engine finds the second one's blocks; both processes then count alike."""
    here, there = two
    mine, others = here.ledger.hold(WORK), there.ledger.hold(WORK)
    settle(here, there)
    queued = [each.ledger.load(FIRST).queued_tokens for each in two]
    mine.first_token()
    others.first_token()
    settle(here, there)

    assert queued == [132, 132]
    assert [each.ledger.load(FIRST).queued_tokens for each in two] == [0, 0]


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(replace(WORK, kind="decode"), id="it-waits-for-a-transfer"),
        pytest.param(replace(WORK, block_size=0), id="its-keys-are-of-several-prompts"),
        pytest.param(replace(WORK, uncached_tokens=1), id="it-knew-more"),
        pytest.param(replace(WORK, keys=()), id="nobody-knows-its-tokens"),
    ],
)
def test_a_leg_that_repeats_nothing_counts_as_it_was_told(
    two: Two, work: LegWork, settle: Settle
) -> None:
    """Only what another leg computes for it is taken off."""
    here, there = two
    here.ledger.hold(WORK)
    there.ledger.hold(work)
    settle(here, there)

    told = 0 if work.kind == "decode" else work.uncached_tokens
    assert here.ledger.load(FIRST).queued_tokens == 130 + told


def test_moments_are_those_of_the_sender(two: Two, settle: Settle) -> None:
    """Whatever its clock says; a late message makes nothing older."""
    here, there = two
    there.ledger.hold(WORK)
    there.clock.now_s += 2
    settle(here, there)

    assert here.ledger.load(FIRST).oldest_queued_s == here.clock.now_s - 2


def test_what_is_very_old_counts_as_old(two: Two, settle: Settle) -> None:
    """A stream of some hours must not overflow an exponential."""
    here, there = two
    there.ledger.hold(WORK)
    there.clock.now_s += 1e6
    settle(here, there)

    load = here.ledger.load(FIRST)
    assert load.oldest_queued_s == here.clock.now_s - MAX_AGE_S
    assert load.arrivals_per_s < 1


def test_a_silent_peers_legs_end_with_its_lease(two: Two, settle: Settle) -> None:
    """Killed, stuck or cut off: no load and no predicted block is left of it."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)
    here.clock.now_s += LEASE_S
    at_lease = here.ledger.beat()[1], here.requests
    here.clock.now_s += 0.1
    silent = here.ledger.beat()[1]

    assert at_lease == ([], 1)
    assert silent == ["there"]
    assert here.requests == 0
    assert here.ledger.predicted_blocks(FIRST, KEYS, 0) == 0
    assert (here.ledger.peers.count, here.ledger.peers.expired) == (0, 1)


def test_signs_of_life_renew_the_lease(two: Two, settle: Settle) -> None:
    """A leg may run for as long as it likes."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)
    for _ in range(5):
        here.clock.now_s += LEASE_S - 0.1
        for message in there.ledger.beat()[0]:
            here.ledger.on_message(message)

        assert here.ledger.beat()[1] == []
    assert here.requests == 1


def test_a_peer_that_was_only_stuck_is_counted_again(two: Two, settle: Settle) -> None:
    """Its next message shows that something is missing; its snapshot tells all."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)
    here.clock.now_s += LEASE_S + 1
    here.ledger.beat()
    for message in there.ledger.beat()[0]:
        here.ledger.on_message(message)
    settle(here, there)

    assert here.requests == 1


def test_what_engines_report_is_known_to_all(two: Two, settle: Settle) -> None:
    """Lengths of answers, and what a rank without events seems to hold."""
    here, there = two
    with there.ledger.hold(replace(WORK, remembered_s=60.0)) as guard:
        guard.first_token()
        guard.cached(16)
        guard.generated(500)
    settle(here, there)

    assert here.ledger.has_guesses(FIRST)
    assert here.ledger.load(FIRST).rates.output_tokens > 128


def test_how_instances_answered_is_told(two: Two, settle: Settle) -> None:
    """Breakers of all processes go by it."""
    here, there = two
    there.ledger.tell_outcome(FIRST.instance, ok=False, reason="engine_unreachable")
    settle(here, there)

    assert here.news.outcomes == [(FIRST.instance, False, "engine_unreachable")]
    assert there.news.outcomes == []


steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["book", "token", "end", "fail", "tell", "lose", "beat"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@given(steps)
def test_all_agree_once_everything_was_told(
    settle: Settle,
    make_process: MakeProcess,
    happen: Callable[..., None],
    happened: list[tuple[int, str, int]],
) -> None:
    """Whatever was lost on the way: the next sign of life shows it."""
    processes = [make_process(f"p{number}") for number in range(3)]
    guards: list[list[LegGuard]] = [[], [], []]
    settle(*processes)
    for number, step, which in happened:
        happen(processes, number, guards[number], step, which)
    for _ in range(3):
        for process in processes:
            process.clock.now_s += 2 * ASK_S
            for message in process.ledger.beat()[0]:
                for other in processes:
                    other.ledger.on_message(message)
        settle(*processes)

    total = sum(len(each) for each in guards)
    assert [each.requests for each in processes] == [total] * 3


@pytest.fixture(scope="session")
def happen(deliver: Deliver) -> Callable[..., None]:
    """One step of one process: what is booked, told, lost, or goes on."""

    def perform(
        processes: list[Any], number: int, held: list[LegGuard], step: str, which: int
    ) -> None:
        ledger = processes[number].ledger
        if step == "book":
            held.append(ledger.hold(WORK))
        elif step == "tell":
            deliver(processes[number], *processes)
        elif step == "lose":
            ledger.outgoing()
        elif step == "beat":
            ledger.beat()
        elif which < len(held):
            act(held, which, step)

    return perform


def act(held: list[LegGuard], which: int, step: str) -> None:
    if step == "token":
        held[which].first_token()
    elif step == "end":
        held.pop(which).__exit__(None, None, None)
    else:
        fail(held.pop(which))
