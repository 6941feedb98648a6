"""A running balancer takes over other settings: nothing that runs, or could be routed, is lost."""

import asyncio
from typing import Any

from balancer.asgi import App
from balancer.config import BalancerConfig, changed_keys, check_config, reloaded
from balancer.core.settings.errors import decode_settings

IDS = {"model": "tiny", "prompt": [1, 2, 3]}
ELSEWHERE = {"x-forwarded-for": "203.0.113.1"}


def configure(**data: Any) -> BalancerConfig:
    settings = {"probes": {"interval_s": 0.05}, "drain_s": 2, **data}
    return check_config(decode_settings(settings, BalancerConfig, where=""), {})


async def all_available(app: App, count: int) -> None:
    async with asyncio.timeout(20):
        await app.keeper.wait_for(
            lambda fleet: (
                len(fleet.instances) == count and all(x.is_available for x in fleet.instances)
            )
        )


async def test_new_instance_gets_its_own_key(engine_factory: Any, balancer_factory: Any) -> None:
    """Probes and requests alike use the key that came with the new settings."""
    async with (
        engine_factory() as old,
        engine_factory(api_key="k2") as new,
        balancer_factory({"instances": [{"url": old.url}]}) as balancer,
    ):
        await balancer.available()
        balancer.app.reconfigure(configure(instances=[{"url": new.url, "api_key": "k2"}]))
        await all_available(balancer.app, 1)
        answer = await balancer.http.post("/v1/completions", json=IDS)

    assert answer.status_code == 200
    assert new.calls("/v1/completions") == 1


async def test_key_of_all_engines_can_change(engine_factory: Any, balancer_factory: Any) -> None:
    """An instance that stays is asked with the new one."""
    async with engine_factory(api_key="k1") as engine:
        config = {"instances": [{"url": engine.url}], "engine_api_key": "k1"}
        async with balancer_factory(config) as balancer:
            await balancer.available()
            engine.api_key = "k2"
            balancer.app.reconfigure(
                configure(instances=[{"url": engine.url}], engine_api_key="k2")
            )
            answer = await balancer.http.post("/v1/completions", json=IDS)

    assert answer.status_code == 200


async def test_instance_that_stays_never_stops_being_available(
    engine: Any, engine_factory: Any, balancer_factory: Any
) -> None:
    """Other settings, another alias: it is the same instance."""
    async with (
        engine_factory() as other,
        balancer_factory({"instances": [{"url": engine.url}]}) as balancer,
    ):
        await balancer.available()
        balancer.app.reconfigure(
            configure(instances=[{"url": other.url}, {"url": engine.url, "alias": "renamed"}])
        )
        first, second = balancer.app.keeper.snapshot().instances
        answer = await balancer.http.post("/v1/completions", json=IDS)

    assert not first.is_available
    assert second.is_available
    assert second.alias == "renamed"
    assert answer.headers["x-kvlb-instance"] == "renamed"


async def test_other_ranks_are_another_instance(engine: Any, balancer_factory: Any) -> None:
    """It gets nothing until its ranks are known again."""
    async with balancer_factory({"instances": [{"url": engine.url}]}) as balancer:
        await balancer.available()
        balancer.app.reconfigure(configure(instances=[{"url": engine.url, "ranks": 2}]))
        (at_once,) = balancer.app.keeper.snapshot().instances
        await all_available(balancer.app, 1)
        (later,) = balancer.app.keeper.snapshot().instances

    assert not at_once.is_available
    assert later.ranks == (0, 1)


async def test_disabled_instance_finishes_what_runs(engine: Any, balancer_factory: Any) -> None:
    """It gets nothing new."""
    engine.hold = asyncio.Event()
    async with balancer_factory({"instances": [{"url": engine.url}]}) as balancer:
        await balancer.available()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(balancer.http.post("/v1/completions", json=IDS))
            await engine.wait_for_calls("/v1/completions", 1)
            balancer.app.reconfigure(configure(instances=[{"url": engine.url, "enabled": False}]))
            refused = await balancer.http.post("/v1/completions", json=IDS)
            engine.hold.set()

    assert running.result().status_code == 200
    assert refused.status_code == 503


async def test_removed_instance_finishes_what_runs(
    engine: Any, engine_factory: Any, balancer_factory: Any
) -> None:
    """Its answers are delivered; it is out of the fleet once they are."""
    engine.hold = asyncio.Event()
    async with (
        engine_factory() as other,
        balancer_factory({"instances": [{"url": engine.url}]}) as balancer,
    ):
        await balancer.available()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(balancer.http.post("/v1/completions", json=IDS))
            await engine.wait_for_calls("/v1/completions", 1)
            balancer.app.reconfigure(configure(instances=[{"url": other.url}]))
            stay, leaving = balancer.app.keeper.snapshot().instances
            engine.hold.set()
        await all_available(balancer.app, 1)

    assert running.result().status_code == 200
    assert (stay.id, stay.hold) == (other.id, None)
    assert (leaving.id, leaving.hold) == (engine.id, "leaving")


async def test_routing_and_pd_are_used_from_the_next_request_on(
    engine: Any, balancer_factory: Any
) -> None:
    """What `/status` shows is what is used."""
    instances = [{"url": engine.url}]
    config = {"instances": instances, "admission": {"max_waiting": 0}}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        balancer.app.reconfigure(
            configure(
                instances=instances,
                routing={"max_requests_per_rank": 1},
                pd={"local_prefill_max_tokens": 7},
            )
        )
        engine.hold = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(balancer.http.post("/v1/completions", json=IDS))
            await engine.wait_for_calls("/v1/completions", 1)
            full = await balancer.http.post("/v1/completions", json=IDS)
            engine.hold.set()
        shown = (await balancer.http.get("/status")).json()["config"]

    assert running.result().status_code == 200
    assert full.status_code == 503
    assert shown["routing"]["max_requests_per_rank"] == 1
    assert shown["pd"]["local_prefill_max_tokens"] == 7


async def test_policy_goes_on_where_it_was(engine: Any, balancer_factory: Any) -> None:
    """A reload of something else must not start its turn anew; another name is another policy."""
    instances = [{"url": engine.url}]
    round_robin = {"policy": "round_robin"}
    config = {"instances": instances, "routing": round_robin}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        balancer.app.reconfigure(configure(instances=instances, routing={"policy": "session"}))
        answer = await balancer.http.post("/v1/completions", json=IDS)
        shown = (await balancer.http.get("/status")).json()["config"]

    assert answer.status_code == 200
    assert shown["routing"]["policy"] == "session"


async def test_admin_key_is_the_new_one(engine: Any, balancer_factory: Any) -> None:
    """The old one opens nothing any more."""
    config = {"instances": [{"url": engine.url}], "admin": {"api_key": "old"}}
    async with balancer_factory(config) as balancer:
        balancer.app.reconfigure(
            configure(instances=[{"url": engine.url}], admin={"api_key": "new"})
        )
        old = await balancer.http.get("/status", headers={**ELSEWHERE, "x-api-key": "old"})
        new = await balancer.http.get("/status", headers={**ELSEWHERE, "x-api-key": "new"})

    assert (old.status_code, new.status_code) == (401, 200)


def test_what_cannot_change_stays() -> None:
    """Sockets, limits and books have their size from the start."""
    running = configure(port=1, dataplane={"retries": 1}, routing={"max_predicted_blocks": 5})
    wanted = configure(
        port=2, dataplane={"retries": 2}, routing={"max_predicted_blocks": 6, "policy": "session"}
    )

    now = reloaded(running, wanted)

    assert changed_keys(running, now) == ["routing.policy"]
    assert sorted(changed_keys(now, wanted)) == [
        "dataplane.retries",
        "port",
        "routing.max_predicted_blocks",
    ]


def test_equal_settings_have_no_changed_keys() -> None:
    """Secrets are compared by their value."""
    assert changed_keys(configure(engine_api_key="a"), configure(engine_api_key="a")) == []
    assert changed_keys(configure(engine_api_key="a"), configure(engine_api_key="b")) == [
        "engine_api_key"
    ]


async def test_moved_instance_is_asked_for_everything_anew(
    engine: Any, balancer_factory: Any
) -> None:
    """Its ranks too, over new connections; requests go on meanwhile."""
    config = {"instances": [{"url": engine.url}], "probes": {"interval_s": 3600}}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        answers = []
        for asked in (2, 3):
            await balancer.app.control.connect_anew([engine.id])
            await engine.wait_for_calls("/kv_event_sources", asked)
            answers.append(await balancer.http.post("/v1/completions", json=IDS))

    assert [each.status_code for each in answers] == [200, 200]
