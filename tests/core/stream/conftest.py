"""Streams of one rank in the states that tests begin from, and the batches that come to them."""

from collections.abc import Callable
from typing import Any

import pytest

from indexer.core.replay import StreamLimits
from indexer.core.stream import RankStream
from indexer.core.stream_effects import ApplyBatch, ReplayEnded, RequestReplay, TrustChanged
from indexer.core.types import Trust


def _batch(seq: int, life: int = 0, ts: int | None = None) -> bytes:
    return b"%d:%d" % (life * 1000 + seq if ts is None else ts, life)


@pytest.fixture
def batch() -> Callable[..., bytes]:
    """Payload that says when it was published: later lives are later."""
    return _batch


@pytest.fixture
def waited() -> Callable[..., ApplyBatch]:
    """A batch applied after it has waited for a replay, or has come by one."""

    def apply(seq: int, life: int = 0) -> ApplyBatch:
        return ApplyBatch(seq, _batch(seq, life), replayed=True)

    return apply


def _ts_of(payload: bytes) -> float | None:
    head, colon, _ = payload.partition(b":")
    return float(head) if colon else None


def _make_stream(*, can_replay: bool = True, **limits: Any) -> RankStream:
    return RankStream(can_replay=can_replay, ts_of=_ts_of, limits=StreamLimits(**limits))


@pytest.fixture
def make_stream() -> Callable[..., RankStream]:
    """A stream that has heard nothing yet."""
    return _make_stream


@pytest.fixture
def make_deaf_stream() -> Callable[[], RankStream]:
    """A stream of an engine that has no replay socket."""
    return lambda: _make_stream(can_replay=False)


def _fresh(**limits: Any) -> RankStream:
    stream = _make_stream(**limits)
    assert stream.on_connected() == [RequestReplay(0, 1)]
    assert stream.on_replay_end(1) == [ReplayEnded("empty"), TrustChanged(Trust.EXACT, "fresh")]
    return stream


@pytest.fixture
def fresh() -> Callable[..., RankStream]:
    """A stream that joined an engine before its first batch."""
    return _fresh


@pytest.fixture
def live_at() -> Callable[..., RankStream]:
    """A stream that has applied 0 to `last` as they came."""

    def advance(last: int, **limits: int) -> RankStream:
        stream = _fresh(**limits)
        for seq in range(last + 1):
            assert stream.on_live(seq, _batch(seq)) == [ApplyBatch(seq, _batch(seq))]
        return stream

    return advance


@pytest.fixture
def without_replay() -> Callable[[int], RankStream]:
    """A stream of an engine that has no replay socket, at `last`."""

    def advance(last: int) -> RankStream:
        stream = _make_stream(can_replay=False)
        for seq in range(last + 1):
            stream.on_live(seq, _batch(seq))
        return stream

    return advance
