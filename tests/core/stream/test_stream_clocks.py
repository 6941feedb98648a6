"""Restarts whose clock is behind the dead process's, where nobody can be asked: late batches or not."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.fallen_numbers import RUN_BATCHES
from indexer.core.replay import StreamLimits
from indexer.core.stream import RankStream
from indexer.core.stream_effects import (
    ApplyBatch,
    Dropped,
    Effect,
    OpenEpoch,
    ReplayEnded,
    TrustChanged,
)
from indexer.core.types import Trust

Streams = Callable[..., RankStream]
Payload = Callable[..., bytes]

LATE_UNVERIFIED = TrustChanged(Trust.DEGRADED, "late_batch_unverified")


def _old(seq: int) -> bytes:
    """Of another life, and older than anything of the first."""
    return b"%d:9" % (seq - 1000)


def _applied(seq: int) -> ApplyBatch:
    return ApplyBatch(seq, _old(seq), replayed=True)


@pytest.fixture
def reconnected_at(without_replay: Streams) -> Streams:
    """A stream without replay that had a connection to another peer, or to the same."""

    def reconnect(last: int) -> RankStream:
        stream = without_replay(last)
        stream.on_connected()
        stream.on_disconnected()
        stream.on_connected()
        return stream

    return reconnect


def test_first_batch_after_a_reconnect_is_a_restart_whatever_its_clock(
    reconnected_at: Streams,
) -> None:
    """TCP keeps order, and a new connection never brings what the old one owed."""
    stream = reconnected_at(9)

    assert stream.on_live(0, _old(0)) == [
        OpenEpoch("restarted"),
        TrustChanged(Trust.EXACT, "joined_at_0"),
        _applied(0),
    ]
    assert stream.on_live(1, _old(1)) == [ApplyBatch(1, _old(1))]


def test_first_batch_seen_of_the_new_process_need_not_be_its_first(reconnected_at: Streams) -> None:
    """What came before it is missing."""
    stream = reconnected_at(9)

    assert stream.on_live(4, _old(4)) == [
        OpenEpoch("restarted"),
        TrustChanged(Trust.DEGRADED, "joined_late"),
        _applied(4),
    ]


def test_batch_sent_again_over_a_new_connection_is_a_duplicate(
    reconnected_at: Streams, batch: Payload
) -> None:
    """The same process; and a restart behind it is found all the same."""
    stream = reconnected_at(9)

    assert stream.on_live(9, batch(9)) == [Dropped(9, "duplicate")]
    assert OpenEpoch("restarted") in stream.on_live(0, _old(0))


def test_late_batch_long_after_a_reconnect_is_late(reconnected_at: Streams, batch: Payload) -> None:
    """The old life goes on: its next number came first."""
    stream = reconnected_at(9)
    stream.on_live(10, batch(10))

    assert stream.on_live(0, _old(0)) == [Dropped(0, "late")]


def test_late_batch_before_there_is_another_connection_is_late(without_replay: Streams) -> None:
    """What is read then may have been on its way for long."""
    stream = without_replay(9)
    stream.on_disconnected()

    assert Dropped(0, "late") in stream.on_live(0, _old(0))
    assert stream.on_live(5, _old(5)) == [Dropped(5, "late")]


def test_reconnect_that_replay_vouches_for_leaves_late_batches_late(
    live_at: Streams, batch: Payload
) -> None:
    """It has shown the last applied batch again."""
    stream = live_at(4)
    stream.on_disconnected()
    stream.on_connected()
    stream.on_replayed(2, 4, batch(4))
    stream.on_replay_end(2)

    for seq in range(4):
        assert Dropped(seq, "late") in stream.on_live(seq, _old(seq))


def test_reconnect_that_replay_is_silent_about_makes_it_a_restart(live_at: Streams) -> None:
    """While it was asked, the batch was only late."""
    stream = live_at(4, max_silences=1)
    stream.on_disconnected()
    stream.on_connected()
    assert stream.on_live(0, _old(0)) == [Dropped(0, "late")]
    assert ReplayEnded("silent") in stream.on_replay_failed(2)

    assert OpenEpoch("restarted") in stream.on_live(1, _old(1))


def test_what_waited_for_a_silent_replay_came_first(live_at: Streams, batch: Payload) -> None:
    """So the late batch behind it is none of a new process."""
    stream = live_at(4, max_silences=1)
    stream.on_disconnected()
    stream.on_connected()
    stream.on_live(5, batch(5))
    stream.on_replay_failed(2)

    assert stream.on_live(0, _old(0))[0] == Dropped(0, "late")


def test_late_batches_in_a_row_are_a_new_life_and_its_beginning(without_replay: Streams) -> None:
    """No lost connection was seen, as behind a forwarder; nothing that they told is missing."""
    stream = without_replay(9)

    assert stream.on_live(0, _old(0)) == [Dropped(0, "late"), LATE_UNVERIFIED]
    assert stream.on_live(1, _old(1)) == [Dropped(1, "late")]
    assert stream.on_live(2, _old(2)) == [
        OpenEpoch("restarted"),
        TrustChanged(Trust.EXACT, "joined_at_0"),
        *(_applied(seq) for seq in range(3)),
    ]


@pytest.mark.parametrize(
    "seqs",
    [
        pytest.param([5, 4, 3, 2, 1, 0], id="falling"),
        pytest.param([0, 2, 4, 6, 8], id="with-holes"),
        pytest.param([0, 0, 0, 0], id="the-same-again"),
        pytest.param([0, 1, 0, 1, 0, 1], id="in-pairs"),
    ],
)
def test_late_batches_that_are_no_row_cost_no_life(
    without_replay: Streams, seqs: list[int]
) -> None:
    """A process that begins anew counts up."""
    stream = without_replay(9)

    for seq in seqs:
        assert stream.on_live(seq, _old(seq))[0] == Dropped(seq, "late")


def test_batch_in_order_between_late_ones_ends_the_row(
    without_replay: Streams, batch: Payload
) -> None:
    """The old life goes on."""
    stream = without_replay(9)
    stream.on_live(0, _old(0))
    stream.on_live(1, _old(1))
    stream.on_live(10, batch(10))

    assert stream.on_live(2, _old(2))[0] == Dropped(2, "late")
    assert stream.on_live(3, _old(3)) == [Dropped(3, "late")]
    assert OpenEpoch("restarted") in stream.on_live(4, _old(4))


def test_batches_that_one_overtook_are_late_however_many(
    without_replay: Streams, batch: Payload
) -> None:
    """Nobody else's were known under their numbers."""
    stream = without_replay(3)
    stream.on_live(9, batch(9))

    for seq in range(4, 9):
        assert stream.on_live(seq, batch(seq))[0] == Dropped(seq, "late")


def test_row_that_reaches_numbers_we_lack_begins_anew_behind_them(
    without_replay: Streams, batch: Payload
) -> None:
    """A life with a hole is found as well, only later."""
    stream = without_replay(1)
    stream.on_live(4, batch(4))
    for seq in range(5, 9):
        stream.on_live(seq, batch(seq))

    told = [stream.on_live(seq, _old(seq)) for seq in range(7)]
    assert [any(isinstance(each, OpenEpoch) for each in effects) for effects in told] == [
        *[False] * 6,
        True,
    ]


def test_numbers_before_we_joined_are_no_reason_to_wait(make_deaf_stream: Streams) -> None:
    """We began in the middle of the dead life."""
    stream = make_deaf_stream()
    stream.on_live(50, b"50:0")
    stream.on_live(0, _old(0))
    stream.on_live(1, _old(1))

    assert OpenEpoch("restarted") in stream.on_live(2, _old(2))


def test_forgotten_numbers_are_as_good_as_known_ones(make_deaf_stream: Streams) -> None:
    """Of a long life only the last digests are kept."""
    stream = make_deaf_stream()
    for seq in range(5000):
        stream.on_live(seq, b"%d:0" % seq)
    stream.on_live(0, _old(0))
    stream.on_live(1, _old(1))

    assert OpenEpoch("restarted") in stream.on_live(2, _old(2))


def test_row_is_left_to_replay_while_it_runs_and_once_it_has_vouched(
    live_at: Streams, batch: Payload
) -> None:
    """One look per number settles it."""
    stream = live_at(9)
    for seq in range(4):
        assert Dropped(seq, "late") in stream.on_live(seq, _old(seq))
    stream.on_replayed(2, 9, batch(9))
    stream.on_replay_end(2)

    for seq in range(4, 9):
        assert stream.on_live(seq, _old(seq)) == [Dropped(seq, "late")]


class _Fleet:
    """One publisher without replay, and what a stream made of it."""

    def __init__(self) -> None:
        self.stream = RankStream(can_replay=False, ts_of=_time_of, limits=StreamLimits())
        self.sent: list[bytes] = []
        self.applied: list[bytes] = []
        self.epochs = 0
        self._lives = self._clock = 0

    def restart(self, clock: int, *, is_seen: bool) -> None:
        self._lives += 1
        self._clock = clock
        self.sent = []
        if is_seen:
            self.perform(self.stream.on_disconnected())
            self.perform(self.stream.on_connected())

    def send(self, *, is_overtaken: bool = False) -> bytes:
        self._clock += 1
        self.sent.append(b"%d:%d" % (self._clock, self._lives))
        if not is_overtaken:
            self.deliver(len(self.sent) - 1)
        return self.sent[-1]

    def deliver(self, seq: int) -> None:
        self.perform(self.stream.on_live(seq, self.sent[seq]))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ApplyBatch):
                self.applied.append(effect.payload)
            elif isinstance(effect, OpenEpoch):
                self.epochs += 1
                self.applied.clear()


def _time_of(payload: bytes) -> float:
    return float(payload.partition(b":")[0])


lives = st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 12)), max_size=6)
"""The clock that each begins with, and how many batches it sends."""


@given(lives, st.integers(0, 3))
def test_restart_that_is_seen_leaves_nothing_of_an_older_life(
    lives: list[tuple[int, int]], twice: int
) -> None:
    """Whatever its clock says, from its first batch on."""
    fleet = _Fleet()
    fleet.send()
    for clock, batches in lives:
        fleet.restart(clock, is_seen=True)
        for number in range(batches):
            fleet.send()
            if twice and number % twice == 0:
                fleet.deliver(number)

            assert fleet.applied == fleet.sent


@given(lives)
def test_restart_that_nobody_saw_leaves_nothing_of_an_older_life_after_a_few_batches(
    lives: list[tuple[int, int]],
) -> None:
    """As long as neither life is shorter than it takes to tell."""
    fleet = _Fleet()
    for clock, batches in lives:
        fleet.restart(clock, is_seen=False)
        for _ in range(batches + RUN_BATCHES - 1):
            fleet.send()

        # If its clock passes the dead one's while it is in doubt, what it told till then is lost.
        assert fleet.applied == fleet.sent[-len(fleet.applied) :]
        assert fleet.applied == fleet.sent or fleet.stream.trust.level is Trust.DEGRADED


@given(st.lists(st.integers(0, 4), max_size=20))
def test_overtaken_batches_never_cost_a_life(overtaken: list[int]) -> None:
    """However many one overtakes, and wherever."""
    fleet = _Fleet()
    fleet.send()
    for count in overtaken:
        first = len(fleet.sent)
        for _ in range(count):
            fleet.send(is_overtaken=True)
        fleet.send()
        for seq in range(first, first + count):
            fleet.deliver(seq)

    assert fleet.epochs == 0
