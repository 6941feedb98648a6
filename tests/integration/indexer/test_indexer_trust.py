"""What lowers trust in a rank over real sockets, what is done about it, and the way back."""

from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import BlockIndex, Prompt
from indexer.core.reports import CacheReport
from indexer.core.types import BlockKey, InstanceId, RankId, Trust
from indexer.local_reports import LocalReports

BLOCK_SIZE = 4
E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)
HOUR_S = 3600.0


def stored(*hashes: int, parent: int | None = None, first: int = 0, **more: Any) -> dict[str, Any]:
    """Blocks number `first` and on of the one prompt that all tests use."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(range(first * BLOCK_SIZE, (first + len(hashes)) * BLOCK_SIZE)),
        "block_size": BLOCK_SIZE,
        "kv_cache_spec_kind": "full_attention",
        **more,
    }


def removed(*hashes: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


async def held(index: BlockIndex, first: int = 0) -> int:
    """Blocks of the prompt, from block `first` on, that the rank is credited with."""
    prompt = Prompt(Namespace(model="tiny"), range(first * BLOCK_SIZE, 100 * BLOCK_SIZE))
    return (await index.match(prompt))[R0].tokens // BLOCK_SIZE


def source(publisher: Any) -> InstanceSource:
    return InstanceSource(
        url=E0, events=publisher.events, replay=publisher.replay, model="tiny", ranks=1
    )


def missed(epoch: int) -> CacheReport:
    """A leg that was promised one block, and found none."""
    return CacheReport(
        rank=R0,
        epoch=epoch,
        age_s=0.0,
        block_size=BLOCK_SIZE,
        predicted_tokens=BLOCK_SIZE,
        cached_tokens=0,
        key=BlockKey(1),
    )


async def test_late_starter_gets_the_parent_of_its_orphans_by_replay(
    publishing: Any, indexing: Any
) -> None:
    """F05: counted and held meanwhile; hB is never the start of a prompt; then A-B-C, exact."""
    async with publishing() as engine:
        engine.is_mute = True
        engine.publish(stored(1), drop=True)
        async with indexing(source(engine), replay_timeout_s=0.05) as (service, index):
            await engine.subscribed()
            engine.publish(stored(2, parent=1, first=1))
            engine.publish(stored(3, parent=2, first=2))
            status = await service.until(R0, lambda now: now.orphans == 2)
            assert (status.trust, await held(index, first=1)) == (Trust.DEGRADED, 0)

            engine.is_mute = False
            status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

            assert (await held(index), await held(index, first=1), status.orphans) == (3, 0, 0)


async def test_orphans_ask_for_the_beginning_without_waiting_for_the_next_turn(
    publishing: Any, indexing: Any
) -> None:
    """A rank that is degraded already, and was told in vain, is asked again when they appear."""
    async with (
        publishing() as engine,
        indexing(source(engine), rebuild_interval_s=HOUR_S) as (service, index),
    ):
        await engine.subscribed()
        await service.until(R0, lambda now: now.trust is Trust.EXACT)
        engine.publish(removed(99))
        engine.publish(stored(1), drop=True)
        missing = engine.ring.pop()
        engine.publish(removed(98))
        await service.until(
            R0, lambda now: now.epoch_reason == "rebuilt" and now.counts.lost_batches == 2
        )

        engine.ring.insert(1, missing)
        engine.publish(stored(2, parent=1, first=1))
        status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

        assert (await held(index), status.counts.epochs["rebuilt"]) == (2, 2)


async def test_unfilled_gap_is_not_called_exact(publishing: Any, indexing: Any) -> None:
    """What the missing batch removed is predicted meanwhile: the replay socket hangs."""
    async with publishing() as engine:
        settings = {"replay_timeout_s": HOUR_S, "repair_grace_s": 0.05}
        async with indexing(source(engine), **settings) as (service, index):
            await engine.subscribed()
            await service.until(R0, lambda now: now.trust is Trust.EXACT)
            engine.publish(stored(1))
            await service.caught_up(R0, 0)
            engine.is_mute = True
            engine.publish(removed(1), drop=True)
            engine.publish(stored(7, first=7))
            status = await service.until(R0, lambda now: now.trust is Trust.DEGRADED)

            assert (status.trust_reason, status.held_batches) == ("gap_open", 1)
            match = (await index.match(Prompt(Namespace(model="tiny"), range(8))))[R0]
            assert (match.tokens, match.trust) == (4, Trust.DEGRADED)


async def test_gap_that_is_filled_late_ends_in_exact(publishing: Any, indexing: Any) -> None:
    """The second question is answered; nothing was lost, so nothing has to be told anew."""
    async with publishing() as engine:
        settings = {"replay_timeout_s": 0.5, "repair_grace_s": 0.05}
        async with indexing(source(engine), **settings) as (service, _):
            await engine.subscribed()
            await service.until(R0, lambda now: now.trust is Trust.EXACT)
            engine.publish(stored(1))
            await service.caught_up(R0, 0)
            engine.is_mute = True
            engine.publish(removed(1), drop=True)
            engine.publish(stored(7, first=7))
            await service.until(R0, lambda now: now.trust_reason == "gap_open")
            engine.is_mute = False
            status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

            assert (status.trust_reason, status.counts.lost_batches) == ("repaired", 0)
            assert (status.counts.gaps["repaired"], status.counts.epochs["rebuilt"]) == (1, 0)


async def test_leg_that_contradicts_leaves_an_open_gap_no_grace(
    publishing: Any, indexing: Any
) -> None:
    """One is enough: what is missing matters."""
    async with publishing() as engine:
        reports = LocalReports()
        settings = {"replay_timeout_s": HOUR_S, "repair_grace_s": HOUR_S, "reports": reports}
        async with indexing(source(engine), **settings) as (service, _):
            await engine.subscribed()
            await service.until(R0, lambda now: now.trust is Trust.EXACT)
            engine.publish(stored(1))
            await service.caught_up(R0, 0)
            engine.is_mute = True
            engine.publish(removed(1), drop=True)
            engine.publish(stored(7, first=7))
            status = await service.until(R0, lambda now: now.held_batches == 1)
            assert status.trust is Trust.EXACT
            await reports.send("tiny", [missed(status.epoch)])
            status = await service.until(R0, lambda now: now.trust is Trust.DEGRADED)

            assert status.trust_reason == "gap_open"


async def test_replay_socket_that_works_again_is_noticed(
    publishing: Any, indexing: Any, eventually: Any
) -> None:
    """Not an hour later, and live batches don't wait for it."""
    async with publishing() as engine:
        settings = {"replay_timeout_s": 0.25, "rebuild_interval_s": HOUR_S}
        async with indexing(source(engine), **settings) as (service, index):
            await engine.subscribed()
            await service.until(R0, lambda now: now.trust is Trust.EXACT)
            engine.publish(stored(1))
            await service.caught_up(R0, 0)
            engine.is_mute = True
            engine.publish(stored(2, parent=1, first=1), drop=True)
            engine.publish(stored(7, first=7))
            await service.until(R0, lambda now: now.trust_reason == "gap_lost")
            asked = len(engine.asked)
            await eventually(lambda: len(engine.asked) >= asked + 3)
            status = service.rank_status(R0)
            assert (status.is_replaying, set(engine.asked[asked:])) == (False, {2})

            engine.is_mute = False
            status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

            assert (await held(index), status.epoch_reason) == (2, "rebuilt")


async def test_orphans_that_replay_cannot_help_are_asked_about_once(
    publishing: Any, indexing: Any
) -> None:
    """The engine never named the parent. When they go, or it shows after all, all is well."""
    async with (
        publishing() as engine,
        indexing(source(engine), rebuild_interval_s=0.001) as (service, index),
    ):
        await engine.subscribed()
        await service.until(R0, lambda now: now.trust is Trust.EXACT)
        engine.publish(stored(2, parent=1, first=1))
        await service.until(R0, lambda now: now.epoch_reason == "rebuilt" and not now.is_replaying)
        for number in range(20):
            engine.publish(stored(50 + number, parent=1000 + number, first=50))
            await service.caught_up(R0, 1 + number)
        status = service.rank_status(R0)
        assert (status.trust, status.trust_reason) == (Trust.DEGRADED, "orphans")
        assert engine.asked == [0, 0]

        engine.publish(stored(1), removed(*range(50, 70)))
        status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

        assert (status.trust_reason, await held(index)) == ("orphans_gone", 2)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(stored(7, 7, parent=1, first=1), id="hash-twice"),
        pytest.param(stored(7, parent=1, token_ids=[1, 2, 3]), id="too-few-tokens"),
        pytest.param(stored(7, parent=1, block_size=8), id="other-block-size"),
        pytest.param({"type": "BlockStored", "block_hashes": "seven"}, id="undecodable"),
    ],
)
async def test_refused_event_is_visible_until_a_clear(
    publishing: Any, indexing: Any, event: Any
) -> None:
    """What it said is unknown; nothing else of the batch is."""
    async with publishing() as engine, indexing(source(engine)) as (service, index):
        await engine.subscribed()
        await service.until(R0, lambda now: now.trust is Trust.EXACT)
        engine.publish(stored(1), event, stored(2, parent=1, first=1))
        status = await service.caught_up(R0, 0)
        assert (status.trust, status.trust_reason) == (Trust.DEGRADED, "events_refused")
        assert await held(index) == 2

        engine.publish({"type": "AllBlocksCleared"})
        status = await service.until(R0, lambda now: now.trust is Trust.EXACT)

        assert status.trust_reason == "cleared"


async def test_what_engines_do_all_day_keeps_the_rank_exact(publishing: Any, indexing: Any) -> None:
    """Offloading, hybrid models, kinds of events to come."""
    placeholder: dict[str, Any] = {
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "medium": "CPU",
    }
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "token_ids": [*range(16)],
    }
    async with publishing() as engine, indexing(source(engine)) as (service, index):
        await engine.subscribed()
        await service.until(R0, lambda now: now.trust is Trust.EXACT)
        engine.publish(
            stored(1),
            stored(2, parent=1, first=1),
            stored(77, **placeholder),
            stored(88, block_size=256, token_ids=[*range(256)], medium="CPU"),
            stored(2, parent=1, **window),
            removed(99, medium="CPU"),
            stored(),
            {"type": "NewInSomeRelease"},
        )
        status = await service.caught_up(R0, 0)

        assert (status.trust, await held(index)) == (Trust.EXACT, 2)


async def test_batches_that_name_another_rank_are_applied_and_told(
    publishing: Any, indexing: Any
) -> None:
    """The connection is the identity; crossed ports are for the operator to mend."""
    async with publishing() as engine, indexing(source(engine)) as (service, index):
        await engine.subscribed()
        await service.until(R0, lambda now: now.trust is Trust.EXACT)
        with capture_logs() as lines:
            engine.publish_payload(msgspec.msgpack.encode([2000.0, [stored(1)], 1]))
            engine.publish_payload(msgspec.msgpack.encode([2001.0, [stored(2, parent=1)], 1]))
            status = await service.caught_up(R0, 1)

        assert (status.counts.wrong_rank, status.named_rank, status.rank.rank) == (2, 1, 0)
        assert await held(index) == 1
        warned = [line for line in lines if line["event"] == "wrong_rank"]
        assert [(line["instance"], line["rank"]) for line in warned] == [(E0, 0)]


async def test_batches_without_a_rank_are_in_order(publishing: Any, indexing: Any) -> None:
    """0.9.0 doesn't name it."""
    async with publishing() as engine, indexing(source(engine)) as (service, _):
        await engine.subscribed()
        engine.publish_payload(msgspec.msgpack.encode([2000.0, [stored(1)]]))
        status = await service.caught_up(R0, 0)

        assert (status.counts.wrong_rank, status.named_rank) == (0, None)
