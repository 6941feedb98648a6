"""An indexer over a real Redis ends, and another goes on with what it wrote."""

import gzip
import json
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.rank_status import RankStatus
from indexer.core.types import InstanceId, RankId, Trust

Event = Callable[..., dict[str, Any]]
Held = Callable[..., Awaitable[int | None]]

CAPTURES = Path(__file__).parents[3] / "captures"

E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)


def frames_of(capture: str) -> Iterator[bytes]:
    """As far as the cache is well filled: the recording ends with a reset."""
    with gzip.open(CAPTURES / f"{capture}.events.jsonl.gz", "rt") as lines:
        for line in islice(lines, 106):
            yield bytes.fromhex(json.loads(line)["frames"][2])


def prompts_of(capture: str) -> list[Prompt]:
    """The first hundred prompts that were sent as token ids."""
    prompts = []
    with gzip.open(CAPTURES / f"{capture}.requests.jsonl.gz", "rt") as lines:
        for line in lines:
            ids = (json.loads(line).get("body") or {}).get("prompt")
            if isinstance(ids, list) and ids and isinstance(ids[0], int):
                prompts.append(Prompt(Namespace(model="tiny"), ids))
    return prompts[:100]


async def test_restarted_indexer_knows_what_the_old_one_knew(
    following: Any, publishing: Any, redis_server: Any
) -> None:
    """A hundred recorded prompts of a hybrid model: the same overlaps, with no traffic between."""
    settings = redis_server.settings()
    prompts = prompts_of("i-hybrid-swa")
    answers: list[list[dict[RankId, int]]] = []
    statuses: list[RankStatus] = []
    async with publishing() as engine:
        for payload in frames_of("i-hybrid-swa"):
            engine.publish_payload(payload, drop=True)
        last = engine.next_seq - 1
        for _ in range(2):
            async with following(engine, settings) as (index, service):
                statuses.append(await service.caught_up(R0, last))
                answers.append(
                    [
                        {rank: match.tokens for rank, match in (await index.match(each)).items()}
                        for each in prompts
                    ]
                )

    assert len(prompts) == 100
    assert answers[0] == answers[1]
    assert sum(answer[R0] > 0 for answer in answers[0]) > 20
    assert [each.epoch_reason for each in statuses] == ["started", "resumed"]
    assert statuses[1].trust is Trust.EXACT


async def test_resumed_rank_goes_on_in_its_epoch(
    following: Any, publishing: Any, redis_server: Any, stored: Event, removed: Event, held: Held
) -> None:
    """What was published meanwhile comes by replay; copies and parents are as they were."""
    settings = redis_server.settings()
    async with publishing() as engine:
        async with following(engine, settings) as (index, service):
            await engine.subscribed()
            engine.publish(stored(1, 2))
            engine.publish(stored(1, 2))
            before = await service.caught_up(R0, 1)
        engine.publish(removed(2))
        engine.publish(stored(3, parent=2, first=2))
        async with following(engine, settings) as (index, service):
            after = await service.caught_up(R0, 3)
            assert await held(index) == 3
            engine.publish(removed(2))
            await service.caught_up(R0, 4)
            assert await held(index) == 1

    assert (after.epoch, after.epoch_reason) == (before.epoch, "resumed")
    assert engine.asked[-1] == 1


async def test_resumed_rank_of_a_restarted_engine_begins_anew(
    following: Any, publishing: Any, redis_server: Any, stored: Event, held: Held
) -> None:
    """Replay contradicts what was kept: nothing of it counts."""
    settings = redis_server.settings()
    async with publishing() as engine:
        async with following(engine, settings) as (index, service):
            await engine.subscribed()
            engine.publish(stored(1, 2, 3))
            # What nobody may believe yet isn't gone on with.
            before = await service.until(
                R0, lambda now: now.last_seq == 0 and now.trust is Trust.EXACT
            )
        await engine.restart()
        engine.publish(stored(1), drop=True)
        async with following(engine, settings) as (index, service):
            after = await service.until(
                R0, lambda now: now.epoch_reason == "resume_contradicted" and now.last_seq == 0
            )
            assert await held(index) == 1

    assert after.epoch > before.epoch


async def test_resumed_rank_that_nothing_vouches_for_is_degraded(
    following: Any, publishing: Any, redis_server: Any, stored: Event, held: Held
) -> None:
    """An engine without a replay endpoint: it keeps its blocks, and says so."""
    settings = redis_server.settings()
    async with publishing() as engine:
        async with following(engine, settings, replay=False) as (index, service):
            await engine.subscribed()
            engine.publish(stored(1, 2))
            await service.caught_up(R0, 0)
        async with following(engine, settings, replay=False) as (index, service):
            status = await service.until(R0, lambda now: now.trust is Trust.DEGRADED)
            assert await held(index) == 2

    assert (status.trust, status.trust_reason) == (Trust.DEGRADED, "resume_unverified")


async def test_epoch_that_opened_after_a_restart_is_newer(
    following: Any, publishing: Any, redis_server: Any
) -> None:
    """An engine whose events nobody had seen yet: nothing to resume, no stale epoch."""
    settings = redis_server.settings()
    async with publishing() as engine:
        statuses = []
        for _ in range(2):
            async with following(engine, settings) as (_, service):
                statuses.append(await service.until(R0, lambda now: now.trust is Trust.EXACT))

    assert statuses[1].epoch > statuses[0].epoch
    assert statuses[1].counts.failures == 0


async def test_reload_after_a_restart_ends_salted_blocks(
    following: Any, publishing: Any, redis_server: Any
) -> None:
    """F10: whose they are isn't kept, so none is credited to the new weights."""

    def of_adapter(name: int, lora_id: int, *extra: str) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": [name],
            "parent_block_hash": None,
            "token_ids": [name] * 4,
            "block_size": 4,
            "lora_id": lora_id,
            "lora_name": "ad1",
            "extra_keys": [["ad1", *extra]],
        }

    salted = Prompt(Namespace(model="tiny", lora="ad1", cache_salt="s"), [1] * 5)
    settings = redis_server.settings()
    async with publishing() as engine:
        async with following(engine, settings) as (index, service):
            await engine.subscribed()
            engine.publish(of_adapter(1, 1, "s"))
            await service.caught_up(R0, 0)
        async with following(engine, settings) as (index, service):
            resumed = await service.caught_up(R0, 0)
            before = (await index.match(salted))[R0].tokens
            engine.publish(of_adapter(2, 2))
            await service.caught_up(R0, 1)
            after = (await index.match(salted))[R0].tokens

    assert resumed.epoch_reason == "resumed"
    assert (before, after) == (4, 0)
