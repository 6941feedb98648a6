"""Numbers that fall back: another process, a duplicate, a late batch or garbage."""

from collections.abc import Callable

import pytest

from indexer.core.stream import RankStream
from indexer.core.stream_effects import (
    ApplyBatch,
    Dropped,
    OpenEpoch,
    ReplayEnded,
    RequestReplay,
    TrustChanged,
)
from indexer.core.types import Trust

Streams = Callable[..., RankStream]
Payload = Callable[..., bytes]
Waited = Callable[..., ApplyBatch]


@pytest.mark.parametrize("can_replay", [True, False], ids=["with-replay", "without-replay"])
def test_number_that_falls_back_opens_an_epoch(
    can_replay: bool, live_at: Streams, without_replay: Streams, batch: Payload, waited: Waited
) -> None:
    """F02: the cache of the old process is gone before the new batch is applied."""
    stream = live_at(9) if can_replay else without_replay(9)

    assert stream.on_live(0, batch(0, life=1)) == [OpenEpoch("restarted"), waited(0, life=1)]
    assert stream.on_live(1, batch(1, life=1)) == [ApplyBatch(1, batch(1, life=1))]


def test_restart_seen_late_replays_its_beginning(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """The first number we see of the new life need not be its first."""
    stream = live_at(9)

    assert stream.on_live(3, batch(3, life=1)) == [OpenEpoch("restarted"), RequestReplay(0, 2)]
    assert stream.on_replayed(2, 0, batch(0, life=1)) == [waited(0, life=1)]


def test_restart_during_a_replay_abandons_it(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """The old life's gap doesn't matter any more."""
    stream = live_at(2)
    stream.on_live(5, batch(5))

    assert stream.on_live(0, batch(0, life=1)) == [
        ReplayEnded("abandoned"),
        OpenEpoch("restarted"),
        waited(0, life=1),
    ]


def test_identical_batch_is_a_duplicate(live_at: Streams, batch: Payload) -> None:
    """F02: byte for byte what was applied under that number, so no restart."""
    stream = live_at(4)

    assert stream.on_live(2, batch(2)) == [Dropped(2, "duplicate")]


def test_identical_waiting_batch_is_a_duplicate(live_at: Streams, batch: Payload) -> None:
    """The same goes for what waits."""
    stream = live_at(2)
    stream.on_live(5, batch(5))

    assert stream.on_live(5, batch(5)) == [Dropped(5, "duplicate")]


def test_older_batch_is_late_and_the_life_is_checked(live_at: Streams, batch: Payload) -> None:
    """F02: dropped, counted, replay asked; and asked once, not for each of them."""
    stream = live_at(4)

    assert stream.on_live(2, batch(2, ts=1)) == [Dropped(2, "late"), RequestReplay(4, 2)]
    assert stream.on_live(3, batch(3, ts=2)) == [Dropped(3, "late")]
    assert stream.on_replayed(2, 4, batch(4)) == []
    assert stream.on_replay_end(2) == [ReplayEnded("answered")]
    assert stream.on_live(2, batch(2, ts=1)) == [Dropped(2, "late")]
    assert stream.trust.level is Trust.EXACT


def test_restart_with_a_clock_set_back_is_found_by_replay(live_at: Streams, batch: Payload) -> None:
    """It looks late; the other payload under our last number tells."""
    stream = live_at(4)
    stream.on_live(2, batch(2, ts=1))

    assert stream.on_replay_end(2) == [
        ReplayEnded("contradicted"),
        OpenEpoch("late_batch_contradicted"),
        RequestReplay(0, 3),
    ]


def test_late_batch_without_replay_is_degrading(without_replay: Streams, batch: Payload) -> None:
    """It can't be told from a restart with a clock set back, not by one batch."""
    stream = without_replay(4)

    assert stream.on_live(2, batch(2, ts=1)) == [
        Dropped(2, "late"),
        TrustChanged(Trust.DEGRADED, "late_batch_unverified"),
    ]


def test_garbage_under_an_old_number_is_no_restart(live_at: Streams) -> None:
    """F20: one bad message must not clear the rank."""
    stream = live_at(4)

    assert stream.on_live(2, b"garbage") == [Dropped(2, "undecodable")]


def test_garbage_under_a_far_number_opens_no_gap(live_at: Streams, batch: Payload) -> None:
    """Random bytes in the number's place would otherwise make all that follows look old."""
    stream = live_at(4)

    assert stream.on_live(2**63, b"garbage") == [Dropped(2**63, "undecodable")]
    assert stream.on_live(5, batch(5)) == [ApplyBatch(5, batch(5))]


def test_garbage_in_its_turn_uses_up_its_number(live_at: Streams, batch: Payload) -> None:
    """Decoding counts it; the stream goes on."""
    stream = live_at(0)

    assert stream.on_live(1, b"garbage") == [ApplyBatch(1, b"garbage")]
    assert stream.on_live(2, batch(2)) == [ApplyBatch(2, batch(2))]


def test_anything_after_garbage_is_newer(live_at: Streams, batch: Payload, waited: Waited) -> None:
    """A restart is seen even if the last batch had no time in it."""
    stream = live_at(0)
    stream.on_live(1, b"garbage")

    assert stream.on_live(0, batch(0, life=1)) == [OpenEpoch("restarted"), waited(0, life=1)]
