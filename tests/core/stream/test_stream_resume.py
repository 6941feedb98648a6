"""A stream that goes on where another process left off."""

from collections.abc import Callable

import pytest

from indexer.core.epochs import Epochs
from indexer.core.known_batches import payload_digest
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


@pytest.fixture
def resumed_at(make_stream: Streams, batch: Payload) -> Streams:
    """A stream that another process had brought to `last`."""

    def resume(last: int, trust: Trust = Trust.EXACT, *, can_replay: bool = True) -> RankStream:
        stream = make_stream(can_replay=can_replay)
        stream.resume(last, payload_digest(batch(last)), trust)
        return stream

    return resume


def test_last_batch_is_asked_for_and_proves_the_rest(resumed_at: Streams, batch: Payload) -> None:
    """Nothing is applied twice; what came meanwhile is."""
    stream = resumed_at(4)
    assert stream.on_connected() == [RequestReplay(4, 1)]

    assert stream.on_replayed(1, 4, batch(4)) == []
    assert stream.on_replayed(1, 5, batch(5)) == [ApplyBatch(5, batch(5), replayed=True)]
    assert stream.on_replay_end(1) == [ReplayEnded("answered")]
    assert stream.on_live(6, batch(6)) == [ApplyBatch(6, batch(6))]
    assert stream.trust.level is Trust.EXACT


def test_live_batches_wait_for_the_proof(resumed_at: Streams, batch: Payload) -> None:
    """The engine may have been another process all along."""
    stream = resumed_at(4)

    assert stream.on_live(5, batch(5)) == [RequestReplay(4, 1)]
    assert stream.on_live(4, batch(4)) == [Dropped(4, "duplicate")]
    assert stream.on_replayed(1, 4, batch(4)) == [ApplyBatch(5, batch(5), replayed=True)]


def test_another_payload_under_the_last_number_begins_a_new_life(
    resumed_at: Streams, batch: Payload
) -> None:
    """Its beginning is asked for."""
    stream = resumed_at(4)
    stream.on_connected()

    assert stream.on_replayed(1, 4, batch(4, life=1)) == [
        ReplayEnded("contradicted"),
        OpenEpoch("resume_contradicted"),
        RequestReplay(0, 2),
    ]


def test_ring_that_has_rolled_over_proves_nothing(resumed_at: Streams, batch: Payload) -> None:
    """What nothing vouches for goes."""
    stream = resumed_at(4)
    stream.on_connected()

    effects = stream.on_replayed(1, 9, batch(9))
    assert OpenEpoch("resume_unproven") in effects
    assert TrustChanged(Trust.DEGRADED, "joined_late") in effects


def test_without_replay_the_rank_is_degraded(resumed_at: Streams, batch: Payload) -> None:
    """It keeps its blocks, and says that nothing vouches for them."""
    stream = resumed_at(4, can_replay=False)

    assert stream.on_connected() == [TrustChanged(Trust.DEGRADED, "resume_unverified")]
    assert stream.on_live(5, batch(5)) == [ApplyBatch(5, batch(5))]


def test_what_lowered_trust_before_still_stands(resumed_at: Streams, batch: Payload) -> None:
    """And the way back is the same: the whole life, told again."""
    stream = resumed_at(4, Trust.DEGRADED)
    stream.on_connected()
    stream.on_replayed(1, 4, batch(4))
    stream.on_replay_end(1)

    assert (stream.trust.level, stream.trust.reason) == (Trust.DEGRADED, "resumed")
    assert stream.wants_rebuild


@pytest.mark.parametrize(("passed", "following"), [(0, 1), (1, 2), (41, 42)])
def test_epochs_pass_by_what_was_given_before(passed: int, following: int) -> None:
    """And never go back."""
    epochs = Epochs()
    epochs.pass_by(passed)
    epochs.pass_by(0)

    assert (next(epochs), next(iter(epochs))) == (following, following + 1)
