"""What operators see of instances that are held back."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.reliability.breaker import Phase
from balancer.core.settings.reliability import ReliabilitySettings
from balancer.dataplane.reliability import Reliability
from balancer.sharing import Company
from indexer.core.types import InstanceId

COMPLETIONS = "/v1/completions"
EMPTY_ANSWER = (200, b"")
"""What a broken engine sends."""


async def ask_some(balancer: Any) -> set[int]:
    body = {"model": "tiny", "prompt": [1, 2, 3]}
    answers = [await balancer.http.post(COMPLETIONS, json=body) for _ in range(12)]
    return {each.status_code for each in answers}


async def breaker_of(balancer: Any, alias: str) -> dict[str, Any]:
    status = (await balancer.http.get("/status")).json()
    shown: dict[str, Any] = next(
        each["breaker"] for each in status["instances"] if each["alias"] == alias
    )
    return shown


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.02)


async def test_held_back_instance_is_shown_everywhere(
    engine_factory: Any, balancer_factory: Any
) -> None:
    """In /status, /explain, the last decisions and /metrics; a restart of it clears its name."""
    async with engine_factory() as bad, engine_factory() as good:
        bad.answers[COMPLETIONS] = EMPTY_ANSWER
        config = {
            "instances": [{"url": bad.url, "alias": "bad"}, {"url": good.url, "alias": "good"}],
            "routing": {"policy": "round_robin"},
            "reliability": {"cool_down_s": 60.0},
        }
        async with balancer_factory(config) as balancer:
            await balancer.available(2)
            statuses = await ask_some(balancer)
            shown = {name: await breaker_of(balancer, name) for name in ("bad", "good")}
            explained = await balancer.http.post(
                "/explain?path=" + COMPLETIONS, json={"model": "tiny", "prompt": [1, 2, 3]}
            )
            recent = (await balancer.http.get("/explain/recent?limit=12")).json()["decisions"]
            metrics = (await balancer.http.get("/metrics")).text

            bad.health_status = 500
            await until(lambda: is_out(balancer, bad))
            bad.health_status = 200
            await balancer.available(2)
            after = await breaker_of(balancer, "bad")

    assert statuses == {200}
    assert shown["good"] == {"state": "closed", "reason": None, "trial_in_s": None}
    assert (shown["bad"]["state"], shown["bad"]["reason"]) == ("open", "engine_closed")
    assert 0 < shown["bad"]["trial_in_s"] <= 60
    assert explained.json()["held_back"] == {"bad": "engine_closed"}
    assert recent[0]["held_back"] == {"bad": "engine_closed"}
    assert sum(each["retries"] for each in recent) == 3
    for line in (
        'kvlb_instance_breaker{instance="bad",state="open"} 1.0',
        'kvlb_instance_breaker{instance="bad",state="closed"} 0.0',
        'kvlb_instance_breaker{instance="good",state="closed"} 1.0',
        'kvlb_breaker_openings_total{instance="bad",reason="engine_closed"} 1.0',
        'kvlb_retries_total{outcome="made"} 3.0',
        'kvlb_retries_total{outcome="refused"} 0.0',
    ):
        assert line in metrics
    assert after["state"] == "closed"


async def is_out(balancer: Any, engine: Any) -> bool:
    found = balancer.app.keeper.snapshot().by_id(engine.id)
    return found is not None and not found.healthy


def fleet_of(*instances: Instance) -> Fleet:
    return Fleet(instances=instances)


E = Instance(id=InstanceId("http://e:1"), alias="e", healthy=True)


@pytest.mark.parametrize(
    ("ok", "reason", "phase"),
    [
        pytest.param(False, "stream_cut", Phase.OPEN, id="opened"),
        pytest.param(False, "slow", Phase.OPEN, id="slow"),
        pytest.param(False, "engine_unreachable", Phase.CLOSED, id="a-matter-of-health"),
        pytest.param(True, None, Phase.CLOSED, id="closed"),
    ],
)
def test_word_of_another_process(ok: bool, reason: str | None, phase: Phase) -> None:
    """Its breakers are ours; what its probes see ours see, too. It isn't told what it told."""
    told: list[object] = []
    ours = Reliability(
        ReliabilitySettings(),
        fleet=lambda: fleet_of(E),
        clock=lambda: 0.0,
        on_change=lambda *change: told.append(change),
    )
    ours.told(E.id, ok, reason)
    ours.told(InstanceId("http://stranger:1"), ok, reason)

    assert ours.standings.breaker(E.id).phase(0.0) is phase
    assert ours.standings.breakers().keys() <= {E.id}
    assert told == []


async def test_comparison_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a while, until it is cancelled."""
    monkeypatch.setattr("balancer.dataplane.reliability.JUDGE_INTERVAL_S", 0.001)
    looked = asyncio.Event()

    def fleet() -> Fleet:
        looked.set()
        return fleet_of(E)

    reliability = Reliability(ReliabilitySettings(), fleet=fleet, clock=lambda: 0.0)
    looked.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(reliability.run())
        async with asyncio.timeout(20):
            await looked.wait()
        task.cancel()


def test_series_of_those_who_left_go_with_them() -> None:
    """Metrics are bounded by the present fleet (F58)."""
    fleet = fleet_of(E)
    registry = CollectorRegistry()
    reliability = Reliability(ReliabilitySettings(), fleet=lambda: fleet, clock=lambda: 0.0)
    registry.register(reliability)
    reliability.told(E.id, False, "stream_cut")

    def series() -> list[str]:
        return [
            sample.name
            for metric in registry.collect()
            for sample in metric.samples
            if "instance" in sample.labels
        ]

    before = series()
    fleet = fleet_of()
    after_leaving = series()
    reliability.on_fleet(fleet)

    assert len(before) == 4
    assert after_leaving == []
    assert reliability.standings.openings == {}


class Wire:
    """One end of a channel between two processes; the other end is another one."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue(1000)
        self.other: Wire = self

    async def send(self, messages: Sequence[bytes]) -> None:
        for each in messages:
            await self.other._arrived.put(each)

    async def receive(self, on_message: Callable[[bytes], None]) -> None:
        while True:
            on_message(await self._arrived.get())


async def test_what_one_process_learns_all_know(engine_factory: Any, balancer_factory: Any) -> None:
    """Held back by one is held back by the other, without a failure of its own."""
    here, there = Wire(), Wire()
    here.other, there.other = there, here
    async with engine_factory() as bad, engine_factory() as good:
        bad.answers[COMPLETIONS] = EMPTY_ANSWER
        config = {
            "instances": [{"url": bad.url, "alias": "bad"}, {"url": good.url, "alias": "good"}],
            "routing": {"policy": "round_robin"},
            "reliability": {"cool_down_s": 60.0},
        }
        async with (
            balancer_factory(config, company=Company(channel=here)) as first,
            balancer_factory(config, company=Company(channel=there)) as second,
        ):
            await first.available(2)
            await second.available(2)
            await ask_some(first)
            asked = bad.calls(COMPLETIONS)
            await until(lambda: is_held_back(second, "bad"))
            statuses = await ask_some(second)

            assert statuses == {200}
            assert bad.calls(COMPLETIONS) == asked


async def is_held_back(balancer: Any, alias: str) -> bool:
    return bool((await breaker_of(balancer, alias))["state"] == "open")
