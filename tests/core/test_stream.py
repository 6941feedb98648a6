"""Order, gaps, replay, restarts of one rank's stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.replay import StreamLimits
from indexer.core.stream import RankStream
from indexer.core.stream_effects import (
    ApplyBatch,
    BatchOutcome,
    Dropped,
    Effect,
    GapLost,
    GapOpened,
    GapRepaired,
    OpenEpoch,
    ReplayEnded,
    RequestReplay,
    TrustChanged,
)
from indexer.core.types import Trust
from indexer.core.witness import Evidence


def batch(seq: int, life: int = 0, ts: int | None = None) -> bytes:
    """Payload that says when it was published: later lives are later."""
    return b"%d:%d" % (life * 1000 + seq if ts is None else ts, life)


def ts_of(payload: bytes) -> float | None:
    head, colon, _ = payload.partition(b":")
    return float(head) if colon else None


def make_stream(**limits: int) -> RankStream:
    return RankStream(can_replay=True, ts_of=ts_of, limits=StreamLimits(**limits))


def make_deaf_stream() -> RankStream:
    """A stream of an engine that has no replay socket."""
    return RankStream(can_replay=False, ts_of=ts_of, limits=StreamLimits())


def fresh(**limits: int) -> RankStream:
    """A stream that joined an engine before its first batch."""
    stream = make_stream(**limits)
    assert stream.on_connected() == [RequestReplay(0, 1)]
    assert stream.on_replay_end(1) == [ReplayEnded("empty"), TrustChanged(Trust.EXACT, "fresh")]
    return stream


def live_at(last: int, **limits: int) -> RankStream:
    """A stream that has applied 0 to `last` as they came."""
    stream = fresh(**limits)
    for seq in range(last + 1):
        assert stream.on_live(seq, batch(seq)) == [ApplyBatch(seq, batch(seq))]
    return stream


def without_replay(last: int) -> RankStream:
    """A stream of an engine that has no replay socket, at `last`."""
    stream = make_deaf_stream()
    for seq in range(last + 1):
        stream.on_live(seq, batch(seq))
    return stream


def waited(seq: int, life: int = 0) -> ApplyBatch:
    return ApplyBatch(seq, batch(seq, life), replayed=True)


# Joining.


def test_idle_engine_is_asked_at_once_and_found_fresh() -> None:
    """An idle engine publishes nothing, so waiting for its next batch would wait for ever."""
    stream = fresh()

    assert (stream.trust.level, stream.last_seq) == (Trust.EXACT, None)


def test_joining_replays_what_the_engine_still_has() -> None:
    """A replay complete from 0 makes the rank exact."""
    stream = make_stream()
    stream.on_connected()

    assert stream.on_replayed(1, 0, batch(0)) == [waited(0)]
    assert stream.on_replayed(1, 1, batch(1)) == [waited(1)]
    assert stream.on_replay_end(1) == [
        ReplayEnded("answered"),
        TrustChanged(Trust.EXACT, "replayed"),
    ]
    assert stream.last_seq == 1


def test_live_batches_wait_for_the_joining_replay() -> None:
    """Applied first, they could resurrect what an older batch stores and they removed."""
    stream = make_stream()
    stream.on_connected()

    assert stream.on_live(2, batch(2)) == []
    assert stream.held_batches == 1
    assert stream.is_replaying
    assert stream.on_replayed(1, 0, batch(0)) == [waited(0)]
    assert stream.on_replayed(1, 1, batch(1)) == [waited(1), waited(2)]


def test_first_live_batch_asks_for_the_beginning() -> None:
    """A first number above 0 says that something came before."""
    stream = make_stream()

    assert stream.on_live(5, batch(5)) == [RequestReplay(0, 1)]


def test_first_live_batch_with_number_0_needs_no_replay() -> None:
    """Nothing came before it."""
    stream = make_stream()

    assert stream.on_live(0, batch(0)) == [TrustChanged(Trust.EXACT, "joined_at_0"), waited(0)]


def test_lost_beginning_leaves_the_rank_degraded() -> None:
    """The ring has rolled over: what it held before is unknown for good."""
    stream = make_stream()
    stream.on_connected()

    assert stream.on_replayed(1, 4, batch(4)) == [
        TrustChanged(Trust.DEGRADED, "joined_late"),
        waited(4),
    ]
    assert stream.on_replay_end(1) == [ReplayEnded("rolled_over")]


def test_live_batches_older_than_the_ring_are_kept() -> None:
    """A ring shorter than what we already hold takes nothing away."""
    stream = make_stream()
    for seq in (3, 4):
        stream.on_live(seq, batch(seq))

    assert stream.on_replayed(1, 4, batch(4)) == [
        TrustChanged(Trust.DEGRADED, "joined_late"),
        waited(3),
        waited(4),
    ]


def test_beginning_published_while_asking_is_applied() -> None:
    """The end marker may overtake the first live batch, or the other way round."""
    stream = make_stream()
    stream.on_connected()
    stream.on_live(0, batch(0))

    assert stream.on_replay_end(1) == [
        ReplayEnded("empty"),
        TrustChanged(Trust.EXACT, "joined_at_0"),
        waited(0),
    ]


def test_beginning_lost_on_the_way_is_asked_for_again() -> None:
    """PUB drops what a subscriber's connection is too young for; the ring has it by now."""
    stream = make_stream()
    stream.on_connected()
    stream.on_live(1, batch(1))

    assert stream.on_replay_end(1) == [ReplayEnded("empty"), RequestReplay(0, 2)]
    assert stream.on_replayed(2, 0, batch(0)) == [waited(0), waited(1)]


def test_engine_that_buffers_nothing_is_joined_late() -> None:
    """`buffer_steps: 0` answers every replay with its end; live goes on nevertheless."""
    stream = make_stream(max_asks=2)
    stream.on_live(3, batch(3))
    stream.on_replay_end(1)

    assert stream.on_replay_end(2) == [
        ReplayEnded("empty"),
        TrustChanged(Trust.DEGRADED, "joined_late"),
        waited(3),
    ]
    assert stream.on_live(4, batch(4)) == [ApplyBatch(4, batch(4))]


def test_silent_replay_socket_is_given_up() -> None:
    """Nothing is known of an engine that neither publishes nor answers."""
    stream = make_stream()
    stream.on_connected()

    assert stream.on_replay_failed(1) == [ReplayEnded("silent"), RequestReplay(0, 2)]
    assert stream.on_replay_failed(2) == [ReplayEnded("silent")]
    assert (stream.trust.level, stream.trust.reason) == (Trust.LOAD_ONLY, "no_events_yet")


def test_first_batch_survives_a_silent_replay_socket() -> None:
    """Number 0 is the beginning, whatever the replay socket does."""
    stream = make_stream(max_silences=1)
    stream.on_connected()
    stream.on_live(0, batch(0))

    assert stream.on_replay_failed(1) == [
        ReplayEnded("silent"),
        TrustChanged(Trust.EXACT, "joined_at_0"),
        waited(0),
    ]


def test_late_join_without_replay_is_degraded() -> None:
    """What came before can't be had."""
    stream = make_deaf_stream()

    assert stream.on_connected() == []
    assert stream.on_live(7, batch(7)) == [TrustChanged(Trust.DEGRADED, "joined_late"), waited(7)]


# Gaps.


def test_gap_asks_for_replay_and_holds_the_batch() -> None:
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


def test_gap_behind_the_ring_is_lost() -> None:
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


def test_number_that_was_never_sent_is_not_waited_for() -> None:
    """An engine that failed to encode a batch has used its number up: nobody has it."""
    stream = live_at(2)
    stream.on_live(4, batch(4))

    assert stream.on_replayed(2, 4, batch(4)) == [
        GapLost(3, 3),
        TrustChanged(Trust.DEGRADED, "gap_lost"),
        waited(4),
    ]


def test_hole_in_a_replay_is_asked_for_again() -> None:
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


def test_holes_without_end_are_given_up() -> None:
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


def test_unanswered_gap_is_given_up() -> None:
    """A replay socket that stays silent doesn't stop the stream."""
    stream = live_at(2, max_silences=1)
    stream.on_live(4, batch(4))

    assert stream.on_replay_failed(2) == [
        ReplayEnded("silent"),
        GapLost(3, 3),
        TrustChanged(Trust.DEGRADED, "gap_lost"),
        waited(4),
    ]


def test_second_loss_is_reported_and_changes_no_trust() -> None:
    """Degraded is degraded."""
    stream = without_replay(2)
    stream.on_live(4, batch(4))

    assert stream.on_live(6, batch(6)) == [GapOpened(5, 5), GapLost(5, 5), waited(6)]


def test_replay_cut_short_goes_on_where_it_stopped() -> None:
    """Up to 0.32 a full queue can swallow the end marker too."""
    stream = make_stream()
    stream.on_connected()
    stream.on_replayed(1, 0, batch(0))

    assert stream.on_replay_failed(1) == [ReplayEnded("cut"), RequestReplay(1, 2)]
    assert stream.on_replay_end(2) == [
        ReplayEnded("empty"),
        TrustChanged(Trust.EXACT, "replayed"),
    ]


def test_replay_cut_for_the_last_time_counts_what_came() -> None:
    """Nothing of it is missing so far: a later number would show it."""
    stream = make_stream(max_asks=1)
    stream.on_connected()
    stream.on_replayed(1, 0, batch(0))

    assert stream.on_replay_failed(1) == [
        ReplayEnded("cut"),
        TrustChanged(Trust.EXACT, "replayed"),
    ]


def test_too_many_waiting_batches_end_the_wait() -> None:
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


def test_replay_itself_may_not_overfill_the_buffer() -> None:
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


def test_gap_without_replay_is_lost_at_once() -> None:
    """There is nobody to ask."""
    stream = without_replay(2)

    assert stream.on_live(4, batch(4)) == [
        GapOpened(3, 3),
        GapLost(3, 3),
        TrustChanged(Trust.DEGRADED, "gap_lost"),
        waited(4),
    ]


def test_overtaken_live_batch_fills_its_gap() -> None:
    """Older than the newest and never seen: it is what is missing, not a restart."""
    stream = live_at(2)
    stream.on_live(4, batch(4))

    assert stream.on_live(3, batch(3)) == []
    assert stream.on_replayed(2, 3, batch(3)) == [waited(3), waited(4), GapRepaired(3, 3)]


# Restarts.


@pytest.mark.parametrize("can_replay", [True, False], ids=["with-replay", "without-replay"])
def test_number_that_falls_back_opens_an_epoch(can_replay: bool) -> None:
    """F02: the cache of the old process is gone before the new batch is applied."""
    stream = live_at(9) if can_replay else without_replay(9)

    assert stream.on_live(0, batch(0, life=1)) == [OpenEpoch("restarted"), waited(0, life=1)]
    assert stream.on_live(1, batch(1, life=1)) == [ApplyBatch(1, batch(1, life=1))]


def test_restart_seen_late_replays_its_beginning() -> None:
    """The first number we see of the new life need not be its first."""
    stream = live_at(9)

    assert stream.on_live(3, batch(3, life=1)) == [OpenEpoch("restarted"), RequestReplay(0, 2)]
    assert stream.on_replayed(2, 0, batch(0, life=1)) == [waited(0, life=1)]


def test_restart_during_a_replay_abandons_it() -> None:
    """The old life's gap doesn't matter any more."""
    stream = live_at(2)
    stream.on_live(5, batch(5))

    assert stream.on_live(0, batch(0, life=1)) == [
        ReplayEnded("abandoned"),
        OpenEpoch("restarted"),
        waited(0, life=1),
    ]


def test_identical_batch_is_a_duplicate() -> None:
    """F02: byte for byte what was applied under that number, so no restart."""
    stream = live_at(4)

    assert stream.on_live(2, batch(2)) == [Dropped(2, "duplicate")]


def test_identical_waiting_batch_is_a_duplicate() -> None:
    """The same goes for what waits."""
    stream = live_at(2)
    stream.on_live(5, batch(5))

    assert stream.on_live(5, batch(5)) == [Dropped(5, "duplicate")]


def test_older_batch_is_late_and_the_life_is_checked() -> None:
    """F02: dropped, counted, replay asked; and asked once, not for each of them."""
    stream = live_at(4)

    assert stream.on_live(2, batch(2, ts=1)) == [Dropped(2, "late"), RequestReplay(4, 2)]
    assert stream.on_live(3, batch(3, ts=2)) == [Dropped(3, "late")]
    assert stream.on_replayed(2, 4, batch(4)) == []
    assert stream.on_replay_end(2) == [ReplayEnded("answered")]
    assert stream.on_live(2, batch(2, ts=1)) == [Dropped(2, "late")]
    assert stream.trust.level is Trust.EXACT


def test_restart_with_a_clock_set_back_is_found_by_replay() -> None:
    """It looks late; the other payload under our last number tells."""
    stream = live_at(4)
    stream.on_live(2, batch(2, ts=1))

    assert stream.on_replay_end(2) == [
        ReplayEnded("contradicted"),
        OpenEpoch("late_batch_contradicted"),
        RequestReplay(0, 3),
    ]


def test_late_batch_without_replay_is_degrading() -> None:
    """It can't be told from a restart with a clock set back."""
    stream = without_replay(4)

    assert stream.on_live(2, batch(2, ts=1)) == [
        Dropped(2, "late"),
        TrustChanged(Trust.DEGRADED, "late_batch_unverified"),
    ]


def test_garbage_under_an_old_number_is_no_restart() -> None:
    """F20: one bad message must not clear the rank."""
    stream = live_at(4)

    assert stream.on_live(2, b"garbage") == [Dropped(2, "undecodable")]


def test_garbage_under_a_far_number_opens_no_gap() -> None:
    """Random bytes in the number's place would otherwise make all that follows look old."""
    stream = live_at(4)

    assert stream.on_live(2**63, b"garbage") == [Dropped(2**63, "undecodable")]
    assert stream.on_live(5, batch(5)) == [ApplyBatch(5, batch(5))]


def test_garbage_in_its_turn_uses_up_its_number() -> None:
    """Decoding counts it; the stream goes on."""
    stream = live_at(0)

    assert stream.on_live(1, b"garbage") == [ApplyBatch(1, b"garbage")]
    assert stream.on_live(2, batch(2)) == [ApplyBatch(2, batch(2))]


def test_anything_after_garbage_is_newer() -> None:
    """A restart is seen even if the last batch had no time in it."""
    stream = live_at(0)
    stream.on_live(1, b"garbage")

    assert stream.on_live(0, batch(0, life=1)) == [OpenEpoch("restarted"), waited(0, life=1)]


# Connections.


def test_reconnect_asks_to_see_the_last_batch_again() -> None:
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


def test_restart_behind_a_rising_number_is_found_by_replay() -> None:
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


def test_idle_restarted_engine_is_found_by_replay() -> None:
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


def test_ring_that_rolled_past_us_proves_nothing() -> None:
    """Entries that nobody vouches for go; what the ring still has is joined late."""
    stream = live_at(4)
    stream.on_disconnected()
    stream.on_connected()

    assert stream.on_replayed(2, 8, batch(8)) == [
        OpenEpoch("reconnect_unproven"),
        TrustChanged(Trust.DEGRADED, "joined_late"),
        waited(8),
    ]


def test_reconnect_without_replay_is_unverified() -> None:
    """Kept, but not to be believed."""
    stream = without_replay(4)
    stream.on_disconnected()

    assert stream.on_connected() == [TrustChanged(Trust.DEGRADED, "reconnect_unverified")]
    assert stream.on_live(5, batch(5)) == [ApplyBatch(5, batch(5))]


def test_unanswered_check_is_unverified() -> None:
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


def test_connection_lost_during_a_gap_checks_the_life_first() -> None:
    """The answer under way may be cut, and the next one another process's."""
    stream = live_at(2)
    stream.on_live(4, batch(4))
    assert ReplayEnded("abandoned") in stream.on_disconnected()

    assert RequestReplay(2, 3) in stream.on_connected()
    stream.on_replayed(3, 2, batch(2))
    assert stream.on_replayed(3, 3, batch(3)) == [waited(3), waited(4), GapRepaired(3, 3)]


def test_connection_lost_while_joining_forgets_what_waits() -> None:
    """It may belong to a process that is gone."""
    stream = make_stream()
    stream.on_live(4, batch(4))
    assert stream.on_disconnected() == [ReplayEnded("abandoned")]

    assert stream.held_batches == 0
    assert stream.on_connected() == [RequestReplay(0, 2)]


def test_reconnect_of_a_fresh_engine_joins_again() -> None:
    """No batch has been applied, so there is none to see again."""
    stream = fresh()
    stream.on_disconnected()

    assert stream.on_connected() == [RequestReplay(0, 2)]
    assert stream.on_replay_end(2) == [ReplayEnded("empty")]
    assert stream.on_live(0, batch(0)) == [ApplyBatch(0, batch(0))]


def test_first_batch_after_a_reconnect_of_a_fresh_engine_is_its_first() -> None:
    """Number 0 leaves nothing to ask for."""
    stream = fresh()
    stream.on_disconnected()

    assert waited(0) in stream.on_live(0, batch(0))


def test_batch_of_a_process_that_died_before_it_counted_is_forgotten() -> None:
    """A fresh engine that restarts twice while it is joined leaves nothing behind."""
    stream = fresh()
    stream.on_disconnected()
    stream.on_connected()
    stream.on_live(0, batch(0, life=1))
    stream.on_disconnected()

    assert stream.on_connected() == [RequestReplay(0, 3)]
    assert stream.on_replayed(3, 0, batch(0, life=2)) == [waited(0, life=2)]


def test_batch_between_two_connections_is_doubted() -> None:
    """It may be the dead process's, read late; the new one's first batches may be lost."""
    stream = fresh()
    stream.on_disconnected()
    assert waited(0) in stream.on_live(0, batch(0))

    assert RequestReplay(0, 2) in stream.on_connected()
    assert OpenEpoch("reconnect_contradicted") in stream.on_replayed(2, 0, batch(0, life=1))


def test_connected_again_without_a_loss_asks_nothing() -> None:
    """On a shared port other engines connect as well."""
    stream = live_at(2)

    assert stream.on_connected() == []


def test_gap_answered_by_nothing_is_another_process() -> None:
    """It must have what we hold, and has nothing."""
    stream = live_at(2)
    stream.on_live(4, batch(4))

    assert stream.on_replay_end(2) == [
        ReplayEnded("contradicted"),
        OpenEpoch("replay_contradicted"),
        RequestReplay(0, 3),
    ]


def test_replay_of_someone_else_is_given_up() -> None:
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


# The way back.


CLEARED = BatchOutcome(is_cleared=True)
REFUSED = BatchOutcome(has_refusals=True)
PARKED = BatchOutcome(orphans=2)


def test_clear_after_the_loss_makes_the_rank_exact() -> None:
    """Nothing is held, so nothing is unknown."""
    stream = without_replay(0)
    stream.on_live(2, batch(2))

    assert stream.on_applied(0, CLEARED) == []
    assert stream.on_applied(2, CLEARED) == [TrustChanged(Trust.EXACT, "cleared")]


def test_clear_with_an_open_gap_changes_nothing() -> None:
    """What is missing may come after it."""
    stream = live_at(2)
    stream.on_applied(2, REFUSED)
    stream.on_live(4, batch(4))

    assert stream.on_applied(3, CLEARED) == []


def test_batch_that_shows_nothing_changes_nothing() -> None:
    """The common case."""
    assert live_at(2).on_applied(2, BatchOutcome()) == []


def test_bound_of_the_tables_lowers_trust() -> None:
    """Blocks left that the engine has."""
    outcome = BatchOutcome(is_bound_hit=True)

    assert live_at(2).on_applied(2, outcome) == [TrustChanged(Trust.DEGRADED, "bound_hit")]


def degraded_at(last: int, **limits: int) -> RankStream:
    """A stream that lost number 1 to a silent replay socket, and is at `last`."""
    stream = live_at(0, max_silences=1, **limits)
    stream.on_live(2, batch(2))
    stream.on_replay_failed(2)
    for seq in range(3, last + 1):
        stream.on_live(seq, batch(seq))
    assert stream.trust.reason == "gap_lost"
    return stream


def test_rebuild_starts_over_from_0() -> None:
    """F05: blocks whose parents were lost attach when the beginning is told again."""
    stream = degraded_at(2)

    assert stream.on_rebuild_wanted() == [RequestReplay(0, 3)]
    assert stream.on_live(3, batch(3)) == []
    assert stream.on_replayed(3, 0, batch(0)) == [OpenEpoch("rebuilt"), waited(0)]
    assert stream.on_replayed(3, 1, batch(1)) == [waited(1)]
    assert stream.on_replayed(3, 2, batch(2)) == [waited(2), waited(3)]
    assert stream.on_replay_end(3) == [
        ReplayEnded("answered"),
        TrustChanged(Trust.EXACT, "replayed"),
    ]


def test_rebuild_without_a_beginning_changes_nothing() -> None:
    """The ring has less than we know, and will never have more."""
    stream = degraded_at(3)
    stream.on_rebuild_wanted()

    assert stream.on_replayed(3, 2, batch(2)) == []
    assert stream.on_replayed(3, 3, batch(3)) == []
    assert stream.on_replay_end(3) == [ReplayEnded("rolled_over")]
    assert stream.on_rebuild_wanted() == []


def test_rebuild_that_nobody_answers_changes_nothing() -> None:
    """Live batches that waited go on."""
    stream = degraded_at(3)
    stream.on_rebuild_wanted()
    stream.on_live(4, batch(4))

    assert stream.on_replay_failed(3) == [ReplayEnded("silent"), waited(4)]


def test_rebuild_is_not_asked_for_when_it_cannot_help() -> None:
    """No replay socket, nothing known, nothing wrong, or a question already open."""
    busy = degraded_at(2)
    busy.on_live(4, batch(4))
    deaf = without_replay(0)
    deaf.on_live(2, batch(2))

    assert deaf.on_rebuild_wanted() == []
    assert make_stream().on_rebuild_wanted() == []
    assert live_at(2).on_rebuild_wanted() == []
    assert busy.on_rebuild_wanted() == []


def test_refused_events_degrade_until_a_clear() -> None:
    """What they said is unknown; replaying them would say it no better."""
    stream = live_at(3)

    assert stream.on_applied(3, REFUSED) == [TrustChanged(Trust.DEGRADED, "events_refused")]
    assert not stream.wants_rebuild
    assert stream.on_applied(3, CLEARED) == []
    assert stream.on_applied(4, CLEARED) == [TrustChanged(Trust.EXACT, "cleared")]


def test_refused_events_of_a_dead_process_are_forgotten() -> None:
    """A new epoch that is whole is exact."""
    stream = live_at(3)
    stream.on_applied(3, REFUSED)

    assert stream.on_live(0, batch(0, life=1)) == [
        OpenEpoch("restarted"),
        TrustChanged(Trust.EXACT, "joined_at_0"),
        waited(0, life=1),
    ]


def test_refused_events_in_a_replay_are_not_healed_by_its_end() -> None:
    """Complete, and yet not all of it could be used."""
    stream = make_stream()
    stream.on_connected()
    stream.on_replayed(1, 0, batch(0))
    assert stream.on_applied(0, REFUSED) == []

    assert stream.on_replay_end(1) == [
        ReplayEnded("answered"),
        TrustChanged(Trust.DEGRADED, "events_refused"),
    ]


def test_orphans_degrade_and_ask_for_the_beginning() -> None:
    """F05: their parent is known to the engine, and may be had."""
    stream = live_at(3)

    assert stream.on_applied(3, PARKED) == [TrustChanged(Trust.DEGRADED, "orphans")]
    assert stream.on_rebuild_wanted() == [RequestReplay(0, 2)]


def test_rank_without_orphans_is_exact_again() -> None:
    """They were attached, or removed; nothing else was wrong."""
    stream = live_at(3)
    stream.on_applied(3, PARKED)

    assert stream.on_applied(4, BatchOutcome()) == [TrustChanged(Trust.EXACT, "orphans_gone")]
    assert not stream.wants_rebuild


def test_orphans_that_outlive_a_rebuild_are_not_asked_about_again() -> None:
    """The engine has told its whole life and never named their parent."""
    stream = live_at(0)
    stream.on_applied(0, PARKED)
    stream.on_rebuild_wanted()
    stream.on_replayed(2, 0, batch(0))
    stream.on_applied(0, PARKED)

    assert stream.on_replay_end(2) == [ReplayEnded("answered")]
    assert (stream.trust.level, stream.trust.reason) == (Trust.DEGRADED, "orphans")
    assert not stream.wants_rebuild


# Laws.


class Publisher:
    """An engine's side of the protocol: numbers, a ring, answers to replay."""

    def __init__(self, ring: int) -> None:
        self._ring = ring
        self._life = 0
        self.batches: list[bytes] = []

    def restart(self) -> None:
        self._life += 1
        self.batches = []

    def publish(self) -> tuple[int, bytes]:
        seq = len(self.batches)
        self.batches.append(batch(seq, self._life))
        return seq, self.batches[-1]

    def replay(self, from_seq: int) -> list[int]:
        first = max(from_seq, len(self.batches) - self._ring)
        return list(range(first, len(self.batches)))


class Network:
    """Carries batches to a stream, with the faults that a strategy chose."""

    def __init__(self, publisher: Publisher, *, connected: bool) -> None:
        self.publisher = publisher
        self.stream = make_stream()
        self.applied: list[int] = []
        self.payloads: list[bytes] = []
        self.epochs = 0
        self._answer: list[int] = []
        self._ticket = 0
        if connected:
            self.perform(self.stream.on_connected())

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ApplyBatch(seq=seq, payload=payload):
                    self.applied.append(seq)
                    self.payloads.append(payload)
                    self.stream.on_applied(seq, BatchOutcome())
                case RequestReplay(from_seq=from_seq, ticket=ticket):
                    self._ticket = ticket
                    self._answer = self.publisher.replay(from_seq)
                case OpenEpoch():
                    self.epochs += 1
                    self.applied.clear()
                    self.payloads.clear()
                case _:
                    pass

    def answer(self, messages: int) -> None:
        """Deliver up to `messages` messages of the replay under way."""
        for _ in range(messages):
            if not self.stream.is_replaying:
                return
            if self._answer:
                seq = self._answer.pop(0)
                payload = self.publisher.batches[seq]
                self.perform(self.stream.on_replayed(self._ticket, seq, payload))
            else:
                self.perform(self.stream.on_replay_end(self._ticket))

    def play(self, steps: list[tuple[str, int]]) -> None:
        sent: list[tuple[int, bytes]] = []
        for action, amount in steps:
            match action:
                case "send":
                    sent.append(self.publisher.publish())
                    self.perform(self.stream.on_live(*sent[-1]))
                case "drop":
                    self.publisher.publish()
                case "duplicate" if sent:
                    self.perform(self.stream.on_live(*sent[-1 - amount % len(sent)]))
                case "answer":
                    self.answer(amount)
                case "restart":
                    self.publisher.restart()
                    sent.clear()
                    self.perform(self.stream.on_disconnected())
                    if amount % 2:
                        self.perform(self.stream.on_connected())
                case _:
                    pass
        self.perform(self.stream.on_live(*self.publisher.publish()))
        self.answer(10_000)


steps = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "drop", "duplicate", "answer"]),
        st.integers(1, 5),
    ),
    max_size=60,
)


@given(steps, st.booleans())
def test_full_ring_gives_every_batch_once_in_order(
    steps: list[tuple[str, int]], connected: bool
) -> None:
    """Drops and duplicates anywhere, replays interleaved anyhow: 0..n, each once, in order."""
    network = Network(Publisher(ring=10_000), connected=connected)

    network.play(steps)

    assert network.applied == list(range(len(network.publisher.batches)))
    assert network.stream.trust.level is Trust.EXACT
    assert network.epochs == 0


@given(steps, st.integers(1, 4))
def test_short_ring_never_goes_back_within_an_epoch(
    steps: list[tuple[str, int]], ring: int
) -> None:
    """What is lost is lost; what is applied only rises, up to the newest."""
    network = Network(Publisher(ring=ring), connected=True)

    network.play(steps)

    assert network.applied == sorted(set(network.applied))
    assert network.applied[-1] == len(network.publisher.batches) - 1
    assert network.stream.held_batches == 0
    missing = len(network.publisher.batches) - len(network.applied)
    assert (network.stream.trust.level is Trust.EXACT) == (missing == 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "send", "drop", "duplicate", "answer", "restart"]),
            st.integers(1, 5),
        ),
        max_size=60,
    )
)
def test_restarts_leave_exactly_the_last_life(steps: list[tuple[str, int]]) -> None:
    """However far the new process has come when we see it, nothing of an older one counts."""
    network = Network(Publisher(ring=10_000), connected=True)

    network.play(steps)

    assert network.payloads == network.publisher.batches
    assert network.stream.trust.level is Trust.EXACT


# Silence.


def test_silent_stream_is_asked_for_what_it_may_have_published() -> None:
    """Perhaps only the live socket is dead: then replay tells what it missed."""
    stream = live_at(2)
    stream.trust.on_evidence(Evidence.SILENT)

    (asked,) = stream.on_silence()

    assert isinstance(asked, RequestReplay)
    assert asked.from_seq == 3
    assert stream.on_silence() == []
    assert stream.on_replayed(asked.ticket, 3, batch(3)) == [waited(3)]
    assert stream.on_applied(3, BatchOutcome()) == [TrustChanged(Trust.EXACT, "heard_again")]


def test_silence_is_not_asked_about_where_nobody_could_answer() -> None:
    """No replay socket, or nothing known of this life."""
    assert without_replay(2).on_silence() == []
    assert make_stream().on_silence() == []
