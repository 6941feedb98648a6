"""What the keeper asks engines besides their health, and what a bug in asking costs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from structlog.testing import capture_logs

from balancer.connectors.mooncake import read_engine_ids
from balancer.core.control_errors import EngineCallError
from balancer.core.fleet.probe_state import ProbeAnswer, ProbeOutcome
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.fleet.transfer_facts import Inquiry, TransferFacts
from balancer.core.settings.control import ProbeSettings
from balancer.fleet.engine_client import EngineClient
from balancer.fleet.keeper import FleetKeeper
from indexer.core.types import InstanceId

Keeping = Callable[..., AbstractAsyncContextManager[FleetKeeper]]
Wait = Callable[[FleetKeeper, Callable[[Instance], object]], Awaitable[Instance]]

FAST = ProbeSettings(interval_s=0.02, timeout_s=5.0, unhealthy_after=2)


def is_available(instance: Instance) -> bool:
    return instance.is_available


class BuggyProber:
    """Asks as told; a test makes it raise."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.bugs: list[Exception] = []

    async def probe(self, instance: InstanceId) -> ProbeAnswer:
        if self.bugs:
            raise self.bugs.pop()
        return await self.client.probe(instance)

    async def find_ranks(self, instance: InstanceId) -> Sequence[int]:
        return await self.client.find_ranks(instance)

    async def learn(self, inquiry: Inquiry) -> TransferFacts:
        return await self.client.learn(inquiry)

    async def find_cache_tokens(self, instance: InstanceId) -> int | None:
        return await self.client.find_cache_tokens(instance)


QUERY = b'{"0": {"engine_id": "life-%d", "worker_addr": {}}}'


def asking(engine: Any) -> Callable[[Instance], Inquiry | None]:
    """A connector that asks every instance for its engine ids, as Mooncake does."""
    return lambda _: Inquiry(url=f"{engine.url}/query", read=read_engine_ids)


async def test_what_a_connector_has_to_know_is_asked_with_every_probe(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """A restart too quick to be noticed changes the engine's id all the same."""
    engine.answers["/query"] = (200, QUERY % 1)
    async with keeping(engine.settings(), inquiry=asking(engine)) as keeper:
        first = await wait(keeper, is_available)
        engine.answers["/query"] = (200, QUERY % 2)
        second = await wait(keeper, lambda each: each.facts.engine_ids != first.facts.engine_ids)

    assert (first.facts.engine_ids, second.facts.engine_ids) == ({0: "life-1"}, {0: "life-2"})


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((404, b"{}"), id="not-there"),
        pytest.param((200, b"{}"), id="nobody-registered"),
        pytest.param((200, b"no json"), id="no-json"),
    ],
)
async def test_an_instance_that_cant_tell_gets_no_requests(
    engine: Any, answer: tuple[int, bytes], keeping: Keeping, wait: Wait
) -> None:
    """It could not hand over; the reason is shown, and yesterday's ids are forgotten."""
    engine.answers["/query"] = (200, QUERY % 1)
    async with keeping(engine.settings(), inquiry=asking(engine)) as keeper:
        await wait(keeper, is_available)
        engine.answers["/query"] = answer
        lost = await wait(keeper, lambda each: not each.healthy)

    assert lost.unhealthy_reason == "transfer_unknown"
    assert lost.facts == TransferFacts()


async def test_an_instance_whose_other_port_is_closed_gets_no_requests(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """The bootstrap server is another server than the engine's."""
    nowhere = Inquiry(url="http://127.0.0.1:1/query", read=read_engine_ids)
    async with keeping(engine.settings(), inquiry=lambda _: nowhere) as keeper:
        lost = await wait(keeper, lambda each: each.unhealthy_reason == "transfer_unknown")

    assert not lost.is_available


async def test_bug_in_one_probe_costs_one_probe(engine_factory: Any, client: EngineClient) -> None:
    """It is logged, counted and shown; other instances don't notice, the next probe mends it."""
    prober = BuggyProber(client)
    prober.bugs = [KeyError("a bug")]
    async with engine_factory() as one, engine_factory() as two:
        keeper = FleetKeeper((one.settings(), two.settings()), prober=prober, settings=FAST)
        with capture_logs() as logs:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(keeper.run())
                async with asyncio.timeout(20):
                    await keeper.wait_for(
                        lambda fleet: any(
                            each.unhealthy_reason == "probe_bug" for each in fleet.instances
                        )
                    )
                    await keeper.wait_for(lambda fleet: all(map(is_available, fleet.instances)))
                running.cancel()

    assert keeper.bugs == 1
    assert [each["error"] for each in logs if each["event"] == "fleet_bug"] == ["KeyError('a bug')"]


async def test_bug_of_a_listener_does_not_reach_the_leg(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """Whoever reports a leg or changes the fleet gets no foreign exception."""

    def listen(_: Fleet) -> None:
        raise KeyError("a bug")

    async with keeping(engine.settings(), on_change=listen) as keeper:
        await wait(keeper, is_available)
        keeper.report(engine.id, False, "engine_unreachable")

        assert not keeper.snapshot().instances[0].healthy
        assert keeper.bugs >= 2


@pytest.mark.parametrize(
    ("answer", "ranks", "base"),
    [
        pytest.param((200, b'{"3": {"endpoint": "x"}, "2": {}}'), (2, 3), 2, id="listed"),
        pytest.param((200, b"{}"), (4,), 4, id="events-off"),
        pytest.param((404, b""), (4,), 4, id="before-0.31"),
        pytest.param((200, b"[]"), (4,), 4, id="not-understood"),
    ],
)
async def test_ranks_are_what_the_engine_lists(
    engine: Any, answer: Any, ranks: tuple[int, ...], base: int, keeping: Keeping, wait: Wait
) -> None:
    """Else one, from the configured number on."""
    engine.answers["/kv_event_sources"] = answer
    async with keeping(engine.settings(rank_base=4)) as keeper:
        instance = await wait(keeper, is_available)

    assert (instance.ranks, instance.rank_base) == (ranks, base)


async def test_configured_ranks_are_not_asked_for(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """The operator knows better."""
    engine.answers["/kv_event_sources"] = (200, b'{"0": {}}')
    async with keeping(engine.settings(ranks=2)) as keeper:
        instance = await wait(keeper, is_available)

    assert instance.ranks == (0, 1)
    assert engine.calls("/kv_event_sources") == 0


async def test_ranks_are_asked_for_again_after_an_outage(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """Whoever comes back at the address may be another process; while it is well, once is enough."""
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        seen = engine.calls("/health")
        await engine.wait_for_calls("/health", seen + 3)
        asked = engine.calls("/kv_event_sources")
        engine.answers["/kv_event_sources"] = (200, b'{"0": {}, "1": {}}')
        keeper.report(engine.id, False, "engine_unreachable")
        instance = await wait(keeper, is_available)

    assert asked == 1
    assert instance.ranks == (0, 1)


async def test_ranks_that_could_not_be_asked_for_are_asked_for_again(
    engine: Any, client: EngineClient, wait: Wait
) -> None:
    """One call that fails is no reason to know only one rank for good."""

    class Unlucky(BuggyProber):
        async def find_ranks(self, instance: InstanceId) -> Sequence[int]:
            if self.bugs:
                raise self.bugs.pop()
            return await super().find_ranks(instance)

        async def probe(self, instance: InstanceId) -> ProbeAnswer:
            return await self.client.probe(instance)

    engine.answers["/kv_event_sources"] = (200, b'{"0": {}, "1": {}}')
    prober = Unlucky(client)
    prober.bugs = [EngineCallError("connection_failed")]
    keeper = FleetKeeper((engine.settings(),), prober=prober, settings=FAST)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(keeper.run())
        instance = await wait(keeper, lambda each: len(each.ranks) == 2)
        running.cancel()

    assert instance.is_available


CACHE = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0'


async def test_cache_size_is_learned_per_rank(engine: Any, keeping: Keeping, wait: Wait) -> None:
    """The engine tells the sum over its ranks, once."""
    engine.answers["/metrics"] = (200, CACHE)
    async with keeping(engine.settings(ranks=2)) as keeper:
        instance = await wait(keeper, lambda each: each.rank_cache_tokens)
        seen = engine.calls("/health")
        await engine.wait_for_calls("/health", seen + 3)

    assert instance.rank_cache_tokens == 800
    assert engine.calls("/metrics") == 1


async def test_engine_that_does_not_tell_its_cache_size_is_asked_once(
    engine: Any, keeping: Keeping
) -> None:
    """It is as available as any."""
    engine.answers["/metrics"] = (404, b"")
    async with keeping(engine.settings()) as keeper:
        await engine.wait_for_calls("/metrics", 1)
        seen = engine.calls("/health")
        await engine.wait_for_calls("/health", seen + 3)
        instance = keeper.snapshot().instances[0]

    assert (instance.is_available, instance.rank_cache_tokens) == (True, None)
    assert engine.calls("/metrics") == 1


async def test_stalled_metrics_cost_no_health(engine: Any, keeping: Keeping) -> None:
    """And are given up after a few tries."""
    engine.stall.add("/metrics")
    settings = ProbeSettings(interval_s=0.02, timeout_s=0.1)
    async with keeping(engine.settings(), settings=settings) as keeper:
        await engine.wait_for_calls("/metrics", 3)
        seen = engine.calls("/health")
        await engine.wait_for_calls("/health", seen + 3)
        instance = keeper.snapshot().instances[0]

    assert (instance.is_available, instance.rank_cache_tokens) == (True, None)
    assert engine.calls("/metrics") == 3


async def test_cache_size_is_asked_for_again_after_an_outage(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """Whoever comes back may have another."""
    engine.answers["/metrics"] = (200, CACHE)
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, lambda each: each.rank_cache_tokens == 1600)
        engine.answers["/metrics"] = (200, CACHE.replace(b"100", b"50"))
        keeper.report(engine.id, False, "engine_unreachable")
        instance = await wait(keeper, lambda each: each.rank_cache_tokens == 800)

    assert instance.is_available


async def test_bug_in_asking_for_the_cache_size_stops_nothing(
    engine: Any, client: EngineClient, wait: Wait
) -> None:
    """It is counted, and asked again."""

    class Confused(BuggyProber):
        async def probe(self, instance: InstanceId) -> ProbeAnswer:
            return await self.client.probe(instance)

        async def find_cache_tokens(self, instance: InstanceId) -> int | None:
            if self.bugs:
                raise self.bugs.pop()
            return await super().find_cache_tokens(instance)

    engine.answers["/metrics"] = (200, CACHE)
    prober = Confused(client)
    prober.bugs = [KeyError("a bug")]
    keeper = FleetKeeper((engine.settings(),), prober=prober, settings=FAST)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(keeper.run())
        await wait(keeper, lambda each: each.rank_cache_tokens == 1600)
        running.cancel()

    assert keeper.bugs == 1


@pytest.mark.parametrize("key", ["bro\nken-key#", "ké-key#"], ids=["control", "not-ascii"])
async def test_key_that_cannot_be_sent_shows_in_no_reason(key: str, engine: Any) -> None:
    """What the client library says of it quotes the header."""
    instance = engine.settings().id
    async with EngineClient(api_keys={instance: key}, timeout_s=5) as client:
        answer = await client.probe(instance)

    assert answer == ProbeAnswer(outcome=ProbeOutcome.FAILED, reason="connection_failed")
