"""Requests that no rank has room for: they wait in line, are let in by turn, or are refused."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Fleet
from balancer.core.settings.admission import AdmissionSettings, ClientClass
from balancer.core.settings.routing import RoutingSettings

COMPLETIONS = "/v1/completions"
ONE_EACH = RoutingSettings(max_requests_per_rank=1)


@dataclass
class Gate:
    """An engine's script that answers when it is told to."""

    asked: list[str] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def __call__(self, received: Any, wire: Any) -> None:
        self.asked.append(received.json["user"])
        await self.permits.acquire()
        await wire.json({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1}})


@dataclass
class Clock:
    """Stands still, and goes on when the test says so."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self._run())
            yield
            running.cancel()

    async def _run(self) -> None:
        while True:
            self.now_s += 0.1
            await asyncio.sleep(0.005)


def body(user: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": [1, 2, 3], "user": user} | fields


@dataclass
class Crowd:
    """Those who want answers of one engine, behind a balancer."""

    engine: Any
    served: Any
    client: httpx.AsyncClient
    eventually: Any
    group: asyncio.TaskGroup
    sent: int = 0

    async def ask(
        self, user: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        url = self.served.url + COMPLETIONS
        return await self.client.post(url, json=body(user, **fields), headers=headers)

    async def send(
        self, user: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> "asyncio.Task[httpx.Response]":
        """Where one is answered at a time: ask, and be in line before the next one asks."""
        answer = self.group.create_task(self.ask(user, headers, **fields))
        self.sent += 1
        await self.eventually(lambda: self.served.dataplane.running == self.sent)
        await self.eventually(lambda: self.waiting == self.sent - 1)
        return answer

    @property
    def waiting(self) -> int:
        return sum(self.served.admission.waiting.values())


Crowded = Callable[..., AbstractAsyncContextManager[Crowd]]


@pytest.fixture
def crowded(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, eventually: Any
) -> Crowded:
    """Run an engine with this script, and a balancer with these options before it."""

    @asynccontextmanager
    async def run(gate: Gate, **options: Any) -> AsyncIterator[Crowd]:
        async with (
            engine(gate) as running,
            balancer(instance(running), **options) as served,
            asyncio.TaskGroup() as group,
        ):
            yield Crowd(running, served, client, eventually, group)

    return run


async def test_a_request_waits_for_room_and_is_served(crowded: Crowded) -> None:
    """The engine has one at a time; nobody is told 503."""
    gate = Gate()
    async with crowded(gate, routing=ONE_EACH) as crowd:
        answers = [await crowd.send(name) for name in "ab"]
        await crowd.engine.wait_for_requests(1)
        seen = list(gate.asked)
        gate.permits.release()
        await crowd.engine.wait_for_requests(2)
        gate.permits.release()

    assert seen == ["a"]
    assert [each.result().status_code for each in answers] == [200, 200]
    assert crowd.served.waits == ["admitted"]
    assert crowd.served.admission.waiting == {}
    waited = {record.waited_s is not None for record in crowd.served.records}
    assert waited == {True, False}


async def test_the_urgent_and_the_modest_go_first(crowded: Crowded) -> None:
    """By priority, in the body or the header; within one, clients get equal shares."""
    gate = Gate()
    async with crowded(gate, routing=ONE_EACH) as crowd:
        busy, modest = ({"authorization": f"Bearer {name}"} for name in ("busy", "modest"))
        for name in ("first", "busy1", "busy2", "busy3"):
            await crowd.send(name, busy)
        await crowd.send("modest", modest)
        await crowd.send("urgent", busy, priority=-1)
        await crowd.send("soon", busy | {"x-vllm-priority": "-1"})
        await crowd.send("nonsense", {"x-vllm-priority": "often", "x-api-key": "k"})
        for _ in range(crowd.sent):
            gate.permits.release()

    assert gate.asked[:3] == ["first", "urgent", "soon"]
    assert gate.asked.index("modest") < gate.asked.index("busy3")
    assert gate.asked.index("nonsense") < gate.asked.index("busy3")
    assert len(gate.asked) == 8


async def test_what_is_cached_goes_first(crowded: Crowded) -> None:
    """Who goes on with a conversation, before who came earlier with a new prompt."""
    gate = Gate()
    known = list(range(64))
    reads_all = RoutingSettings(max_requests_per_rank=1, observe_share=1)
    async with crowded(gate, routing=reads_all) as crowd:
        await crowd.send("first", prompt=known)
        await crowd.send("new", prompt=[9] * 64)
        await crowd.send("next turn", prompt=[*known, 1])
        for _ in range(crowd.sent):
            gate.permits.release()

    assert gate.asked == ["first", "next turn", "new"]


async def test_who_waits_too_long_gets_503(crowded: Crowded) -> None:
    """In OpenAI's form, with the code of a full fleet and when to come back. No engine hears of it."""
    gate = Gate()
    admission = AdmissionSettings(promise_s=0, max_wait_s=0.05)
    async with crowded(gate, routing=ONE_EACH, admission=admission) as crowd:
        first = await crowd.send("a")
        refused = await crowd.ask("b")
        gate.permits.release()

    assert first.result().status_code == 200
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert gate.asked == ["a"]
    assert crowd.served.waits == ["refused"]


async def test_a_full_line_is_told_at_once(crowded: Crowded) -> None:
    """`max_waiting: 0` is how it was before there was a line."""
    gate = Gate()
    admission = AdmissionSettings(promise_s=0, max_waiting=0)
    async with crowded(gate, routing=ONE_EACH, admission=admission) as crowd:
        await crowd.send("a")
        refused = await crowd.ask("b")
        gate.permits.release()

    assert refused.status_code == 503
    assert crowd.served.admission.waiting == {}


async def test_a_client_that_leaves_gives_up_its_place(crowded: Crowded, raw_client: Any) -> None:
    """Within moments, and the one behind it goes on."""
    gate = Gate()
    async with crowded(gate, routing=ONE_EACH) as crowd:
        await crowd.send("a")
        async with raw_client(crowd.served) as impatient:
            await impatient.post(COMPLETIONS, body("impatient"))
            await crowd.eventually(lambda: crowd.waiting == 1)
            crowd.sent += 1
            last = await crowd.send("b")
            impatient.leave()
            await crowd.eventually(lambda: crowd.waiting == 1)
        gate.permits.release()
        gate.permits.release()

    assert last.result().status_code == 200
    assert gate.asked == ["a", "b"]
    assert sorted(crowd.served.waits) == ["admitted", "left"]
    assert crowd.served.in_flight() == 0


async def test_who_waited_is_decided_by_the_fleet_of_then(
    crowded: Crowded, engine: Any, instance: Any
) -> None:
    """An engine that was added meanwhile gets it at once."""
    full, fresh = Gate(), Gate()
    async with engine(fresh) as added, crowded(full, routing=ONE_EACH) as crowd:
        await crowd.send("a")
        answer = await crowd.send("b")
        earlier = crowd.served.fleet.instances
        crowd.served.fleet = Fleet(instances=(*earlier, instance(added, "e1")))
        fresh.permits.release()
        assert (await answer).status_code == 200
        full.permits.release()

    assert fresh.asked == ["b"]


async def test_a_fleet_that_dies_lets_nobody_wait(crowded: Crowded) -> None:
    """Nobody is left who could have room: that is told at once, and as what it is."""
    gate = Gate()
    async with crowded(gate, routing=ONE_EACH) as crowd:
        await crowd.send("a")
        answer = await crowd.send("b")
        crowd.served.fleet = Fleet(
            instances=tuple(replace(each, healthy=False) for each in crowd.served.fleet.instances)
        )
        refused = await answer
        gate.permits.release()

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_instance"
    assert crowd.served.waits == ["left"]


async def test_what_comes_too_fast_waits(crowded: Crowded) -> None:
    """All are served in the end, however many came at once."""
    clock, gate = Clock(), Gate(permits=asyncio.Semaphore(20))
    admission = AdmissionSettings(promise_s=0, requests_per_s=50)
    async with crowded(gate, admission=admission, clock=clock) as crowd:
        answers = [crowd.group.create_task(crowd.ask(str(number))) for number in range(20)]
        await crowd.eventually(lambda: sum(crowd.served.admission.waiting.values()) == 15)
        async with clock.going_on():
            await asyncio.wait(answers)

    assert {each.result().status_code for each in answers} == {200}
    assert crowd.served.waits == ["admitted"] * 15


async def test_line_that_only_the_pace_holds_is_served_to_its_end(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """In order, however long the line has stood and whatever was promised: there is room."""
    gate = Gate(permits=asyncio.Semaphore(20))
    admission = AdmissionSettings(promise_s=0.02, standing_s=0.01, requests_per_s=50)
    async with engine(gate) as running, balancer(instance(running), admission=admission) as served:
        url = served.url + COMPLETIONS
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(client.post(url, json=body("u"))) for _ in range(20)]

    assert {each.result().status_code for each in answers} == {200}
    assert set(served.waits) == {"admitted"}


async def test_line_that_is_full_by_the_pace_says_when_to_come_back(crowded: Crowded) -> None:
    """By the pace and the line, and what to change, as `--rate-limit` and `--queue-size` had it."""
    gate = Gate(permits=asyncio.Semaphore(1))
    admission = AdmissionSettings(requests_per_s=0.1, max_waiting=2)
    async with crowded(gate, admission=admission) as crowd:
        first = await crowd.ask("a")
        waiting = [crowd.group.create_task(crowd.ask(name)) for name in "bc"]
        await crowd.eventually(lambda: crowd.waiting == 2)
        refused = await crowd.ask("d")
        for each in waiting:
            each.cancel()

    error = refused.json()["error"]
    assert (first.status_code, refused.status_code, error["code"]) == (200, 503, "overloaded")
    assert refused.headers["retry-after"] == "20"
    assert "admission.requests_per_s" in error["message"]
    assert "admission.max_waiting" in error["message"]


async def test_models_that_the_pace_holds_back_take_turns(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, eventually: Any
) -> None:
    """Nine requests for one model don't keep the only two for another waiting."""
    clock, gate = Clock(), Gate(permits=asyncio.Semaphore(20))
    admission = AdmissionSettings(requests_per_s=10)
    async with engine(gate) as running:
        fleet = (instance(running), instance(running.url + "/x", "e1", base="n"))
        async with balancer(*fleet, admission=admission, clock=clock) as served:
            url = served.url + COMPLETIONS
            async with asyncio.TaskGroup() as group:
                answers = []
                for number in range(9):
                    asked = client.post(url, json=body(f"m{number}"))
                    answers.append(group.create_task(asked))
                await eventually(lambda: served.admission.waiting.get("m") == 8)
                for number in range(2):
                    asked = client.post(url, json=body(f"n{number}", model="n"))
                    answers.append(group.create_task(asked))
                await eventually(lambda: served.admission.waiting.get("n") == 2)
                async with clock.going_on():
                    await asyncio.wait(answers)

    models = [name[0] for name in gate.asked]
    began = models.index("n")
    assert models[began : began + 4].count("n") == 2


async def test_a_clients_class_goes_first(crowded: Crowded) -> None:
    """Whatever the others ask for."""
    gate = Gate()
    vip = ClientClass(keys_sha256=(sha256(b"vip").hexdigest(),), priority=-1)
    admission = AdmissionSettings(promise_s=0, classes={"vip": vip})
    async with crowded(gate, routing=ONE_EACH, admission=admission) as crowd:
        await crowd.send("first")
        await crowd.send("pushy", priority=-9)
        await crowd.send("vip", {"authorization": "Bearer vip"})
        for _ in range(crowd.sent):
            gate.permits.release()

    assert gate.asked == ["first", "vip", "pushy"]
