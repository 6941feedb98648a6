"""When a reader takes it that nobody writes a rank any more."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.index import PrefixMatch
from indexer.core.pulse import SILENT, Pulses, lowered
from indexer.core.types import InstanceId, RankId, Tier, Trust

A, B = (RankId(InstanceId(f"http://{name}:8000"), 0) for name in "ab")
NO_RANK: frozenset[RankId] = frozenset()


def match(trust: Trust) -> PrefixMatch:
    return PrefixMatch(tokens_by_tier={Tier.GPU: 64}, block_size=16, trust=trust, epoch=1)


def test_rank_is_silent_when_its_sign_has_stayed_the_same() -> None:
    """From so many seconds on; its neighbour isn't, whose sign goes on."""
    pulses = Pulses(3.0)
    looks = [pulses.take({A: 7, B: number}, float(number)) for number in range(5)]

    assert looks == [NO_RANK, NO_RANK, NO_RANK, {A}, {A}]


@pytest.mark.parametrize("sign", [8, 6, -2], ids=["grown", "shrunk", "gone"])
def test_any_change_ends_silence_at_once(sign: int) -> None:
    """Numbers needn't grow: another server's clock may be behind."""
    pulses = Pulses(3.0)
    before = [pulses.take({A: 7}, float(number)) for number in range(4)][-1]

    assert before == {A}
    assert pulses.take({A: sign}, 4.0) == NO_RANK
    assert pulses.take({A: sign}, 5.0) == NO_RANK


def test_time_in_which_nobody_looked_counts_half_at_most() -> None:
    """A reader that was stopped for an hour, or couldn't ask, looks once more before it says so."""
    pulses = Pulses(3.0)
    pulses.take({A: 7}, 0.0)

    assert pulses.take({A: 7}, 3600.0) == NO_RANK
    assert pulses.take({A: 7}, 3602.0) == {A}


def test_rank_begins_anew_when_it_is_seen_again() -> None:
    """What comes with a later look hasn't been watched before it, nor has what was away."""
    pulses = Pulses(3.0)
    for number in range(4):
        pulses.take({A: 7}, float(number))
    without = pulses.take({B: 1}, 4.0)

    assert without == NO_RANK
    assert pulses.take({A: 7, B: 1}, 5.0) == NO_RANK
    assert pulses.take({A: 7, B: 1}, 6.0) == NO_RANK
    assert pulses.take({A: 7, B: 1}, 7.0) == {B}
    assert pulses.take({A: 7, B: 1}, 8.0) == {A, B}


@given(st.lists(st.tuples(st.floats(0.1, 1.5), st.booleans()), max_size=40))
def test_silent_is_who_gave_no_sign_for_so_long(looks: Sequence[tuple[float, bool]]) -> None:
    """However looks and signs fall."""
    pulses = Pulses(3.0)
    now_s, sign, quiet_s = 100.0, 0, 0.0
    pulses.take({A: sign}, now_s)
    for passed_s, is_sign in looks:
        now_s, sign = now_s + passed_s, sign + is_sign
        quiet_s = 0.0 if is_sign else quiet_s + passed_s
        silent = pulses.take({A: sign}, now_s)
        if abs(quiet_s - 3.0) > 1e-6:  # sums of floats
            assert (A in silent) is (quiet_s > 3.0)


@pytest.mark.parametrize(
    ("written", "told", "reason"),
    [
        (Trust.EXACT, Trust.DEGRADED, SILENT),
        (Trust.DEGRADED, Trust.DEGRADED, SILENT),
        (Trust.LOAD_ONLY, Trust.LOAD_ONLY, None),
    ],
)
def test_silent_rank_keeps_its_credit_and_is_not_exact(
    written: Trust, told: Trust, reason: str | None
) -> None:
    """Its neighbour is as it was; one that isn't in the answer is no matter."""
    stranger = RankId(InstanceId("http://gone:8000"), 0)
    before = {A: match(written), B: match(Trust.EXACT)}

    found = lowered(before, {A, stranger})

    assert (found[A].trust, found[A].reason, found[A].tokens) == (told, reason, 64)
    assert found.keys() == {A, B}
    assert found[B] is before[B]
    assert before[A].trust is written
