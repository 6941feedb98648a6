"""Sockets of the write path: shared, taken, spoken to wrongly, or listened to by others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from structlog.testing import capture_logs

from indexer.config import IndexerConfig as Config
from indexer.config import InstanceSource, RankSource
from indexer.core.index import IndexSize, RankUpdate
from indexer.core.rank_status import RankStatus
from indexer.core.stream_effects import (
    GapOpened,
    GapRepaired,
    ReplayEnded,
    RequestReplay,
    TrustChanged,
)
from indexer.core.types import InstanceId, RankId, Trust
from indexer.follower import FollowedBatch, FollowedItem, follow
from indexer.memory_index import MemoryIndex

Event = Callable[..., dict[str, Any]]
Held = Callable[..., Awaitable[int | None]]
Source = Callable[..., InstanceSource]

E0, E1, E2 = (f"http://e{number}:8000" for number in range(3))
R0, R1, R2 = (RankId(InstanceId(url), 0) for url in (E0, E1, E2))


CLEARED = {"type": "AllBlocksCleared"}


async def test_bad_messages_cost_only_themselves(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """F06: counted by reason, connection stays, good events of the same batch are applied."""
    async with publishing() as engine, indexing(source(engine)) as (service, index):
        await service.until(R0, lambda now: now.trust is Trust.EXACT)
        engine.send_frames(b"one frame")
        engine.send_frames(b"two", b"frames")
        engine.send_frames(b"", b"\0" * 3, b"short number")
        engine.publish_payload(b"\xc1 not msgpack")
        wrong = {**stored(9, first=40), "token_ids": "seven"}
        engine.publish(stored(1), stored(2, parent=1, first=1), wrong, stored(3, parent=2, first=2))
        engine.publish(stored(4, parent=3, first=3))
        status = await service.caught_up(R0, 2)

        assert status.counts.rejected == {
            "frame_count": 2,
            "seq_frame": 1,
            "undecodable_batch": 1,
            "bad_field": 1,
        }
        assert await held(index) == 4
        assert (status.trust_reason, status.counts.connections) == ("events_refused", 1)


async def test_number_that_no_engine_gets_to_costs_only_its_message(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """F06: a good batch under 2**63 opens no gap, and what comes next is no restart."""
    async with publishing() as engine, indexing(source(engine)) as (service, index):
        await service.until(R0, lambda now: now.trust is Trust.EXACT)
        engine.publish(stored(1))
        absurd = b"\x80" + bytes(7)
        engine.send_frames(b"", absurd, engine.encode([stored(9, first=40)]))
        engine.publish(stored(2, parent=1, first=1))
        status = await service.caught_up(R0, 1)

        assert status.counts.rejected == {"impossible_seq": 1}
        assert await held(index) == 2
        assert (status.trust, status.epoch_reason) == (Trust.EXACT, "started")


async def test_blocks_of_one_token_are_warned_of_once(
    publishing: Any, indexing: Any, stored: Event, source: Source
) -> None:
    """F15: each token is a row of the index; whoever runs the engine should know."""
    with capture_logs() as logs:
        async with publishing() as engine, indexing(source(engine)) as (service, _):
            await service.until(R0, lambda now: now.trust is Trust.EXACT)
            for number in range(3):
                engine.publish(CLEARED, {**stored(1), "block_size": 1, "token_ids": [number]})
            await service.caught_up(R0, 2)

    warned = [each for each in logs if each["event"] == "one_token_blocks"]
    assert [each["log_level"] for each in warned] == ["warning"]
    assert "--block-size" in warned[0]["remedy"]


async def test_bad_replay_answers_cost_only_themselves(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """F06 on the other socket."""
    async with publishing() as engine:
        engine.junk_answers = [[b"", b"lonely"], [b"", b"short", b"p"]]
        engine.publish(stored(1))
        async with indexing(source(engine)) as (service, index):
            status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

            assert status.counts.rejected == {"replay_frame_count": 1, "replay_seq_frame": 1}
            assert await held(index) == 1


async def test_engine_connects_to_a_port_of_its_own(
    publishing: Any, indexing: Any, stored: Event, held: Held
) -> None:
    """Where only one rank can be behind a port, the topic doesn't matter."""
    async with publishing() as spare, publishing(connect_to=spare.replay, topic=b"x"):
        pass  # only to learn a port that is free
    bound = spare.events
    async with publishing(connect_to=bound, topic=b"anything") as engine:
        dialled = InstanceSource(
            url=E0, events=bound, replay=engine.replay, direction="bind", model="tiny", ranks=1
        )
        async with indexing(dialled) as (service, index):
            await engine.subscribed()
            engine.publish(stored(1))
            await service.caught_up(R0, 0)

            assert await held(index) == 1


async def test_shared_port_tells_engines_apart_by_topic(
    publishing: Any, indexing: Any, eventually: Any, stored: Event, held: Held
) -> None:
    """A topic nobody has is counted and dropped."""
    async with publishing() as spare:
        bound = spare.events
    async with (
        publishing(connect_to=bound, topic=b"a") as first,
        publishing(connect_to=bound, topic=b"b") as second,
        publishing(connect_to=bound, topic=b"stranger") as stranger,
    ):
        engines = [
            InstanceSource(url=url, topic=topic, replay=each.replay, model="tiny", ranks=1)
            for url, topic, each in ((E0, "a", first), (E1, "b", second))
        ]
        async with indexing(*engines, shared_bind=bound) as (service, index):
            for each in (first, second, stranger):
                await each.subscribed()
            first.publish(stored(1))
            second.publish(stored(1, 2))
            stranger.publish(stored(1, 2, 3))
            await service.caught_up(R0, 0)
            await service.caught_up(R1, 0)
            await eventually(lambda: service.ports()[0].rejected)

            assert (await held(index), await held(index, R1)) == (1, 2)
            assert service.ports()[0].rejected == {"unmapped_topic": 1}

            service.set_sources(engines[:1])
            first.publish(stored(2, parent=1, first=1))
            await service.caught_up(R0, 1)
            await eventually(lambda: service.rank_status(R1) is None)
            assert await held(index, R1) is None


async def test_lost_peer_of_a_shared_port_puts_its_ranks_in_doubt_until_they_are_heard(
    publishing: Any, indexing: Any, stored: Event, source: Source
) -> None:
    """Whose it was nobody tells; and a peer that comes is no proof that all are there."""
    async with publishing() as spare:
        bound = spare.events
    async with (
        publishing(connect_to=bound, topic=b"a") as first,
        publishing(connect_to=bound, topic=b"b") as second,
        publishing(connect_to=bound, topic=b"c") as third,
    ):
        engines = [
            InstanceSource(url=url, topic=topic, replay=each.replay, model="tiny", ranks=1)
            for url, topic, each in ((E0, "a", first), (E1, "b", second), (E2, "c", third))
        ]
        async with indexing(*engines, shared_bind=bound) as (service, _):
            for each in (first, second, third):
                await each.subscribed()
            await service.until(R0, lambda now: now.trust_reason == "unheard")
            assert not service.rank_status(R0).is_connected
            for each, rank in ((first, R0), (second, R1), (third, R2)):
                each.publish(stored(1))
                await service.until(rank, is_heard)

            first.lose_live_socket()
            for rank in (R0, R1, R2):
                await service.until(rank, lambda now: now.trust is Trust.DEGRADED)
            for each, rank in ((second, R1), (third, R2)):
                each.publish(stored(2, parent=1, first=1))
                await service.until(rank, is_heard)
            gone = service.rank_status(R0)
            assert (gone.trust_reason, gone.is_connected) == ("disconnected", False)

            first.publish(stored(2, parent=1, first=1), drop=True)
            third.lose_live_socket()
            await service.until(R2, lambda now: now.trust is Trust.DEGRADED)
            await third.restart()
            await service.caught_up(R0, 1)  # by replay: the port has got another peer
            gone = await service.until(R0, lambda now: now.trust_reason == "unheard")
            assert (gone.trust, gone.is_connected) == (Trust.DEGRADED, False)


def is_heard(now: RankStatus) -> bool:
    return now.trust is Trust.EXACT and now.is_connected


class FailingIndex(MemoryIndex):
    """Breaks once for E0, as a bug would, whatever is wanted of it."""

    failures = 1
    retire_failures = 0

    async def retire(self, rank: RankId) -> None:
        if self.retire_failures:
            self.retire_failures -= 1
            raise RuntimeError("broken on purpose")
        await super().retire(rank)

    async def apply(self, update: RankUpdate) -> None:
        if update.rank == R0 and update.seq == 0 and self.failures:
            self.failures -= 1
            raise RuntimeError("broken on purpose")
        await super().apply(update)


async def test_failure_of_one_rank_is_its_own(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Source
) -> None:
    """It starts anew with another epoch; the other rank doesn't notice."""
    async with publishing() as engine, publishing() as other:
        sources = (source(engine), source(other, E1))
        async with indexing(*sources, index=FailingIndex()) as (service, index):
            await engine.subscribed()
            await other.subscribed()
            other.publish(stored(1))
            before = await service.caught_up(R1, 0)
            engine.publish(stored(1))
            status = await service.caught_up(R0, 0)

            assert (status.counts.failures, await held(index)) == (1, 1)
            assert service.rank_status(R1).epoch == before.epoch


async def test_fleet_changes_in_the_end(
    publishing: Any, indexing: Any, eventually: Any, held: Held, source: Source
) -> None:
    """An index that fails once while a rank is forgotten is asked again."""
    index = FailingIndex()
    index.failures, index.retire_failures = 0, 1
    async with publishing() as engine, indexing(source(engine), index=index) as (service, _):
        await service.until(R0, lambda now: now.trust is Trust.EXACT)
        service.set_sources([])
        await eventually(lambda: not service.instances())

        assert await held(index) is None


async def test_instance_that_moved_is_followed_anew(
    publishing: Any, indexing: Any, stored: Event, source: Source
) -> None:
    """Its rows are dropped, its stream connected to anew; others are not touched."""
    async with (
        publishing() as moving,
        publishing() as staying,
        indexing(source(moving), source(staying, E1)) as (service, _),
    ):
        for each in (moving, staying):
            await each.subscribed()
            each.publish(stored(1))
        async with asyncio.timeout(20):
            before = await service.until(R0, lambda now: now.held_blocks == 1)
            kept = await service.until(R1, lambda now: now.held_blocks == 1)
            service.follow_anew([R0.instance, InstanceId("http://unknown:1")])
            after = await service.until(
                R0, lambda now: now.epoch != before.epoch and now.held_blocks == 1
            )
        untouched = service.rank_status(R1)

    assert after.epoch > before.epoch
    assert untouched is not None
    assert (untouched.epoch, untouched.held_blocks) == (kept.epoch, 1)


async def test_taken_port_is_tried_again(publishing: Any, indexing: Any, eventually: Any) -> None:
    """The port's status says why nothing comes."""
    async with publishing() as owner:
        dialled = InstanceSource(
            url=E0, events=owner.events, direction="bind", model="tiny", ranks=1
        )
        async with indexing(dialled) as (service, _):
            await eventually(lambda: service.ports() and service.ports()[0].problem)

            assert "in use" in service.ports()[0].problem


async def test_follow_shows_batches_and_the_repair_of_a_gap(
    publishing: Any, stored: Event, removed: Event
) -> None:
    """What `kvlb events` prints."""
    items: list[FollowedItem] = []
    joined, repaired = asyncio.Event(), asyncio.Event()

    def on_item(item: FollowedItem) -> None:
        items.append(item)
        if isinstance(item, ReplayEnded):
            joined.set()
        if isinstance(item, GapRepaired):
            repaired.set()

    async with publishing() as engine:
        rank = RankSource(
            rank=R0, alias="e0", model="tiny", events=engine.events, replay=engine.replay
        )
        async with asyncio.TaskGroup() as group:
            following = group.create_task(follow(rank, on_item, config=Config()))
            await joined.wait()
            await engine.subscribed()
            engine.publish(stored(1))
            engine.publish(CLEARED, drop=True)
            engine.publish_payload(b"garbage", drop=True)
            engine.publish(removed(1))
            await repaired.wait()
            following.cancel()

    shown = [item for item in items if not isinstance(item, FollowedBatch)]
    batches = [item for item in items if isinstance(item, FollowedBatch)]
    assert [each.seq for each in batches] == [0, 1, 2, 3]
    assert [each.batch is None for each in batches] == [False, False, True, False]
    assert GapOpened(1, 2) in shown
    assert TrustChanged(Trust.DEGRADED, "events_refused") in shown
    assert any(isinstance(item, RequestReplay) and item.from_seq == 1 for item in shown)


async def test_index_is_measured(
    publishing: Any, indexing: Any, stored: Event, source: Source
) -> None:
    """Entries are counted per rank."""
    async with publishing() as engine, indexing(source(engine)) as (service, _):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)
        await service.measure()

        assert service.index_size == IndexSize(entries=2, entries_by_rank={R0: 2})
