"""Numbers that are missing: asked for, repaired, given up."""

from collections.abc import Callable

from indexer.core.stream import RankStream
from indexer.core.stream_effects import (
    ApplyBatch,
    GapLost,
    GapOpened,
    GapRepaired,
    ReplayEnded,
    RequestReplay,
    TrustChanged,
)
from indexer.core.types import Trust

Streams = Callable[..., RankStream]
Payload = Callable[..., bytes]
Waited = Callable[..., ApplyBatch]


def test_gap_asks_for_replay_and_holds_the_batch(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """A missing number is asked for; the batch that revealed it waits its turn."""
    stream = live_at(2)

    assert stream.on_live(5, batch(5)) == [GapOpened(3, 4), RequestReplay(3, 2)]
    assert stream.on_live(6, batch(6)) == []
    assert stream.on_replayed(2, 3, batch(3)) == [waited(3)]
    assert stream.on_replayed(2, 4, batch(4)) == [
        waited(4),
        waited(5),
        waited(6),
        GapRepaired(3, 4),
    ]
    assert stream.on_replayed(2, 5, batch(5)) == []
    assert stream.on_replay_end(2) == [ReplayEnded("answered")]
    assert stream.on_live(7, batch(7)) == [ApplyBatch(7, batch(7))]
    assert stream.trust.level is Trust.EXACT


def test_gap_behind_the_ring_is_lost(live_at: Streams, batch: Payload, waited: Waited) -> None:
    """The first answer shows what the ring has forgotten."""
    stream = live_at(2)
    stream.on_live(6, batch(6))

    assert stream.on_replayed(2, 5, batch(5)) == [
        GapLost(3, 4),
        TrustChanged(Trust.DEGRADED, "gap_lost"),
        waited(5),
        waited(6),
    ]
    assert stream.on_replay_end(2) == [ReplayEnded("rolled_over")]


def test_number_that_was_never_sent_is_not_waited_for(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """An engine that failed to encode a batch has used its number up: nobody has it."""
    stream = live_at(2)
    stream.on_live(4, batch(4))

    assert stream.on_replayed(2, 4, batch(4)) == [
        GapLost(3, 3),
        TrustChanged(Trust.DEGRADED, "gap_lost"),
        waited(4),
    ]


def test_hole_in_a_replay_is_asked_for_again(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """ROUTER drops silently when its queue is full."""
    stream = live_at(2)
    stream.on_live(6, batch(6))
    stream.on_replayed(2, 3, batch(3))
    stream.on_replayed(2, 5, batch(5))

    assert stream.on_replay_end(2) == [ReplayEnded("answered"), RequestReplay(4, 3)]
    assert stream.on_replayed(3, 4, batch(4)) == [
        waited(4),
        waited(5),
        waited(6),
        GapRepaired(3, 5),
    ]


def test_holes_without_end_are_given_up(live_at: Streams, batch: Payload, waited: Waited) -> None:
    """Asking is bounded, however many holes there are."""
    stream = live_at(0, max_asks=1)
    stream.on_live(4, batch(4))
    stream.on_replayed(2, 1, batch(1))
    stream.on_replayed(2, 3, batch(3))

    assert stream.on_replay_end(2) == [
        ReplayEnded("answered"),
        GapLost(2, 2),
        TrustChanged(Trust.DEGRADED, "gap_lost"),
        waited(3),
        waited(4),
    ]


def test_unanswered_gap_is_given_up(live_at: Streams, batch: Payload, waited: Waited) -> None:
    """A replay socket that stays silent doesn't stop the stream."""
    stream = live_at(2, max_silences=1)
    stream.on_live(4, batch(4))

    assert stream.on_replay_failed(2) == [
        ReplayEnded("silent"),
        GapLost(3, 3),
        TrustChanged(Trust.DEGRADED, "gap_lost"),
        waited(4),
    ]


def test_second_loss_is_reported_and_changes_no_trust(
    without_replay: Streams, batch: Payload, waited: Waited
) -> None:
    """Degraded is degraded."""
    stream = without_replay(2)
    stream.on_live(4, batch(4))

    assert stream.on_live(6, batch(6)) == [GapOpened(5, 5), GapLost(5, 5), waited(6)]


def test_replay_cut_short_goes_on_where_it_stopped(make_stream: Streams, batch: Payload) -> None:
    """Up to 0.32 a full queue can swallow the end marker too."""
    stream = make_stream()
    stream.on_connected()
    stream.on_replayed(1, 0, batch(0))

    assert stream.on_replay_failed(1) == [ReplayEnded("cut"), RequestReplay(1, 2)]
    assert stream.on_replay_end(2) == [
        ReplayEnded("empty"),
        TrustChanged(Trust.EXACT, "replayed"),
    ]


def test_replay_cut_for_the_last_time_is_not_a_whole_life(
    make_stream: Streams, batch: Payload
) -> None:
    """What came counts; what is missing no later number of an idle engine shows."""
    stream = make_stream(max_asks=1)
    stream.on_connected()
    stream.on_replayed(1, 0, batch(0))

    assert stream.on_replay_failed(1) == [
        ReplayEnded("cut"),
        TrustChanged(Trust.DEGRADED, "replay_cut"),
    ]


def test_too_many_waiting_batches_end_the_wait(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """The buffer is bounded: the gap is given up, visibly."""
    stream = live_at(0, max_held_batches=2)
    stream.on_live(2, batch(2))
    stream.on_live(3, batch(3))

    assert stream.on_live(4, batch(4)) == [
        ReplayEnded("abandoned"),
        GapLost(1, 1),
        TrustChanged(Trust.DEGRADED, "gap_lost"),
        waited(2),
        waited(3),
        waited(4),
    ]
    assert stream.on_replayed(2, 1, batch(1)) == []
    assert stream.on_replay_end(2) == []
    assert stream.on_replay_failed(2) == []


def test_replay_itself_may_not_overfill_the_buffer(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """Batches after a hole wait like live ones."""
    stream = live_at(0, max_held_batches=1)
    stream.on_live(9, batch(9))
    stream.on_replayed(2, 1, batch(1))

    assert stream.on_replayed(2, 4, batch(4)) == [
        ReplayEnded("abandoned"),
        GapLost(2, 3),
        TrustChanged(Trust.DEGRADED, "gap_lost"),
        waited(4),
        GapLost(5, 8),
        waited(9),
    ]


def test_gap_without_replay_is_lost_at_once(
    without_replay: Streams, batch: Payload, waited: Waited
) -> None:
    """There is nobody to ask."""
    stream = without_replay(2)

    assert stream.on_live(4, batch(4)) == [
        GapOpened(3, 3),
        GapLost(3, 3),
        TrustChanged(Trust.DEGRADED, "gap_lost"),
        waited(4),
    ]


def test_overtaken_live_batch_fills_its_gap(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """Older than the newest and never seen: it is what is missing, not a restart."""
    stream = live_at(2)
    stream.on_live(4, batch(4))

    assert stream.on_live(3, batch(3)) == []
    assert stream.on_replayed(2, 3, batch(3)) == [waited(3), waited(4), GapRepaired(3, 3)]
