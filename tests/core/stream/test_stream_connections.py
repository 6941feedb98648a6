"""Connections lost and made again: the same process, or another."""

from collections.abc import Callable

from indexer.core.stream import RankStream
from indexer.core.stream_effects import (
    ApplyBatch,
    GapRepaired,
    OpenEpoch,
    ReplayEnded,
    RequestReplay,
    TrustChanged,
)
from indexer.core.types import Trust

Streams = Callable[..., RankStream]
Payload = Callable[..., bytes]
Waited = Callable[..., ApplyBatch]


def test_reconnect_asks_to_see_the_last_batch_again(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """The same batch under the same number: the same process."""
    stream = live_at(4)
    assert stream.on_disconnected() == [TrustChanged(Trust.DEGRADED, "disconnected")]

    assert stream.on_connected() == [
        RequestReplay(4, 2),
        TrustChanged(Trust.EXACT, "reconnected"),
    ]
    assert stream.on_live(6, batch(6)) == []
    assert stream.on_replayed(2, 4, batch(4)) == []
    assert stream.on_replayed(2, 5, batch(5)) == [waited(5), waited(6)]
    assert stream.on_replay_end(2) == [ReplayEnded("answered")]
    assert stream.trust.level is Trust.EXACT


def test_restart_behind_a_rising_number_is_found_by_replay(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """The new process has passed our last number before we saw any of its batches."""
    stream = live_at(4)
    stream.on_disconnected()
    assert stream.on_live(5, batch(5, life=1)) == [RequestReplay(4, 2)]

    assert stream.on_replayed(2, 4, batch(4, life=1)) == [
        ReplayEnded("contradicted"),
        OpenEpoch("reconnect_contradicted"),
        RequestReplay(0, 3),
    ]
    assert stream.on_replayed(3, 0, batch(0, life=1)) == [waited(0, life=1)]


def test_idle_restarted_engine_is_found_by_replay(live_at: Streams, batch: Payload) -> None:
    """Nothing but an end marker for a number that existed."""
    stream = live_at(4)
    stream.on_disconnected()
    stream.on_connected()

    assert stream.on_replay_end(2) == [
        ReplayEnded("contradicted"),
        OpenEpoch("reconnect_contradicted"),
        RequestReplay(0, 3),
    ]
    assert stream.on_replay_end(3) == [ReplayEnded("empty")]
    assert stream.on_live(0, batch(0, life=1)) == [ApplyBatch(0, batch(0, life=1))]


def test_ring_that_rolled_past_us_proves_nothing(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """Entries that nobody vouches for go; what the ring still has is joined late."""
    stream = live_at(4)
    stream.on_disconnected()
    stream.on_connected()

    assert stream.on_replayed(2, 8, batch(8)) == [
        OpenEpoch("reconnect_unproven"),
        TrustChanged(Trust.DEGRADED, "joined_late"),
        waited(8),
    ]


def test_reconnect_without_replay_is_unverified(without_replay: Streams, batch: Payload) -> None:
    """Kept, but not to be believed."""
    stream = without_replay(4)
    stream.on_disconnected()

    assert stream.on_connected() == [TrustChanged(Trust.DEGRADED, "reconnect_unverified")]
    assert stream.on_live(5, batch(5)) == [ApplyBatch(5, batch(5))]


def test_unanswered_check_is_unverified(live_at: Streams, batch: Payload, waited: Waited) -> None:
    """Live goes on when the replay socket doesn't."""
    stream = live_at(4, max_silences=1)
    stream.on_disconnected()
    stream.on_connected()
    stream.on_live(5, batch(5))

    assert stream.on_replay_failed(2) == [
        ReplayEnded("silent"),
        TrustChanged(Trust.DEGRADED, "reconnect_unverified"),
        waited(5),
    ]


def test_connection_lost_during_a_gap_checks_the_life_first(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """The answer under way may be cut, and the next one another process's."""
    stream = live_at(2)
    stream.on_live(4, batch(4))
    assert ReplayEnded("abandoned") in stream.on_disconnected()

    assert RequestReplay(2, 3) in stream.on_connected()
    stream.on_replayed(3, 2, batch(2))
    assert stream.on_replayed(3, 3, batch(3)) == [waited(3), waited(4), GapRepaired(3, 3)]


def test_connection_lost_while_joining_forgets_what_waits(
    make_stream: Streams, batch: Payload
) -> None:
    """It may belong to a process that is gone."""
    stream = make_stream()
    stream.on_live(4, batch(4))
    assert stream.on_disconnected() == [ReplayEnded("abandoned")]

    assert stream.held_batches == 0
    assert stream.on_connected() == [RequestReplay(0, 2)]


def test_reconnect_of_a_fresh_engine_joins_again(fresh: Streams, batch: Payload) -> None:
    """No batch has been applied, so there is none to see again."""
    stream = fresh()
    stream.on_disconnected()

    assert stream.on_connected() == [RequestReplay(0, 2)]
    assert stream.on_replay_end(2) == [ReplayEnded("empty")]
    assert stream.on_live(0, batch(0)) == [ApplyBatch(0, batch(0))]


def test_first_batch_after_a_reconnect_of_a_fresh_engine_is_its_first(
    fresh: Streams, batch: Payload, waited: Waited
) -> None:
    """Number 0 leaves nothing to ask for."""
    stream = fresh()
    stream.on_disconnected()

    assert waited(0) in stream.on_live(0, batch(0))


def test_batch_of_a_process_that_died_before_it_counted_is_forgotten(
    fresh: Streams, batch: Payload, waited: Waited
) -> None:
    """A fresh engine that restarts twice while it is joined leaves nothing behind."""
    stream = fresh()
    stream.on_disconnected()
    stream.on_connected()
    stream.on_live(0, batch(0, life=1))
    stream.on_disconnected()

    assert stream.on_connected() == [RequestReplay(0, 3)]
    assert stream.on_replayed(3, 0, batch(0, life=2)) == [waited(0, life=2)]


def test_batch_between_two_connections_is_doubted(
    fresh: Streams, batch: Payload, waited: Waited
) -> None:
    """It may be the dead process's, read late; the new one's first batches may be lost."""
    stream = fresh()
    stream.on_disconnected()
    assert waited(0) in stream.on_live(0, batch(0))

    assert RequestReplay(0, 2) in stream.on_connected()
    assert OpenEpoch("reconnect_contradicted") in stream.on_replayed(2, 0, batch(0, life=1))


def test_connected_again_without_a_loss_asks_nothing(live_at: Streams) -> None:
    """On a shared port other engines connect as well."""
    stream = live_at(2)

    assert stream.on_connected() == []


def test_gap_answered_by_nothing_is_another_process(live_at: Streams, batch: Payload) -> None:
    """It must have what we hold, and has nothing."""
    stream = live_at(2)
    stream.on_live(4, batch(4))

    assert stream.on_replay_end(2) == [
        ReplayEnded("contradicted"),
        OpenEpoch("replay_contradicted"),
        RequestReplay(0, 3),
    ]


def test_replay_of_someone_else_is_given_up(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """A wrong replay address must not keep live batches out for ever."""
    stream = live_at(2, max_asks=2)
    stream.on_live(4, batch(4))
    stream.on_replayed(2, 3, b"7:other")
    stream.on_replayed(2, 4, b"8:other")
    stream.on_live(5, batch(5))

    assert stream.on_replayed(3, 5, b"9:other") == [
        ReplayEnded("contradicted"),
        OpenEpoch("replay_contradicted"),
        TrustChanged(Trust.LOAD_ONLY, "nothing_known"),
    ]
    assert stream.on_live(6, batch(6)) == [
        TrustChanged(Trust.DEGRADED, "joined_late"),
        waited(6),
    ]
