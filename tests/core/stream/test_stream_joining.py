"""A stream that begins: what came before is asked for, or is lost."""

from collections.abc import Callable

from indexer.core.stream import RankStream
from indexer.core.stream_effects import ApplyBatch, ReplayEnded, RequestReplay, TrustChanged
from indexer.core.types import Trust

Streams = Callable[..., RankStream]
Payload = Callable[..., bytes]
Waited = Callable[..., ApplyBatch]


def test_idle_engine_is_asked_at_once_and_found_fresh(fresh: Streams) -> None:
    """An idle engine publishes nothing, so waiting for its next batch would wait for ever."""
    stream = fresh()

    assert (stream.trust.level, stream.last_seq) == (Trust.EXACT, None)


def test_joining_replays_what_the_engine_still_has(
    make_stream: Streams, batch: Payload, waited: Waited
) -> None:
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


def test_live_batches_wait_for_the_joining_replay(
    make_stream: Streams, batch: Payload, waited: Waited
) -> None:
    """Applied first, they could resurrect what an older batch stores and they removed."""
    stream = make_stream()
    stream.on_connected()

    assert stream.on_live(2, batch(2)) == []
    assert stream.held_batches == 1
    assert stream.replaying
    assert stream.on_replayed(1, 0, batch(0)) == [waited(0)]
    assert stream.on_replayed(1, 1, batch(1)) == [waited(1), waited(2)]


def test_first_live_batch_asks_for_the_beginning(make_stream: Streams, batch: Payload) -> None:
    """A first number above 0 says that something came before."""
    stream = make_stream()

    assert stream.on_live(5, batch(5)) == [RequestReplay(0, 1)]


def test_first_live_batch_with_number_0_needs_no_replay(
    make_stream: Streams, batch: Payload, waited: Waited
) -> None:
    """Nothing came before it."""
    stream = make_stream()

    assert stream.on_live(0, batch(0)) == [TrustChanged(Trust.EXACT, "joined_at_0"), waited(0)]


def test_lost_beginning_leaves_the_rank_degraded(
    make_stream: Streams, batch: Payload, waited: Waited
) -> None:
    """The ring has rolled over: what it held before is unknown for good."""
    stream = make_stream()
    stream.on_connected()

    assert stream.on_replayed(1, 4, batch(4)) == [
        TrustChanged(Trust.DEGRADED, "joined_late"),
        waited(4),
    ]
    assert stream.on_replay_end(1) == [ReplayEnded("rolled_over")]


def test_live_batches_older_than_the_ring_are_kept(
    make_stream: Streams, batch: Payload, waited: Waited
) -> None:
    """A ring shorter than what we already hold takes nothing away."""
    stream = make_stream()
    for seq in (3, 4):
        stream.on_live(seq, batch(seq))

    assert stream.on_replayed(1, 4, batch(4)) == [
        TrustChanged(Trust.DEGRADED, "joined_late"),
        waited(3),
        waited(4),
    ]


def test_beginning_published_while_asking_is_applied(
    make_stream: Streams, batch: Payload, waited: Waited
) -> None:
    """The end marker may overtake the first live batch, or the other way round."""
    stream = make_stream()
    stream.on_connected()
    stream.on_live(0, batch(0))

    assert stream.on_replay_end(1) == [
        ReplayEnded("empty"),
        TrustChanged(Trust.EXACT, "joined_at_0"),
        waited(0),
    ]


def test_beginning_lost_on_the_way_is_asked_for_again(
    make_stream: Streams, batch: Payload, waited: Waited
) -> None:
    """PUB drops what a subscriber's connection is too young for; the ring has it by now."""
    stream = make_stream()
    stream.on_connected()
    stream.on_live(1, batch(1))

    assert stream.on_replay_end(1) == [ReplayEnded("empty"), RequestReplay(0, 2)]
    assert stream.on_replayed(2, 0, batch(0)) == [waited(0), waited(1)]


def test_engine_that_buffers_nothing_is_joined_late(
    make_stream: Streams, batch: Payload, waited: Waited
) -> None:
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


def test_silent_replay_socket_is_given_up(make_stream: Streams) -> None:
    """Nothing is known of an engine that neither publishes nor answers."""
    stream = make_stream()
    stream.on_connected()

    assert stream.on_replay_failed(1) == [ReplayEnded("silent"), RequestReplay(0, 2)]
    assert stream.on_replay_failed(2) == [ReplayEnded("silent")]
    assert (stream.trust.level, stream.trust.reason) == (Trust.LOAD_ONLY, "no_events_yet")


def test_first_batch_survives_a_silent_replay_socket(
    make_stream: Streams, batch: Payload, waited: Waited
) -> None:
    """Number 0 is the beginning, whatever the replay socket does."""
    stream = make_stream(max_silences=1)
    stream.on_connected()
    stream.on_live(0, batch(0))

    assert stream.on_replay_failed(1) == [
        ReplayEnded("silent"),
        TrustChanged(Trust.EXACT, "joined_at_0"),
        waited(0),
    ]


def test_late_join_without_replay_is_degraded(
    make_deaf_stream: Streams, batch: Payload, waited: Waited
) -> None:
    """What came before can't be had."""
    stream = make_deaf_stream()

    assert stream.on_connected() == []
    assert stream.on_live(7, batch(7)) == [TrustChanged(Trust.DEGRADED, "joined_late"), waited(7)]
