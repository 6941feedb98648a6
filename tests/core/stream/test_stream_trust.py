"""What applied batches and silence say of a rank, and the way back to exact."""

from collections.abc import Callable

import pytest

from indexer.core.stream import RankStream
from indexer.core.stream_effects import (
    ApplyBatch,
    BatchOutcome,
    OpenEpoch,
    ReplayEnded,
    RequestReplay,
    TrustChanged,
)
from indexer.core.types import Trust
from indexer.core.witness import Evidence

Streams = Callable[..., RankStream]
Payload = Callable[..., bytes]
Waited = Callable[..., ApplyBatch]


# The way back.


CLEARED = BatchOutcome(is_cleared=True)
REFUSED = BatchOutcome(has_refusals=True)
PARKED = BatchOutcome(orphans=2)


def test_clear_after_the_loss_makes_the_rank_exact(without_replay: Streams, batch: Payload) -> None:
    """Nothing is held, so nothing is unknown."""
    stream = without_replay(0)
    stream.on_live(2, batch(2))

    assert stream.on_applied(0, CLEARED) == []
    assert stream.on_applied(2, CLEARED) == [TrustChanged(Trust.EXACT, "cleared")]


def test_clear_with_an_open_gap_changes_nothing(live_at: Streams, batch: Payload) -> None:
    """What is missing may come after it."""
    stream = live_at(2)
    stream.on_applied(2, REFUSED)
    stream.on_live(4, batch(4))

    assert stream.on_applied(3, CLEARED) == []


def test_batch_that_shows_nothing_changes_nothing(live_at: Streams) -> None:
    """The common case."""
    assert live_at(2).on_applied(2, BatchOutcome()) == []


def test_bound_of_the_tables_lowers_trust(live_at: Streams) -> None:
    """Blocks left that the engine has."""
    outcome = BatchOutcome(is_bound_hit=True)

    assert live_at(2).on_applied(2, outcome) == [TrustChanged(Trust.DEGRADED, "bound_hit")]


@pytest.fixture
def degraded_at(live_at: Streams, batch: Payload) -> Streams:
    """A stream that lost number 1 to a silent replay socket, and is at `last`."""

    def degrade(last: int, **limits: int) -> RankStream:
        stream = live_at(0, max_silences=1, **limits)
        stream.on_live(2, batch(2))
        stream.on_replay_failed(2)
        for seq in range(3, last + 1):
            stream.on_live(seq, batch(seq))
        assert stream.trust.reason == "gap_lost"
        return stream

    return degrade


def test_rebuild_starts_over_from_0(degraded_at: Streams, batch: Payload, waited: Waited) -> None:
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


def test_rebuild_without_a_beginning_changes_nothing(degraded_at: Streams, batch: Payload) -> None:
    """The ring has less than we know, and will never have more."""
    stream = degraded_at(3)
    stream.on_rebuild_wanted()

    assert stream.on_replayed(3, 2, batch(2)) == []
    assert stream.on_replayed(3, 3, batch(3)) == []
    assert stream.on_replay_end(3) == [ReplayEnded("rolled_over")]
    assert stream.on_rebuild_wanted() == []


def test_rebuild_that_nobody_answers_changes_nothing(
    degraded_at: Streams, batch: Payload, waited: Waited
) -> None:
    """Live batches that waited go on."""
    stream = degraded_at(3)
    stream.on_rebuild_wanted()
    stream.on_live(4, batch(4))

    assert stream.on_replay_failed(3) == [ReplayEnded("silent"), waited(4)]


def test_rebuild_is_not_asked_for_when_it_cannot_help(
    make_stream: Streams,
    live_at: Streams,
    without_replay: Streams,
    degraded_at: Streams,
    batch: Payload,
) -> None:
    """No replay socket, nothing known, nothing wrong, or a question already open."""
    busy = degraded_at(2)
    busy.on_live(4, batch(4))
    deaf = without_replay(0)
    deaf.on_live(2, batch(2))

    assert deaf.on_rebuild_wanted() == []
    assert make_stream().on_rebuild_wanted() == []
    assert live_at(2).on_rebuild_wanted() == []
    assert busy.on_rebuild_wanted() == []


def test_refused_events_degrade_until_a_clear(live_at: Streams) -> None:
    """What they said is unknown; replaying them would say it no better."""
    stream = live_at(3)

    assert stream.on_applied(3, REFUSED) == [TrustChanged(Trust.DEGRADED, "events_refused")]
    assert not stream.wants_rebuild
    assert stream.on_applied(3, CLEARED) == []
    assert stream.on_applied(4, CLEARED) == [TrustChanged(Trust.EXACT, "cleared")]


def test_refused_events_of_a_dead_process_are_forgotten(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """A new epoch that is whole is exact."""
    stream = live_at(3)
    stream.on_applied(3, REFUSED)

    assert stream.on_live(0, batch(0, life=1)) == [
        OpenEpoch("restarted"),
        TrustChanged(Trust.EXACT, "joined_at_0"),
        waited(0, life=1),
    ]


def test_refused_events_in_a_replay_are_not_healed_by_its_end(
    make_stream: Streams, batch: Payload
) -> None:
    """Complete, and yet not all of it could be used."""
    stream = make_stream()
    stream.on_connected()
    stream.on_replayed(1, 0, batch(0))
    assert stream.on_applied(0, REFUSED) == []

    assert stream.on_replay_end(1) == [
        ReplayEnded("answered"),
        TrustChanged(Trust.DEGRADED, "events_refused"),
    ]


def test_orphans_degrade_and_ask_for_the_beginning(live_at: Streams) -> None:
    """F05: their parent is known to the engine, and may be had."""
    stream = live_at(3)

    assert stream.on_applied(3, PARKED) == [TrustChanged(Trust.DEGRADED, "orphans")]
    assert stream.on_rebuild_wanted() == [RequestReplay(0, 2)]


def test_rank_without_orphans_is_exact_again(live_at: Streams) -> None:
    """They were attached, or removed; nothing else was wrong."""
    stream = live_at(3)
    stream.on_applied(3, PARKED)

    assert stream.on_applied(4, BatchOutcome()) == [TrustChanged(Trust.EXACT, "orphans_gone")]
    assert not stream.wants_rebuild


def test_orphans_that_outlive_a_rebuild_are_not_asked_about_again(
    live_at: Streams, batch: Payload
) -> None:
    """The engine has told its whole life and never named their parent."""
    stream = live_at(0)
    stream.on_applied(0, PARKED)
    stream.on_rebuild_wanted()
    stream.on_replayed(2, 0, batch(0))
    stream.on_applied(0, PARKED)

    assert stream.on_replay_end(2) == [ReplayEnded("answered")]
    assert (stream.trust.level, stream.trust.reason) == (Trust.DEGRADED, "orphans")
    assert not stream.wants_rebuild


# Silence.


def test_silent_stream_is_asked_for_what_it_may_have_published(
    live_at: Streams, batch: Payload, waited: Waited
) -> None:
    """Perhaps only the live socket is dead: then replay tells what it missed."""
    stream = live_at(2)
    stream.trust.on_evidence(Evidence.SILENT)

    (asked,) = stream.on_silence()

    assert isinstance(asked, RequestReplay)
    assert asked.from_seq == 3
    assert stream.on_silence() == []
    assert stream.on_replayed(asked.ticket, 3, batch(3)) == [waited(3)]
    assert stream.on_applied(3, BatchOutcome()) == [TrustChanged(Trust.EXACT, "heard_again")]


def test_silence_is_not_asked_about_where_nobody_could_answer(
    make_stream: Streams, without_replay: Streams
) -> None:
    """No replay socket, or nothing known of this life."""
    assert without_replay(2).on_silence() == []
    assert make_stream().on_silence() == []
