"""The write path over real sockets: what a publisher does, what the index then says."""

import gzip
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.types import InstanceId, RankId, Trust

Event = Callable[..., dict[str, Any]]
Held = Callable[..., Awaitable[int | None]]
Source = Callable[..., InstanceSource]

CAPTURES = Path(__file__).parents[2] / "captures"

E0, E1 = "http://e0:8000", "http://e1:8000"
R0, R1 = RankId(InstanceId(E0), 0), RankId(InstanceId(E1), 0)


CLEARED = {"type": "AllBlocksCleared"}


@pytest.mark.parametrize("has_topic_frame", [False, True], ids=["up-to-0.25", "since-0.26"])
async def test_late_joiner_gets_the_past_by_replay_and_the_rest_live(
    publishing: Any, indexing: Any, has_topic_frame: bool, stored: Event, held: Held, source: Source
) -> None:
    """F01: replay answers in both framings."""
    async with publishing(has_topic_frame=has_topic_frame, topic=b"kv") as engine:
        engine.publish(stored(1, 2))
        async with indexing(source(engine)) as (service, index):
            await service.caught_up(R0, 0)
            assert await held(index) == 2

            await engine.subscribed()
            engine.publish(stored(3, parent=2, first=2))
            status = await service.caught_up(R0, 1)

            assert await held(index) == 3
            assert (status.trust, status.counts.events) == (Trust.EXACT, 2)


async def test_idle_engine_is_known_before_it_publishes_again(
    publishing: Any, indexing: Any, source: Source
) -> None:
    """There is no publishing while an engine idles."""
    async with publishing() as engine, indexing(source(engine)) as (service, _):
        status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

        assert (status.trust_reason, status.is_connected) == ("fresh", True)


async def test_gap_is_repaired_in_order(
    publishing: Any, indexing: Any, stored: Event, removed: Event, held: Held, source: Source
) -> None:
    """Applied as they came, the removal would be undone by the store before it."""
    async with publishing() as engine, indexing(source(engine)) as (service, index):
        await engine.subscribed()
        engine.publish(stored(1))
        await service.caught_up(R0, 0)
        engine.publish(stored(2, parent=1, first=1), drop=True)
        engine.publish(removed(2))
        status = await service.caught_up(R0, 2)

        assert await held(index) == 1
        assert status.counts.gaps == {"opened": 1, "repaired": 1}
        assert (status.trust, status.orphans) == (Trust.EXACT, 0)


async def test_rolled_over_ring_leaves_the_rank_degraded_until_a_clear(
    publishing: Any, indexing: Any, stored: Event, source: Source
) -> None:
    """What is provable is kept; a clear is the way back."""
    async with publishing(ring=2) as engine:
        for number in range(5):
            engine.publish(stored(number + 1, parent=number or None, first=number))
        async with indexing(source(engine)) as (service, _):
            await service.caught_up(R0, 4)
            status = service.rank_status(R0)
            assert (status.trust, status.trust_reason) == (Trust.DEGRADED, "joined_late")
            assert status.orphans == 2

            await engine.subscribed()
            engine.publish(CLEARED)
            status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

            assert (status.trust_reason, status.orphans) == ("cleared", 0)


@pytest.mark.parametrize("replay", [True, False], ids=["with-replay", "without-replay"])
async def test_restart_in_place_forgets_the_dead_cache(
    publishing: Any, indexing: Any, replay: bool, stored: Event, held: Held, source: Source
) -> None:
    """F02: old entries go before the new batch counts; other instances keep theirs."""
    async with publishing() as engine, publishing() as other:
        sources = (source(engine, replay=replay), source(other, E1))
        async with indexing(*sources) as (service, index):
            await engine.subscribed()
            await other.subscribed()
            for number in range(20):
                engine.publish(stored(number + 1, parent=number or None, first=number))
            other.publish(stored(1, 2))
            first = await service.caught_up(R0, 19)
            await service.caught_up(R1, 0)
            assert await held(index) == 20

            await engine.restart()
            await engine.subscribed()
            engine.publish(stored(77, first=50))
            status = await service.until(R0, lambda now: now.last_seq == 0)

            assert await held(index) == 0
            assert await held(index, R1) == 2
            assert status.epoch > first.epoch


async def test_restart_with_a_clock_set_back_forgets_the_dead_cache(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """Nobody can be asked, and each of its batches is older than what the dead process sent."""
    async with publishing() as engine, indexing(source(engine, replay=False)) as (service, index):
        await engine.subscribed()
        for number in range(10):
            engine.publish(stored(number + 1, parent=number or None, first=number))
        await service.caught_up(R0, 9)

        engine.ts -= 3600
        await engine.restart()
        await engine.subscribed()
        await service.until(R0, lambda now: now.trust_reason == "reconnect_unverified")
        engine.publish(stored(77))
        status = await service.until(R0, lambda now: now.last_seq == 0)

        assert await held(index) == 1
        assert (status.epoch_reason, status.trust) == ("restarted", Trust.EXACT)


async def test_restart_behind_a_forwarder_with_a_clock_set_back_is_seen_at_its_third_batch(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """No connection of ours is lost, and one late batch would be no reason to forget a life."""
    async with publishing() as engine, indexing(source(engine, replay=False)) as (service, index):
        await engine.subscribed()
        for number in range(10):
            engine.publish(stored(number + 1, parent=number or None, first=number))
        await service.caught_up(R0, 9)

        engine.ts -= 3600
        engine.next_seq = 0
        for number in range(3):
            engine.publish(
                stored(70 + number, parent=69 + number if number else None, first=number)
            )
        status = await service.until(R0, lambda now: now.last_seq == 2)

        assert await held(index) == 3
        assert (status.epoch_reason, status.trust) == ("restarted", Trust.EXACT)


async def test_idle_restarted_engine_loses_its_credit_without_a_batch(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """The reconnect is seen, replay has nothing: the old cache is gone."""
    async with publishing() as engine, indexing(source(engine)) as (service, index):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)

        await engine.restart()
        status = await service.until(R0, lambda now: now.epoch_reason != "started")

        assert status.epoch_reason == "reconnect_contradicted"
        assert not await held(index)


async def test_restart_behind_a_rising_number_is_seen(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """The new process has passed our last number before we hear of it."""
    async with publishing() as engine, indexing(source(engine)) as (service, index):
        await engine.subscribed()
        engine.publish(stored(1))
        await service.caught_up(R0, 0)

        await engine.restart()
        for number in range(3):
            engine.publish(
                stored(11 + number, parent=10 + number if number else None, first=number)
            )
        await service.until(R0, lambda now: now.last_seq == 2)

        assert await held(index) == 3


async def test_silent_replay_socket_stops_nothing(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """Given up after its deadline; live goes on, visibly degraded."""
    async with publishing() as engine:
        engine.is_mute = True
        engine.next_seq = 7
        async with indexing(source(engine), replay_timeout_s=0.25) as (service, index):
            await engine.subscribed()
            engine.publish(stored(1))
            status = await service.caught_up(R0, 7)

            assert (status.trust, status.trust_reason) == (Trust.DEGRADED, "joined_late")
            assert await held(index) == 1


async def test_lost_gap_is_healed_once_replay_answers_again(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """A degraded rank whose beginning is still buffered is told its life again."""
    async with (
        publishing() as engine,
        indexing(source(engine), replay_timeout_s=0.25) as (
            service,
            index,
        ),
    ):
        await engine.subscribed()
        engine.publish(stored(1))
        await service.until(R0, lambda now: now.last_seq == 0 and now.trust is Trust.EXACT)
        engine.is_mute = True
        engine.publish(stored(2, parent=1, first=1), drop=True)
        engine.publish(stored(3, parent=2, first=2))
        status = await service.caught_up(R0, 2)
        assert (status.trust_reason, status.counts.lost_batches) == ("gap_lost", 1)

        engine.is_mute = False
        status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

        assert status.counts.epochs["rebuilt"] == 1
        assert await held(index) == 3


async def test_orphan_is_no_beginning_and_attaches_when_its_parent_comes(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """F05: A-B-C matches once A is known; B's tokens alone are no prompt's start."""
    async with publishing() as engine:
        engine.publish(stored(1), drop=True)
        async with indexing(source(engine)) as (service, index):
            await engine.subscribed()
            engine.publish(stored(2, parent=1, first=1))
            engine.publish(stored(3, parent=2, first=2))
            await service.caught_up(R0, 2)

            only_b = Prompt(Namespace(model="tiny"), [4, 5, 6, 7, 0])
            assert await held(index) == 3
            assert (await index.match(only_b))[R0].tokens == 0


async def test_duplicate_and_late_batches_are_counted(
    publishing: Any, indexing: Any, stored: Event, removed: Event, held: Held, source: Source
) -> None:
    """F02: neither a restart nor applied twice."""
    async with publishing() as engine, indexing(source(engine)) as (service, index):
        await engine.subscribed()
        engine.publish(stored(1))
        engine.publish(stored(2, parent=1, first=1))
        engine.send_frames(b"", (0).to_bytes(8, "big"), engine.ring[0][1])
        engine.send_frames(b"", (0).to_bytes(8, "big"), engine.encode([CLEARED], ts=1.0))
        status = await service.until(R0, lambda now: now.counts.rejected["late"] > 0)
        engine.publish(removed(2))
        status = await service.caught_up(R0, 2)

        # The replay that the late one asks for may bring what also comes live.
        assert (status.counts.rejected["late"], status.counts.rejected["duplicate"] >= 1) == (
            1,
            True,
        )
        assert (await held(index), status.epoch_reason) == (1, "started")


def frames_of(capture: str, publisher: str) -> Iterator[tuple[int, bytes, bytes]]:
    """Messages of one publisher: number, topic, payload."""
    with gzip.open(CAPTURES / f"{capture}.events.jsonl.gz", "rt") as lines:
        for line in lines:
            message = json.loads(line)
            if message["src"] == publisher:
                topic, seq, payload = (bytes.fromhex(frame) for frame in message["frames"])
                yield int.from_bytes(seq, "big"), topic, payload


@pytest.mark.parametrize(
    ("capture", "publisher", "has_topic_frame"),
    [
        ("a-bs32-sha256", "w0", True),
        ("f-v016-bs16-sha256", "w0", False),
        ("i-hybrid-swa", "w0", True),
        ("m2", "w1", True),
    ],
)
async def test_captured_streams_are_applied_whole(
    publishing: Any,
    indexing: Any,
    capture: str,
    publisher: str,
    has_topic_frame: bool,
    source: Source,
) -> None:
    """What real engines published: the first half by replay, the rest live, nothing rejected."""
    messages = list(frames_of(capture, publisher))
    lives = sum(1 for seq, _, _ in messages if seq == 0)
    async with publishing(has_topic_frame=has_topic_frame, topic=messages[0][1]) as engine:
        half = len(messages) // 2
        for seq, _, payload in messages[:half]:
            assert engine.publish_payload(payload, drop=True) == seq
        async with indexing(source(engine)) as (service, _):
            await engine.subscribed()
            await service.caught_up(R0, half - 1)
            for seq, topic, payload in messages[half:]:
                engine.send_frames(topic, seq.to_bytes(8, "big"), payload)
            status = await service.until(
                R0, lambda now: now.counts.batches >= len(messages) and not now.is_replaying
            )

            assert status.counts.rejected == {}
            assert (status.trust, status.counts.batches) == (Trust.EXACT, len(messages))
            assert sum(status.counts.epochs.values()) == lives
            assert status.orphans == 0
