"""Every switch of the simulator that spoils an event stream, played end to end.

Simulated engines behind real HTTP and ZMQ, an indexer that finds and follows them, the index asked.
What the index predicts of a prompt has to be what the engine then reports as cached.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import BlockIndex, Prompt
from indexer.core.rank_status import RankStatus
from indexer.core.types import InstanceId, RankId, Trust
from indexer.service import IndexerService
from simulator.core.event_faults import EventFaults
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet

SIZE = 16
BLOCKS = 48
"""Little enough that a dozen prompts evict each other: nearly every request is a batch."""


class Stage:
    """One simulated engine under a fault, and the index that follows it."""

    def __init__(
        self,
        fleet: RunningFleet,
        service: IndexerService,
        index: BlockIndex,
        http: httpx.AsyncClient,
    ) -> None:
        self.fleet = fleet
        self.engine: RunningEngine = fleet.engines[0]
        self.service = service
        self.index = index
        self.http = http
        self.rank = RankId(InstanceId(self.engine.url), 0)
        self._dice = Random(7)  # noqa: S311 - a test's dice

    async def set_faults(self, **faults: Any) -> None:
        """Over HTTP, as somebody outside would."""
        answer = await self.http.post(f"{self.engine.url}/simulator/faults", json=faults)
        assert answer.status_code == 200, answer.text

    async def ask(self, prompt: Sequence[int], model: str = "sim") -> int:
        """Have the engine compute a prompt. Returns its cached tokens."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": 1}
        answer = await self.http.post(f"{self.engine.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    async def work(self, prompts: int = 24) -> None:
        """Some traffic: prompts that share beginnings, come again, and push each other out."""
        for _ in range(prompts):
            await self.ask(self.prompt(self._dice.randrange(12)))
        assert self.engine.engine.ranks[0].publisher.last_seq > prompts // 3

    def prompt(self, number: int) -> list[int]:
        """One of a few families with a common beginning of four blocks."""
        family = 10_000 * (1 + number % 3)
        tail = family + 100 * (1 + number)
        return [*range(family, family + 64), *range(tail, tail + 16 * (number % 4) + 100)]

    async def caught_up(self) -> RankStatus:
        """Wait until the index has the engine's last batch."""
        return await self.service.until(
            self.rank,
            lambda now: (
                now.last_seq == self.engine.engine.ranks[0].publisher.last_seq
                and not now.is_replaying
            ),
        )

    async def predict(self, prompt: Sequence[int], model: str = "sim", lora: Any = None) -> int:
        matches = await self.index.match(Prompt(Namespace(model=model, lora=lora), prompt))
        return matches[self.rank].tokens

    async def errors(self) -> list[tuple[int, int, int]]:
        """Prompts of which something else was predicted than the engine reported: both figures."""
        wrong = []
        for number in range(12):
            await self.caught_up()
            predicted = await self.predict(self.prompt(number))
            reported = await self.ask(self.prompt(number))
            if predicted != reported:
                wrong.append((number, predicted, reported))
        return wrong


Staging = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
def staging(indexing: Any) -> Staging:
    """Make a stage that works inside `async with`: the rank is followed and exact."""

    @asynccontextmanager
    async def run(indexer: Any = None, **settings: Any) -> AsyncIterator[Stage]:
        fast = {"prefill_tokens_per_s": 1e7, "inter_token_ms": 0.1, "num_blocks": BLOCKS}
        engine = EngineSettings(**{**fast, "max_model_len": 512, **settings})
        async with (
            running_fleet(FleetSpec.parse("1"), engine=engine) as fleet,
            httpx.AsyncClient(trust_env=False, timeout=10) as http,
        ):
            first = fleet.engines[0]
            source = InstanceSource(
                url=first.url, events=first.events_endpoint, replay=first.replay_endpoint
            )
            async with indexing(source, **(indexer or {})) as (service, index):
                stage = Stage(fleet, service, index, http)
                if first.settings.replay:
                    await service.until(stage.rank, lambda now: now.trust is Trust.EXACT)
                yield stage

    return run


async def test_without_a_fault_every_prediction_is_right(staging: Staging) -> None:
    """What the others are compared with: evictions, copies, recomputed last blocks."""
    async with staging() as stage:
        await stage.work()

        assert await stage.errors() == []
        assert (await stage.caught_up()).trust is Trust.EXACT


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"drop_every": 3}, id="gap"),
        pytest.param({"drop_every": 2, "replay": "twice"}, id="gap-replayed-twice"),
        pytest.param({"drop_every": 5, "replay_delay_s": 0.02}, id="gap-and-live-goes-on"),
        pytest.param({"duplicate_every": 1}, id="duplicates"),
        pytest.param({"swap_every": 3}, id="reordered"),
        pytest.param({"stale_every": 4}, id="late"),
        pytest.param({"malformed_every": 1}, id="malformed"),
        pytest.param({"mixes_hash_forms": True}, id="hash-forms"),
        pytest.param(
            {"drop_every": 4, "duplicate_every": 3, "swap_every": 5, "stale_every": 7},
            id="all-at-once",
        ),
    ],
)
async def test_fault_that_can_be_repaired_leaves_no_trace(staging: Staging, faults: Any) -> None:
    """Exact while the fault lasts and after it: nothing twice, nothing missing, nothing too soon."""
    async with staging() as stage:
        await stage.set_faults(**faults)
        await stage.work()
        await stage.set_faults()
        await stage.ask([1, 2, 3] * 16)
        await stage.caught_up()
        status = await stage.service.until(stage.rank, lambda now: now.trust is Trust.EXACT)

        assert await stage.errors() == []
        assert status.counts.lost_batches == 0
        assert status.counts.epochs.keys() <= {"started", "rebuilt"}


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        pytest.param({"bad_event_every": 1}, "bad_field", id="wrong-type"),
        pytest.param({"contradiction_every": 1}, "duplicate_hashes", id="contradiction"),
    ],
)
async def test_event_that_cannot_be_used_costs_only_itself(
    staging: Staging, faults: Any, reason: str
) -> None:
    """F06, F20: every good event of the same batches counts, and the rank says it isn't sure."""
    async with staging() as stage:
        await stage.set_faults(**faults)
        await stage.work()

        assert await stage.errors() == []
        status = await stage.caught_up()
        assert (status.trust, status.trust_reason) == (Trust.DEGRADED, "events_refused")
        assert (status.counts.rejected | status.counts.set_aside)[reason] > 0
        assert status.counts.connections == 1


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"drop_every": 3, "replay": "silent"}, id="never-answered"),
    ],
)
async def test_gap_whose_replay_fails_heals_once_it_answers(staging: Staging, faults: Any) -> None:
    """The stream never stops for it; told again from the beginning, all is right."""
    async with staging({"replay_timeout_s": 0.05}) as stage:
        await stage.work(10)
        await stage.set_faults(**faults)
        await stage.work(20)
        await stage.service.until(stage.rank, lambda now: now.counts.lost_batches > 0)
        await stage.set_faults()
        await stage.ask([1, 2, 3] * 16)
        await stage.caught_up()
        await stage.service.until(stage.rank, lambda now: now.trust is Trust.EXACT)

        assert await stage.errors() == []


@pytest.mark.parametrize("replay", ["cut", "holes"])
async def test_gap_that_is_replayed_in_part_is_asked_for_again(
    staging: Staging, replay: str
) -> None:
    """Each answer brings it further, so nothing is lost and nothing told anew."""
    async with staging({"replay_timeout_s": 0.3, "rebuild_interval_s": 3600.0}) as stage:
        await stage.work(8)
        await stage.set_faults(drop_every=1, replay=replay)
        await stage.work(6)
        await stage.set_faults(replay=replay)
        await stage.ask([1, 2, 3] * 16)
        await stage.caught_up()
        # Good news is told once the index has what it speaks of.
        status = await stage.service.until(stage.rank, lambda now: now.trust is Trust.EXACT)

        assert (status.counts.lost_batches, status.counts.epochs["rebuilt"]) == (0, 0)
        assert await stage.errors() == []


@pytest.mark.parametrize(
    ("settings", "faults"),
    [
        pytest.param({}, {"lose_every": 4}, id="never-sent"),
        pytest.param({"buffer_steps": 1}, {"drop_every": 4}, id="ring-rolled-over"),
        pytest.param({"replay": False}, {"drop_every": 4}, id="no-replay"),
    ],
)
async def test_gap_that_nobody_can_fill_is_shown_until_a_clear(
    staging: Staging, settings: Any, faults: Any
) -> None:
    """Never asked about for ever; after a reset nothing is unknown."""
    async with staging(**settings) as stage:
        await stage.set_faults(**faults)
        await stage.work(10)
        await stage.set_faults()
        await stage.ask([1, 2, 3] * 16)
        status = await stage.caught_up()
        assert status.counts.lost_batches > 0
        assert status.trust is Trust.DEGRADED
        assert status.trust_reason in {"gap_lost", "joined_late"}

        await stage.http.post(f"{stage.engine.url}/reset_prefix_cache")
        await stage.work(10)
        await stage.service.until(stage.rank, lambda now: now.trust is Trust.EXACT)

        assert await stage.errors() == []


async def test_reset_is_told_with_the_next_step_and_costs_one_wrong_guess(
    staging: Staging,
) -> None:
    """F03: until then the old prefix is credited; that request is answered like any other."""
    async with staging() as stage:
        await stage.work(5)
        await stage.caught_up()
        prompt = stage.prompt(3)
        await stage.ask(prompt)
        await stage.caught_up()

        await stage.http.post(f"{stage.engine.url}/reset_prefix_cache")
        assert await stage.predict(prompt) > 0
        assert await stage.ask(prompt) == 0

        assert await stage.errors() == []


async def test_restart_forgets_the_dead_cache(staging: Staging) -> None:
    """F02: numbers begin at 0 again; the new life is followed from its beginning."""
    async with staging() as stage:
        await stage.work()
        before = await stage.caught_up()

        await stage.fleet.restart(stage.engine)
        await stage.service.until(stage.rank, lambda now: now.epoch > before.epoch)
        assert [await stage.predict(stage.prompt(number)) for number in range(12)] == [0] * 12

        await stage.work()
        assert await stage.errors() == []


async def test_restart_under_traffic_hides_behind_no_number(staging: Staging) -> None:
    """The new process is past the old one's number before we have connected again."""
    async with staging() as stage:
        await stage.work(5)
        before = await stage.caught_up()

        await stage.fleet.restart(stage.engine)
        await stage.work(30)
        await stage.service.until(
            stage.rank, lambda now: now.epoch > before.epoch and now.trust is Trust.EXACT
        )

        assert await stage.errors() == []


async def test_address_that_serves_another_model_inherits_nothing(staging: Staging) -> None:
    """F56: the old model's blocks are nobody's."""
    async with staging() as stage:
        await stage.work(10)
        await stage.caught_up()
        other = msgspec.structs.replace(stage.engine.settings, model="other")

        await stage.fleet.restart(stage.engine, other)
        await stage.ask(stage.prompt(3), model="other")
        await stage.service.until(
            stage.rank, lambda now: now.model == "other" and now.last_seq == 0
        )

        old = await stage.index.match(Prompt(Namespace(model="sim"), stage.prompt(3)))
        assert old == {}
        assert await stage.predict(stage.prompt(3), model="other") > 64


async def test_removed_instance_is_not_followed_any_more(
    staging: Staging, eventually: Callable[[Callable[[], object]], Awaitable[None]]
) -> None:
    """F27: it publishes on; nothing of it is in the index, nor comes back."""
    async with staging() as stage:
        await stage.work(10)
        await stage.caught_up()

        stage.service.set_sources([])
        await eventually(lambda: not stage.service.instances())
        await stage.work(10)
        await stage.service.measure()

        assert await stage.index.match(Prompt(Namespace(model="sim"), stage.prompt(3))) == {}
        assert stage.service.index_size.entries == 0


@pytest.mark.parametrize(
    ("version", "reuses_stale_blocks"),
    [pytest.param("0.33.0", False, id="path"), pytest.param("0.30.0", True, id="name")],
)
async def test_reloaded_adapter_gets_no_credit_for_the_old_weights(
    staging: Staging, version: str, reuses_stale_blocks: bool
) -> None:
    """F10. Engines that hash the name only answer from the stale blocks; we don't send for them."""
    async with staging(version=version, adapters=("ad1",), num_blocks=1024) as stage:
        prompt, other = stage.prompt(3), stage.prompt(4)
        await stage.ask(prompt, model="ad1")
        await stage.caught_up()
        assert await stage.predict(prompt, lora="ad1") > 64

        url = f"{stage.engine.url}/v1"
        await stage.http.post(f"{url}/unload_lora_adapter", json={"lora_name": "ad1"})
        loaded = {"lora_name": "ad1", "lora_path": "/adapters/other"}
        await stage.http.post(f"{url}/load_lora_adapter", json=loaded)
        await stage.ask(other, model="ad1")
        status = await stage.caught_up()

        assert await stage.predict(prompt, lora="ad1") == 0
        assert await stage.predict(other, lora="ad1") > 64
        assert (await stage.ask(prompt, model="ad1") > 0) == reuses_stale_blocks
        status = await stage.caught_up()
        assert await stage.predict(prompt, lora="ad1") == (0 if reuses_stale_blocks else 208)
        assert status.trust is Trust.EXACT


def test_faults_are_named_in_full() -> None:
    """A typo is refused, not ignored."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"drop_evry": 3}, EventFaults)
