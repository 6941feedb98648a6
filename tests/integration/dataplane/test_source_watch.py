"""A prefill engine that is lost after its leg: who waits for its blocks waits no longer."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest

from balancer.connectors.contract import Connector, LegContext, LegRequest, Style
from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.fleet.transfer_facts import TransferFacts
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.dataplane.one_leg import PrefillLegError
from balancer.dataplane.source_watch import SourceWatch, is_lost
from indexer.core.types import InstanceId

P0 = InstanceId("http://p0:1")
P1 = InstanceId("http://p1:1")
WELL = Instance(id=P0, alias="p0", healthy=True, facts=TransferFacts(engine_ids={0: "a"}))
UNWELL = replace(WELL, healthy=False)
ANOTHER = replace(WELL, facts=TransferFacts(engine_ids={0: "b"}))
UNASKED = replace(WELL, facts=TransferFacts())


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        pytest.param(WELL, WELL, False, id="nothing-happened"),
        pytest.param(WELL, UNWELL, True, id="down"),
        pytest.param(UNWELL, UNWELL, False, id="was-thought-down"),
        pytest.param(UNWELL, WELL, False, id="back"),
        pytest.param(WELL, None, True, id="left"),
        pytest.param(None, None, False, id="had-left"),
        pytest.param(WELL, ANOTHER, True, id="another-life"),
        pytest.param(WELL, UNASKED, False, id="ids-unknown-now"),
        pytest.param(UNASKED, WELL, False, id="ids-unknown-then"),
        pytest.param(WELL, replace(WELL, draining=True), False, id="draining"),
    ],
)
def test_who_is_lost(before: Instance | None, now: Instance | None, lost: bool) -> None:
    """Only that it can be told: it was well, or it had a name."""
    assert is_lost(before, now) is lost


class Watched:
    """A fleet of one prefill engine, and those who wait for it."""

    def __init__(self) -> None:
        self.fleet = Fleet(instances=(WELL,))
        self.watch = SourceWatch(lambda: self.fleet)

    def become(self, *instances: Instance) -> None:
        self.fleet = Fleet(instances=instances)

    async def wait(self, source: InstanceId = P0) -> None:
        async with self.watch.over(source) as waiting:
            waiting.begin()
            await asyncio.Event().wait()


async def test_everybody_who_waits_is_told() -> None:
    """And the next one, who comes when nobody has waited for a while."""
    watched = Watched()
    for _ in range(2):
        watched.become(WELL)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            waits = [group.create_task(failed(watched)) for _ in range(3)]
            await asyncio.sleep(0)
            watched.become(UNWELL)

        assert [each.result() for each in waits] == ["engine_closed"] * 3


async def test_who_waits_for_another_engine_waits_on() -> None:
    """And is told of that one later."""
    watched = Watched()
    well = replace(WELL, id=P1)
    watched.become(WELL, well)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        first = group.create_task(failed(watched))
        second = group.create_task(failed(watched, P1))
        await asyncio.sleep(0)
        watched.become(UNWELL, well)
        await first
        was_waiting = not second.done()
        watched.become(UNWELL, replace(well, healthy=False))

    assert was_waiting
    assert second.result() == "engine_closed"


async def failed(watched: Watched, source: InstanceId = P0) -> str | None:
    with pytest.raises(PrefillLegError) as error:
        await watched.wait(source)
    return error.value.cause.code


async def test_a_first_token_that_comes_at_the_last_moment_counts() -> None:
    """Bytes are on their way to the client: it must not be cut any more."""
    watched = Watched()
    async with watched.watch.over(P0) as waiting:
        waiting.begin()
        waiting.limit.reschedule(asyncio.get_running_loop().time())
        waiting.end()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_limits_of_others_pass() -> None:
    """What timed out within is no lost engine."""
    with pytest.raises(TimeoutError):
        async with Watched().watch.over(P0):
            raise TimeoutError


async def test_until_the_prefill_leg_has_ended_nobody_looks() -> None:
    """It notices by itself, and may be slow to answer probes."""
    watched = Watched()
    async with asyncio.timeout(20), watched.watch.over(P0), asyncio.TaskGroup() as group:
        other = group.create_task(failed(watched))
        await asyncio.sleep(0)
        watched.become(UNWELL)

    assert other.result() == "engine_closed"


# Through the data plane


class Naming(Connector):
    """Tells the decode engine whom to wait for."""

    name = "naming"

    def __init__(self, style: Style) -> None:
        self._style = style

    def style(self, context: LegContext) -> Style:  # noqa: ARG002 - the contract's signature
        return self._style

    def prefill_leg(self, context: LegContext) -> LegRequest:
        return LegRequest(body=prefill_body(context.body))

    def decode_leg(
        self,
        context: LegContext,
        prefill_answer: Mapping[str, Any] | None,  # noqa: ARG002 - likewise
    ) -> LegRequest:
        return LegRequest(
            body={**context.body, "kv_transfer_params": {"from": context.prefill.alias}}
        )


@pytest.mark.parametrize("style", ["serial", "concurrent"])
async def test_both_legs_run_again_when_the_prefill_engine_is_lost(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    style: Style,
) -> None:
    """The decode engine would wait for it without an end, and sees its connection close."""
    sources: list[str] = []

    async def prefill(received: Any, wire: Any) -> None:
        await wire.json(
            {"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens": 1000}}
        )

    async def decode(received: Any, wire: Any) -> None:
        sources.append(received.json["kv_transfer_params"]["from"])
        if len(sources) > 1:
            await wire.events(b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n")
            return
        async with asyncio.timeout(20):
            while proxy.in_flight() > 1:  # noqa: ASYNC110 - until the prefill leg has ended
                await asyncio.sleep(0.005)
        proxy.fleet = Fleet(
            instances=tuple(
                replace(each, healthy=each.alias != sources[0]) for each in proxy.fleet.instances
            )
        )
        await received.gone.wait()

    async with (
        engine(prefill) as p0,
        engine(prefill) as p1,
        engine(decode) as d,
        balancer(
            *(
                instance(each, f"p{number}", role=Role.PREFILL, connector="naming")
                for number, each in enumerate([p0, p1])
            ),
            instance(d, "d0", role=Role.DECODE, connector="naming"),
            connectors={"naming": Naming(style)},
        ) as proxy,
    ):
        body = {"model": "m", "prompt": list(range(1000)), "stream": True}
        answer = await client.post(proxy.url + "/v1/completions", json=body)
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == 200
    assert sorted(sources) == ["p0", "p1"]
    assert answer.headers["x-kvlb-prefill"] == sources[1]
    assert [leg.error for leg in record.legs if leg.kind == "decode"] == ["cancelled", None]
    assert proxy.in_flight() == 0
