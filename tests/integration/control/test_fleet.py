"""The fleet keeper over real HTTP: what probes and legs make of instances."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from balancer.connectors.mooncake import read_engine_ids
from balancer.core.control_errors import EngineCallError
from balancer.core.fleet.probe_state import ProbeAnswer, ProbeOutcome
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.fleet.transfer_facts import Inquiry, TransferFacts
from balancer.core.settings.control import InstanceSettings, ProbeSettings
from balancer.fleet.engine_client import EngineClient
from balancer.fleet.keeper import FleetKeeper
from indexer.core.types import InstanceId

FAST = ProbeSettings(interval_s=0.02, timeout_s=5.0, unhealthy_after=2)


@asynccontextmanager
async def keeping(
    *instances: InstanceSettings,
    settings: ProbeSettings = FAST,
    keys: dict[Any, str] | None = None,
    inquiry: Callable[[Instance], Inquiry | None] = lambda _: None,
    on_change: Callable[[Fleet], None] | None = None,
) -> AsyncIterator[FleetKeeper]:
    """A keeper that probes while the block runs."""
    async with EngineClient(api_keys=keys or {}, timeout_s=5.0) as client:
        keeper = FleetKeeper(
            instances, prober=client, settings=settings, inquiry=inquiry, on_change=on_change
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(keeper.run())
            yield keeper
            running.cancel()


async def wait(keeper: FleetKeeper, condition: Callable[[Instance], object]) -> Instance:
    """Wait until the first instance fulfils `condition`."""
    async with asyncio.timeout(20):
        fleet = await keeper.wait_for(
            lambda fleet: bool(fleet.instances) and bool(condition(fleet.instances[0]))
        )
    return fleet.instances[0]


def is_available(instance: Instance) -> bool:
    return instance.is_available


async def test_instance_is_available_after_the_first_round(engine: Any) -> None:
    """Models, aliases and adapters come from the engine."""
    engine.adapters = ("ad",)
    async with keeping(engine.settings(alias="one")) as keeper:
        assert not keeper.snapshot().instances[0].is_available
        async with asyncio.timeout(20):
            await keeper.first_round()
        (instance,) = keeper.snapshot().instances

    assert instance.is_available
    assert instance.alias == "one"
    assert instance.unhealthy_reason is None
    assert instance.models is not None
    assert instance.models.adapters == {"ad"}


async def test_engine_that_is_down_at_start_is_found_later(engine_factory: Any) -> None:
    """Nothing crashes, and it is used as soon as it is there."""
    async with engine_factory(health_status=500) as engine, keeping(engine.settings()) as keeper:
        down = await wait(keeper, lambda each: each.unhealthy_reason == "http_500")
        engine.health_status = 200
        up = await wait(keeper, is_available)

    assert not down.is_available
    assert up.healthy


async def test_slow_instance_delays_nobody(engine_factory: Any) -> None:
    """Each has a task of its own."""
    async with engine_factory() as slow, engine_factory() as quick:
        slow.stall.add("/health")
        settings = ProbeSettings(interval_s=0.02, timeout_s=1.5)
        async with keeping(slow.settings(), quick.settings(), settings=settings) as keeper:
            async with asyncio.timeout(20):
                await keeper.wait_for(lambda fleet: fleet.instances[1].is_available)
            assert keeper.snapshot().instances[0].unhealthy_reason == "not_probed"
            timed_out = await wait(keeper, lambda each: each.unhealthy_reason == "probe_timeout")

    assert not timed_out.is_available


async def test_engine_that_died_is_out_and_comes_back(engine_factory: Any) -> None:
    """A refused connection is believed at once; nothing is banned for good."""
    async with engine_factory() as other, keeping() as keeper:
        async with engine_factory() as engine:
            keeper.set_instances([engine.settings()])
            await wait(keeper, is_available)
        gone = await wait(keeper, lambda each: not each.healthy)
        keeper.set_instances([other.settings()])
        back = await wait(keeper, is_available)

    assert gone.unhealthy_reason == "engine_unreachable"
    assert gone.models is not None, "what it served tells 503 from 404"
    assert back.id == other.id


@pytest.mark.parametrize("code", ["engine_unreachable", "connect_timeout"])
async def test_leg_that_found_nobody_counts_at_once(engine: Any, code: str) -> None:
    """And the instance is looked at right away, not at the next interval."""
    settings = ProbeSettings(interval_s=60.0)
    async with keeping(engine.settings(), settings=settings) as keeper:
        await wait(keeper, is_available)
        keeper.report(engine.id, False, code)
        reported = keeper.snapshot().instances[0]
        back = await wait(keeper, is_available)

    assert reported.unhealthy_reason == code
    assert back.healthy


async def test_legs_that_break_off_are_not_a_matter_of_health(engine: Any) -> None:
    """Probes may go well while every request fails: its breaker holds such an instance back."""
    settings = ProbeSettings(interval_s=60.0, unhealthy_after=1)
    async with keeping(engine.settings(), settings=settings) as keeper:
        await wait(keeper, is_available)
        keeper.report(engine.id, False, "engine_closed")
        keeper.report(engine.id, True, None)

        assert keeper.snapshot().instances[0].healthy


async def test_report_about_a_stranger_is_ignored() -> None:
    """A leg may end after its instance was removed."""
    async with keeping() as keeper:
        keeper.report("http://nobody:1", False, "engine_unreachable")  # type: ignore[arg-type]

        assert keeper.snapshot() == Fleet()


async def test_draining_instance_gets_no_new_requests(engine: Any) -> None:
    """503 on /health takes effect at once, and ends as it came."""
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        engine.health_status = 503
        draining = await wait(keeper, lambda each: each.draining)
        engine.health_status = 200
        await wait(keeper, is_available)

    assert draining.healthy
    assert not draining.is_available


async def test_sleeping_engine_gets_no_requests(engine: Any) -> None:
    """F03: at once, though it is healthy otherwise; and again as soon as it wakes."""
    engine.answers["/is_sleeping"] = (200, b'{"is_sleeping": false}')
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        engine.answers["/is_sleeping"] = (200, b'{"is_sleeping": true}')
        asleep = await wait(keeper, lambda each: not each.is_available)
        engine.answers["/is_sleeping"] = (200, b'{"is_sleeping": false}')
        awake = await wait(keeper, is_available)

    assert asleep.unhealthy_reason == "sleeping"
    assert asleep.models is not None
    assert awake.unhealthy_reason is None


@pytest.mark.parametrize(
    "answer", [(404, b"{}"), (200, b"no json"), (200, b"{}")], ids=["absent", "odd", "empty"]
)
async def test_engine_that_cannot_sleep_is_asked_once(engine: Any, answer: Any) -> None:
    """Outside development mode nobody answers that question."""
    engine.answers["/is_sleeping"] = answer
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        await engine.wait_for_calls("/health", 4)

    assert engine.calls("/is_sleeping") == 1


async def test_source_of_a_hand_over_that_failed_is_looked_at_at_once(engine: Any) -> None:
    """It may be another process; its health is not doubted."""
    seldom = ProbeSettings(interval_s=60.0)
    async with keeping(engine.settings(), settings=seldom) as keeper:
        await wait(keeper, is_available)
        before = engine.calls("/health")
        keeper.report(engine.id, False, "hand_over_failed")
        await engine.wait_for_calls("/health", before + 1)

        assert keeper.snapshot().instances[0].is_available


async def test_engine_with_a_key_gets_it(engine_factory: Any) -> None:
    """Each instance its own; a wrong one is shown, others work."""
    async with engine_factory(api_key="k1") as right, engine_factory(api_key="k2") as wrong:
        keys = {right.id: "k1", wrong.id: "nope"}
        async with keeping(right.settings(), wrong.settings(), keys=keys) as keeper:
            async with asyncio.timeout(20):
                fleet = await keeper.wait_for(
                    lambda fleet: (
                        fleet.instances[0].is_available
                        and fleet.instances[1].unhealthy_reason == "unauthorized"
                    )
                )

    assert not fleet.instances[1].is_available


async def test_adapter_loaded_later_is_seen(engine: Any) -> None:
    """Within the interval, and gone again when it was unloaded."""
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        engine.adapters = ("new",)
        await wait(keeper, lambda each: each.models and "new" in each.models.adapters)
        engine.adapters = ()
        await wait(keeper, lambda each: each.models and not each.models.adapters)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((200, b"{"), id="no-json"),
        pytest.param((200, b"[]"), id="no-object"),
        pytest.param((200, b'{"data": []}'), id="no-model"),
    ],
)
async def test_model_list_that_is_none_is_a_failed_probe(
    engine: Any, answer: tuple[int, bytes]
) -> None:
    """Such an instance can't be routed to."""
    engine.answers["/v1/models"] = answer
    async with keeping(engine.settings()) as keeper:
        instance = await wait(keeper, lambda each: each.unhealthy_reason == "bad_model_list")

    assert not instance.is_available


async def test_other_model_at_the_same_address_replaces_the_old(engine: Any) -> None:
    """An address may be reused."""
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        engine.model = "other"
        await wait(keeper, lambda each: each.models and each.models.base == "other")

        assert not keeper.snapshot().serving("tiny")


async def test_same_answer_makes_no_new_snapshot(engine: Any) -> None:
    """Cards hold the time of the call; that alone changes nothing."""
    changes: list[Fleet] = []
    async with keeping(engine.settings(), on_change=changes.append) as keeper:
        await wait(keeper, is_available)
        seen = engine.calls("/v1/models")
        created = b'{"data": [{"id": "tiny", "parent": null, "max_model_len": 2048, "created": 7}]}'
        engine.answers["/v1/models"] = (200, created)
        await engine.wait_for_calls("/v1/models", seen + 3)

    assert len(changes) == 1


async def test_members_can_be_replaced_at_run_time(engine_factory: Any) -> None:
    """Those that stay keep what is known of them; settings that change are taken over."""
    async with engine_factory() as one, engine_factory() as two, keeping() as keeper:
        keeper.set_instances([one.settings(), two.settings()])
        async with asyncio.timeout(20):
            await keeper.wait_for(
                lambda fleet: len(fleet.instances) == 2 and all(map(is_available, fleet.instances))
            )
        keeper.set_instances([one.settings(), two.settings(enabled=False)])
        first, second = keeper.snapshot().instances
        assert first.is_available
        assert not second.enabled

        async with asyncio.timeout(20):
            await keeper.wait_for(lambda fleet: fleet.instances[1].healthy)
        assert not keeper.snapshot().instances[1].is_available


async def test_removed_instance_is_not_probed_any_more(engine: Any) -> None:
    """Its task ends."""
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        engine.stall.add("/health")
        seen = engine.calls("/health")
        await engine.wait_for_calls("/health", seen + 1)
        keeper.set_instances([])

        assert keeper.snapshot() == Fleet()
    assert engine.calls("/health") == seen + 1


async def test_broken_connection_is_a_failed_probe() -> None:
    """Whatever a peer does, a probe never raises."""

    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, keeping(InstanceSettings(url=url)) as keeper:
        instance = await wait(keeper, lambda each: each.unhealthy_reason == "connection_failed")

    assert not instance.healthy


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


async def test_what_a_connector_has_to_know_is_asked_with_every_probe(engine: Any) -> None:
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
    engine: Any, answer: tuple[int, bytes]
) -> None:
    """It could not hand over; the reason is shown, and yesterday's ids are forgotten."""
    engine.answers["/query"] = (200, QUERY % 1)
    async with keeping(engine.settings(), inquiry=asking(engine)) as keeper:
        await wait(keeper, is_available)
        engine.answers["/query"] = answer
        lost = await wait(keeper, lambda each: not each.healthy)

    assert lost.unhealthy_reason == "transfer_unknown"
    assert lost.facts == TransferFacts()


async def test_an_instance_whose_other_port_is_closed_gets_no_requests(engine: Any) -> None:
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


async def test_bug_of_a_listener_does_not_reach_the_leg(engine: Any) -> None:
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
    engine: Any, answer: Any, ranks: tuple[int, ...], base: int
) -> None:
    """Else one, from the configured number on."""
    engine.answers["/kv_event_sources"] = answer
    async with keeping(engine.settings(rank_base=4)) as keeper:
        instance = await wait(keeper, is_available)

    assert (instance.ranks, instance.rank_base) == (ranks, base)


async def test_configured_ranks_are_not_asked_for(engine: Any) -> None:
    """The operator knows better."""
    engine.answers["/kv_event_sources"] = (200, b'{"0": {}}')
    async with keeping(engine.settings(ranks=2)) as keeper:
        instance = await wait(keeper, is_available)

    assert instance.ranks == (0, 1)
    assert engine.calls("/kv_event_sources") == 0


async def test_ranks_are_asked_for_again_after_an_outage(engine: Any) -> None:
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
    engine: Any, client: EngineClient
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


async def test_cache_size_is_learned_per_rank(engine: Any) -> None:
    """The engine tells the sum over its ranks, once."""
    engine.answers["/metrics"] = (200, CACHE)
    async with keeping(engine.settings(ranks=2)) as keeper:
        instance = await wait(keeper, lambda each: each.rank_cache_tokens)
        seen = engine.calls("/health")
        await engine.wait_for_calls("/health", seen + 3)

    assert instance.rank_cache_tokens == 800
    assert engine.calls("/metrics") == 1


async def test_engine_that_does_not_tell_its_cache_size_is_asked_once(engine: Any) -> None:
    """It is as available as any."""
    engine.answers["/metrics"] = (404, b"")
    async with keeping(engine.settings()) as keeper:
        await engine.wait_for_calls("/metrics", 1)
        seen = engine.calls("/health")
        await engine.wait_for_calls("/health", seen + 3)
        instance = keeper.snapshot().instances[0]

    assert (instance.is_available, instance.rank_cache_tokens) == (True, None)
    assert engine.calls("/metrics") == 1


async def test_stalled_metrics_cost_no_health(engine: Any) -> None:
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


async def test_cache_size_is_asked_for_again_after_an_outage(engine: Any) -> None:
    """Whoever comes back may have another."""
    engine.answers["/metrics"] = (200, CACHE)
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, lambda each: each.rank_cache_tokens == 1600)
        engine.answers["/metrics"] = (200, CACHE.replace(b"100", b"50"))
        keeper.report(engine.id, False, "engine_unreachable")
        instance = await wait(keeper, lambda each: each.rank_cache_tokens == 800)

    assert instance.is_available


async def test_bug_in_asking_for_the_cache_size_stops_nothing(
    engine: Any, client: EngineClient
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


async def test_what_is_known_of_the_others_isnt_made_anew_with_each_look(client: Any) -> None:
    """A fleet of hundreds is looked at hundreds of times a second."""
    entries = [InstanceSettings(url=f"http://10.0.0.1:{port}") for port in range(1, 100)]
    keeper = FleetKeeper(entries, prober=client, settings=ProbeSettings())
    before = keeper.snapshot().instances

    keeper.set_instances(entries, holds={entries[0].id: "drained"})
    after = keeper.snapshot().instances

    assert after[0].hold == "drained"
    assert all(now is then for now, then in zip(after[1:], before[1:], strict=True))
