"""The write path over real sockets: what a publisher does, what the index then says."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from indexer.config import IndexerConfig as Config
from indexer.config import InstanceSource, RankSource
from indexer.core.hashing import Namespace
from indexer.core.index import BlockIndex, IndexSize, Prompt, RankUpdate
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

CAPTURES = Path(__file__).parent.parent / "captures"
BLOCK_SIZE = 4
E0, E1 = "http://e0:8000", "http://e1:8000"
R0, R1 = RankId(InstanceId(E0), 0), RankId(InstanceId(E1), 0)


def stored(*hashes: int, parent: int | None = None, first: int = 0) -> dict[str, Any]:
    """Blocks number `first` and on of the one prompt that all tests use."""
    tokens = list(range(first * BLOCK_SIZE, (first + len(hashes)) * BLOCK_SIZE))
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
    }


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


async def held(index: BlockIndex, rank: RankId = R0) -> int | None:
    """Blocks of the prompt that `rank` is credited with; None: it isn't known."""
    prompt = Prompt(Namespace(model="tiny"), range(100 * BLOCK_SIZE))
    match = (await index.match(prompt)).get(rank)
    return None if match is None else match.tokens // BLOCK_SIZE


def source(publisher: Any, url: str = E0, *, replay: bool = True, **more: Any) -> InstanceSource:
    """Everything configured: no HTTP needed."""
    return InstanceSource(
        url=url,
        events=publisher.events,
        replay=publisher.replay if replay else None,
        model="tiny",
        ranks=1,
        **more,
    )


@pytest.mark.parametrize("has_topic_frame", [False, True], ids=["up-to-0.25", "since-0.26"])
async def test_late_joiner_gets_the_past_by_replay_and_the_rest_live(
    publishing: Any, indexing: Any, has_topic_frame: bool
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
    publishing: Any, indexing: Any
) -> None:
    """There is no publishing while an engine idles."""
    async with publishing() as engine, indexing(source(engine)) as (service, _):
        status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

        assert (status.trust_reason, status.is_connected) == ("fresh", True)


async def test_gap_is_repaired_in_order(publishing: Any, indexing: Any) -> None:
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
    publishing: Any, indexing: Any
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
    publishing: Any, indexing: Any, replay: bool
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


async def test_idle_restarted_engine_loses_its_credit_without_a_batch(
    publishing: Any, indexing: Any
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


async def test_restart_behind_a_rising_number_is_seen(publishing: Any, indexing: Any) -> None:
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


async def test_silent_replay_socket_stops_nothing(publishing: Any, indexing: Any) -> None:
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


async def test_lost_gap_is_healed_once_replay_answers_again(publishing: Any, indexing: Any) -> None:
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
    publishing: Any, indexing: Any
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


async def test_bad_messages_cost_only_themselves(publishing: Any, indexing: Any) -> None:
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


async def test_bad_replay_answers_cost_only_themselves(publishing: Any, indexing: Any) -> None:
    """F06 on the other socket."""
    async with publishing() as engine:
        engine.junk_answers = [[b"", b"lonely"], [b"", b"short", b"p"]]
        engine.publish(stored(1))
        async with indexing(source(engine)) as (service, index):
            status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

            assert status.counts.rejected == {"replay_frame_count": 1, "replay_seq_frame": 1}
            assert await held(index) == 1


async def test_duplicate_and_late_batches_are_counted(publishing: Any, indexing: Any) -> None:
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


async def test_engine_connects_to_a_port_of_its_own(publishing: Any, indexing: Any) -> None:
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
    publishing: Any, indexing: Any, eventually: Any
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


async def test_failure_of_one_rank_is_its_own(publishing: Any, indexing: Any) -> None:
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


async def test_fleet_changes_in_the_end(publishing: Any, indexing: Any, eventually: Any) -> None:
    """An index that fails once while a rank is forgotten is asked again."""
    index = FailingIndex()
    index.failures, index.retire_failures = 0, 1
    async with publishing() as engine, indexing(source(engine), index=index) as (service, _):
        await service.until(R0, lambda now: now.trust is Trust.EXACT)
        service.set_sources([])
        await eventually(lambda: not service.instances())

        assert await held(index) is None


async def test_taken_port_is_tried_again(publishing: Any, indexing: Any, eventually: Any) -> None:
    """The port's status says why nothing comes."""
    async with publishing() as owner:
        dialled = InstanceSource(
            url=E0, events=owner.events, direction="bind", model="tiny", ranks=1
        )
        async with indexing(dialled) as (service, _):
            await eventually(lambda: service.ports() and service.ports()[0].problem)

            assert "in use" in service.ports()[0].problem


async def test_topic_claimed_twice_is_refused(indexing: Any, publishing: Any) -> None:
    """Two ranks can't have the same messages: the second says so."""
    async with publishing() as spare:
        bound = spare.events
    engines = [InstanceSource(url=url, topic="same", model="tiny", ranks=1) for url in (E0, E1)]
    async with indexing(*engines, shared_bind=bound) as (service, _):
        status = await service.until(R1, lambda now: now.problem is not None)

        assert "topic" in status.problem


async def test_follow_shows_batches_and_the_repair_of_a_gap(publishing: Any) -> None:
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
    publishing: Any, indexing: Any, capture: str, publisher: str, has_topic_frame: bool
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


async def test_index_is_measured(publishing: Any, indexing: Any) -> None:
    """Entries are counted per rank."""
    async with publishing() as engine, indexing(source(engine)) as (service, _):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)
        await service.measure()

        assert service.index_size == IndexSize(entries=2, entries_by_rank={R0: 2})
