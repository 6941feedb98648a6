"""The fleet keeper over real HTTP: who is in the fleet, and who of them gets requests."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.settings.control import InstanceSettings, ProbeSettings
from balancer.fleet.keeper import FleetKeeper

Keeping = Callable[..., AbstractAsyncContextManager[FleetKeeper]]
Wait = Callable[[FleetKeeper, Callable[[Instance], object]], Awaitable[Instance]]


def is_available(instance: Instance) -> bool:
    return instance.is_available


async def test_instance_is_available_after_the_first_round(engine: Any, keeping: Keeping) -> None:
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


async def test_engine_that_is_down_at_start_is_found_later(
    engine_factory: Any, keeping: Keeping, wait: Wait
) -> None:
    """Nothing crashes, and it is used as soon as it is there."""
    async with engine_factory(health_status=500) as engine, keeping(engine.settings()) as keeper:
        down = await wait(keeper, lambda each: each.unhealthy_reason == "http_500")
        engine.health_status = 200
        up = await wait(keeper, is_available)

    assert not down.is_available
    assert up.healthy


async def test_slow_instance_delays_nobody(
    engine_factory: Any, keeping: Keeping, wait: Wait
) -> None:
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


async def test_engine_that_died_is_out_and_comes_back(
    engine_factory: Any, keeping: Keeping, wait: Wait
) -> None:
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
async def test_leg_that_found_nobody_counts_at_once(
    engine: Any, code: str, keeping: Keeping, wait: Wait
) -> None:
    """And the instance is looked at right away, not at the next interval."""
    settings = ProbeSettings(interval_s=60.0)
    async with keeping(engine.settings(), settings=settings) as keeper:
        await wait(keeper, is_available)
        keeper.report(engine.id, False, code)
        reported = keeper.snapshot().instances[0]
        back = await wait(keeper, is_available)

    assert reported.unhealthy_reason == code
    assert back.healthy


async def test_legs_that_break_off_are_not_a_matter_of_health(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """Probes may go well while every request fails: its breaker holds such an instance back."""
    settings = ProbeSettings(interval_s=60.0, unhealthy_after=1)
    async with keeping(engine.settings(), settings=settings) as keeper:
        await wait(keeper, is_available)
        keeper.report(engine.id, False, "engine_closed")
        keeper.report(engine.id, True, None)

        assert keeper.snapshot().instances[0].healthy


async def test_report_about_a_stranger_is_ignored(keeping: Keeping) -> None:
    """A leg may end after its instance was removed."""
    async with keeping() as keeper:
        keeper.report("http://nobody:1", False, "engine_unreachable")  # type: ignore[arg-type]

        assert keeper.snapshot() == Fleet()


async def test_draining_instance_gets_no_new_requests(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """503 on /health takes effect at once, and ends as it came."""
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        engine.health_status = 503
        draining = await wait(keeper, lambda each: each.draining)
        engine.health_status = 200
        await wait(keeper, is_available)

    assert draining.healthy
    assert not draining.is_available


async def test_sleeping_engine_gets_no_requests(engine: Any, keeping: Keeping, wait: Wait) -> None:
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
async def test_engine_that_cannot_sleep_is_asked_once(
    engine: Any, answer: Any, keeping: Keeping, wait: Wait
) -> None:
    """Outside development mode nobody answers that question."""
    engine.answers["/is_sleeping"] = answer
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        await engine.wait_for_calls("/health", 4)

    assert engine.calls("/is_sleeping") == 1


async def test_source_of_a_hand_over_that_failed_is_looked_at_at_once(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """It may be another process; its health is not doubted."""
    seldom = ProbeSettings(interval_s=60.0)
    async with keeping(engine.settings(), settings=seldom) as keeper:
        await wait(keeper, is_available)
        before = engine.calls("/health")
        keeper.report(engine.id, False, "hand_over_failed")
        await engine.wait_for_calls("/health", before + 1)

        assert keeper.snapshot().instances[0].is_available


async def test_engine_with_a_key_gets_it(engine_factory: Any, keeping: Keeping) -> None:
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


async def test_adapter_loaded_later_is_seen(engine: Any, keeping: Keeping, wait: Wait) -> None:
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
        pytest.param((200, b"[" * 100_000), id="nested"),
        pytest.param((200, b"[]"), id="no-object"),
        pytest.param((200, b'{"data": []}'), id="no-model"),
    ],
)
async def test_model_list_that_is_none_is_a_failed_probe(
    engine: Any, answer: tuple[int, bytes], keeping: Keeping, wait: Wait
) -> None:
    """Such an instance can't be routed to."""
    engine.answers["/v1/models"] = answer
    async with keeping(engine.settings()) as keeper:
        instance = await wait(keeper, lambda each: each.unhealthy_reason == "bad_model_list")

    assert not instance.is_available


async def test_other_model_at_the_same_address_replaces_the_old(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """An address may be reused."""
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        engine.model = "other"
        await wait(keeper, lambda each: each.models and each.models.base == "other")

        assert not keeper.snapshot().serving("tiny")


async def test_same_answer_makes_no_new_snapshot(engine: Any, keeping: Keeping, wait: Wait) -> None:
    """Cards hold the time of the call; that alone changes nothing."""
    changes: list[Fleet] = []
    async with keeping(engine.settings(), on_change=changes.append) as keeper:
        await wait(keeper, is_available)
        seen = engine.calls("/v1/models")
        created = b'{"data": [{"id": "tiny", "parent": null, "max_model_len": 2048, "created": 7}]}'
        engine.answers["/v1/models"] = (200, created)
        await engine.wait_for_calls("/v1/models", seen + 3)

    assert len(changes) == 1


async def test_members_can_be_replaced_at_run_time(engine_factory: Any, keeping: Keeping) -> None:
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


async def test_removed_instance_is_not_probed_any_more(
    engine: Any, keeping: Keeping, wait: Wait
) -> None:
    """Its task ends."""
    async with keeping(engine.settings()) as keeper:
        await wait(keeper, is_available)
        engine.stall.add("/health")
        seen = engine.calls("/health")
        await engine.wait_for_calls("/health", seen + 1)
        keeper.set_instances([])

        assert keeper.snapshot() == Fleet()
    assert engine.calls("/health") == seen + 1


async def test_broken_connection_is_a_failed_probe(keeping: Keeping, wait: Wait) -> None:
    """Whatever a peer does, a probe never raises."""

    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, keeping(InstanceSettings(url=url)) as keeper:
        instance = await wait(keeper, lambda each: each.unhealthy_reason == "connection_failed")

    assert not instance.healthy


async def test_what_is_known_of_the_others_isnt_made_anew_with_each_look(client: Any) -> None:
    """A fleet of hundreds is looked at hundreds of times a second."""
    entries = [InstanceSettings(url=f"http://10.0.0.1:{port}") for port in range(1, 100)]
    keeper = FleetKeeper(entries, prober=client, settings=ProbeSettings())
    before = keeper.snapshot().instances

    keeper.set_instances(entries, holds={entries[0].id: "drained"})
    after = keeper.snapshot().instances

    assert after[0].hold == "drained"
    assert all(now is then for now, then in zip(after[1:], before[1:], strict=True))
