"""Instances that pass their probes and fail their requests, and how often anything is repeated."""

import asyncio
from typing import Any

import httpx
import pytest

from balancer.core.decision_log import render_record
from balancer.core.fleet.snapshot import Role
from balancer.core.reliability.breaker import Phase
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.core.settings.reliability import ReliabilitySettings
from balancer.core.settings.routing import PdSettings

COMPLETIONS = "/v1/completions"
EVENTS = (b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n")


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Turncoat:
    """An engine that breaks every request off, until it is well."""

    def __init__(self) -> None:
        self.is_well = False
        self.patience = asyncio.Event()
        """Unset: it takes its time to break off."""
        self.patience.set()

    async def __call__(self, received: Any, wire: Any) -> None:
        if self.is_well:
            await answer_ok(received, wire)
        else:
            await self.patience.wait()
            wire.close()


async def answer_ok(received: Any, wire: Any) -> None:
    if received.json.get("stream"):
        await wire.events(*EVENTS)
    elif "do_remote_decode" in str(received.json.get("kv_transfer_params")):
        await wire.json({"kv_transfer_params": {"do_remote_prefill": True}})
    else:
        await wire.json({"choices": [{"text": "a"}]})


async def break_off(received: Any, wire: Any) -> None:
    wire.close()


async def refuse(received: Any, wire: Any) -> None:
    await wire.json({"error": {"message": "no"}}, 500)


async def ask(client: httpx.AsyncClient, proxy: Any, number: int = 0, **fields: Any) -> Any:
    first = number * 1000
    body = {"model": "m", "prompt": list(range(first, first + 1000))} | fields
    return await client.post(proxy.url + COMPLETIONS, json=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_breaks_requests_off_is_held_back_and_tried_again(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, stream: bool
) -> None:
    """Three failures, nothing for five seconds, one trial, and it is back (F38)."""
    clock, bad = Clock(), Turncoat()
    async with (
        engine(bad) as one,
        engine(answer_ok) as other,
        balancer(instance(one, "e0"), instance(other, "e1"), clock=clock) as proxy,
    ):
        statuses = [
            (await ask(client, proxy, each, stream=stream)).status_code for each in range(20)
        ]
        asked = len(one.received)
        record = (await proxy.wait_for_records(20))[-1]
        held = proxy.reliability.render(one.url)
        bad.is_well = True
        clock.now_s += 5.0
        more = [
            (await ask(client, proxy, 20 + each, stream=stream)).status_code for each in range(10)
        ]

        assert statuses + more == [200] * 30
        assert asked == 3
        assert held == {"state": "open", "reason": "engine_closed", "trial_in_s": 5.0}
        assert render_record(record)["held_back"] == {"e0": "engine_closed"}
        assert len(one.received) == asked + 5
        assert proxy.reliability.render(one.url)["state"] == "closed"


async def test_one_trial_at_a_time(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """A crowd doesn't run into an engine that may still be dead."""
    clock, bad = Clock(), Turncoat()
    async with (
        engine(bad) as one,
        engine(answer_ok) as other,
        balancer(instance(one, "e0"), instance(other, "e1"), clock=clock) as proxy,
    ):
        for each in range(10):
            await ask(client, proxy, each)
        before, all_before = len(one.received), len(one.received) + len(other.received)
        clock.now_s += 5.0
        bad.patience.clear()
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for each in range(20):
                group.create_task(ask(client, proxy, 10 + each))
            while len(one.received) + len(other.received) < all_before + 20:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            bad.patience.set()

        assert len(one.received) == before + 1
        assert proxy.reliability.standings.breaker(one.url).phase(clock()) is Phase.OPEN


async def test_if_all_break_off_all_are_asked(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Their error reaches the client; the first that is well again serves it."""
    bad = Turncoat()
    async with (
        engine(bad) as one,
        engine(break_off) as other,
        balancer(instance(one, "e0"), instance(other, "e1"), clock=Clock()) as proxy,
    ):
        broken = [(await ask(client, proxy, each)).status_code for each in range(10)]
        assert all(proxy.reliability.standings.breaker(each.url).is_open for each in (one, other))
        bad.is_well = True
        well = [(await ask(client, proxy, 10 + each)).status_code for each in range(5)]

        assert broken == [502] * 10
        assert well == [200] * 5


async def test_dying_fleet_is_not_asked_twice(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Retries are a share of the requests, whatever each request may have."""
    clock = Clock()
    settings = {
        "settings": DataPlaneSettings(retries=3),
        "reliability": ReliabilitySettings(retry_share=0.1, least_retries=2),
    }
    async with (
        engine(break_off) as one,
        engine(break_off) as other,
        engine(break_off) as third,
        balancer(
            *(instance(each, f"e{n}") for n, each in enumerate((one, other, third))),
            clock=clock,
            **settings,
        ) as proxy,
    ):
        for each in range(40):
            assert (await ask(client, proxy, each)).status_code == 502
        records = await proxy.wait_for_records(40)

        asked = sum(len(each.received) for each in (one, other, third))
        assert asked == 40 + 6
        assert sum(record.retries for record in records) == 6
        assert {record.retries_refused for record in records} == {1}
        assert (proxy.reliability.budget.made, proxy.reliability.budget.refused) == (6, 40)


async def test_answer_tells_of_retries(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Only where there were any."""
    async with (
        engine(break_off) as one,
        engine(answer_ok) as other,
        balancer(instance(one, "e0"), instance(other, "e1")) as proxy,
    ):
        answers = [await ask(client, proxy, each) for each in range(6)]

    told = {each.headers.get("x-kvlb-retries") for each in answers}
    assert told == {None, "1"}


async def test_own_error_tells_of_retries(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """As engines' errors do that are passed on. Each of two was asked once: one retry."""
    async with engine(break_off) as one, engine(break_off) as other:
        fleet = instance(one, "e0"), instance(other, "e1")
        async with balancer(*fleet) as proxy:
            answer = await ask(client, proxy, 0)

    assert (answer.status_code, answer.headers["x-kvlb-retries"]) == (502, "1")


async def test_forwarded_calls_spare_who_is_held_back(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """And count like the others."""
    async with (
        engine(break_off) as one,
        engine(answer_ok) as other,
        balancer(instance(one, "e0"), instance(other, "e1"), clock=Clock()) as proxy,
    ):
        for _ in range(20):
            answer = await client.post(proxy.url + "/v1/embeddings", json={"input": "x"})
            assert answer.status_code == 200

        assert len(one.received) == 3


async def test_forwarded_calls_keep_to_the_budget(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """One way or another it is the same fleet."""
    settings = ReliabilitySettings(retry_share=0.0, least_retries=1)
    async with (
        engine(break_off) as one,
        engine(break_off) as other,
        balancer(
            instance(one, "e0"), instance(other, "e1"), clock=Clock(), reliability=settings
        ) as proxy,
    ):
        for _ in range(3):
            answer = await client.post(proxy.url + "/v1/embeddings", json={"input": "x"})
            assert answer.status_code == 502

        assert len(one.received) + len(other.received) == 4


def pair(instance: Any, *prefill: Any, decode: Any) -> list[Any]:
    roles = [(each, f"p{n}", Role.PREFILL) for n, each in enumerate(prefill)]
    return [
        instance(each, name, role=role, connector="nixl")
        for each, name, role in [*roles, (decode, "d0", Role.DECODE)]
    ]


async def test_prefill_instance_that_breaks_off_is_held_back(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """The other one prefills, and the plan says who wasn't asked."""
    async with (
        engine(break_off) as bad,
        engine(answer_ok) as good,
        engine(answer_ok) as d,
        balancer(*pair(instance, bad, good, decode=d), clock=Clock()) as proxy,
    ):
        for each in range(12):
            answer = await ask(client, proxy, each)
            assert (answer.status_code, answer.headers["x-kvlb-prefill"]) == (200, "p1")
        record = (await proxy.wait_for_records(12))[-1]

        assert len(bad.received) == 3
        assert record.plan is not None
        assert record.plan.held_back == {"p0": "engine_closed"}


async def test_prefill_legs_keep_to_the_budget(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Then decode instances stand in, if they may."""
    settings = ReliabilitySettings(retry_share=0.0, least_retries=1)
    pd = PdSettings(allow_local_on_failure=True, prefill_attempts=2)
    async with (
        engine(break_off) as one,
        engine(break_off) as other,
        engine(answer_ok) as d,
        balancer(
            *pair(instance, one, other, decode=d), clock=Clock(), reliability=settings, pd=pd
        ) as proxy,
    ):
        for each in range(3):
            answer = await ask(client, proxy, each)
            assert (answer.status_code, answer.headers["x-kvlb-reason"]) == (200, "prefill_failed")

        assert len(one.received) + len(other.received) == 4


async def test_engine_that_hangs_is_found_before_its_requests_time_out(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """By those that wait, beside those that were answered."""

    async def hang(received: Any, wire: Any) -> None:
        await received.gone.wait()

    clock = Clock()
    async with (
        engine(hang) as stuck,
        engine(answer_ok) as well,
        balancer(instance(stuck, "e0"), instance(well, "e1"), clock=clock) as proxy,
        asyncio.TaskGroup() as group,
    ):
        asked = [group.create_task(ask(client, proxy, each, stream=True)) for each in range(40)]
        await stuck.wait_for_requests(20)
        await proxy.wait_for_records(20)
        for _ in range(15):
            clock.now_s += 1.0
            proxy.reliability.judge()
        held = proxy.reliability.render(stuck.url)
        answer = await ask(client, proxy, 40, stream=True)
        for each in asked:
            each.cancel()

    assert (held["state"], held["reason"]) == ("open", "slow")
    assert answer.headers["x-kvlb-instance"] == "e1"


async def test_engine_that_answers_500_beside_others_that_are_well(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Its answers pass, and after a while it gets no more requests."""
    clock = Clock()
    async with (
        engine(refuse) as bad,
        engine(answer_ok) as good,
        balancer(instance(bad, "e0"), instance(good, "e1"), clock=clock) as proxy,
    ):
        for each in range(30):
            await ask(client, proxy, each)
        for _ in range(12):
            clock.now_s += 1.0
            proxy.reliability.judge()
        statuses = [(await ask(client, proxy, 30 + each)).status_code for each in range(6)]

        assert proxy.reliability.render(bad.url)["reason"] == "failing"
        assert statuses == [200] * 6


async def test_refused_connections_and_leaving_clients_are_not_held_against_anybody(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, raw_client: Any
) -> None:
    """Probes see the one, the other is nobody's fault."""

    async def stay_silent(received: Any, wire: Any) -> None:
        await received.gone.wait()

    async with engine(stay_silent) as fake, balancer(instance(fake)) as proxy:
        for number in range(5):
            async with raw_client(proxy) as leaving:
                await leaving.post(COMPLETIONS, {"model": "m", "prompt": [1, 2]})
                await fake.wait_for_requests(number + 1)
        await proxy.wait_for_records(5)
        assert proxy.reliability.standings.breakers() == {}

    async with balancer(instance("http://127.0.0.1:9")) as proxy:
        for each in range(5):
            await ask(client, proxy, each)
        assert proxy.reliability.standings.breakers() == {}
