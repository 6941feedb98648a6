"""Which instance is asked what is only handed on, and what is booked there meanwhile."""

import asyncio
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Role


async def test_prefill_instances_are_not_asked(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, echo: Any
) -> None:
    """Only instances that answer clients do."""
    async with engine(echo) as p, engine(echo) as d:
        fleet = (instance(p, "p0", role=Role.PREFILL), instance(d, "d0", role=Role.DECODE))
        async with balancer(*fleet) as proxy:
            for _ in range(3):
                await client.post(proxy.url + "/tokenize", json={"model": "m"})

    assert (len(p.received), len(d.received)) == (0, 3)


async def test_equals_take_turns_and_the_busy_are_spared(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, echo: Any
) -> None:
    """A long call on one instance sends the others elsewhere."""

    async def slow(received: Any, wire: Any) -> None:
        arrived.set()
        await release.wait()
        await echo(received, wire)

    async def quick(received: Any, wire: Any) -> None:
        arrived.set()
        await echo(received, wire)

    arrived, release = asyncio.Event(), asyncio.Event()
    async with engine(slow) as busy, engine(quick) as free:
        fleet = (instance(busy, "e0"), instance(free, "e1"))
        async with balancer(*fleet) as proxy, asyncio.TaskGroup() as group:
            while not busy.received:
                arrived.clear()
                group.create_task(client.post(proxy.url + "/tokenize", json={"model": "m"}))
                async with asyncio.timeout(20):
                    await arrived.wait()
            for _ in range(4):
                await client.post(proxy.url + "/tokenize", json={"model": "m"})
            release.set()

    assert len(busy.received) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param({"model": "nope"}, 404, id="unknown"),
        pytest.param({"model": 42}, 400, id="number"),
        pytest.param({}, 400, id="absent-of-several"),
    ],
)
async def test_model_is_looked_up(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    body: dict[str, Any],
    status: int,
    echo: Any,
) -> None:
    """The same answers as on the scored paths."""
    async with engine(echo) as one, engine(echo) as two:
        async with balancer(instance(one), instance(two, "e1", base="other")) as proxy:
            answer = await client.post(proxy.url + "/v1/embeddings", json=body)

        assert answer.status_code == status


async def test_generation_is_pinned_to_the_rank_it_is_booked_on(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, echo: Any
) -> None:
    """Where the engine takes the header; a client's own is never passed."""
    async with engine(echo) as fake, balancer(instance(fake, ranks=(2, 3), rank_base=2)) as proxy:
        for path in ("/v1/messages", "/v1/embeddings"):
            await client.post(
                proxy.url + path, json={"model": "m"}, headers={"x-data-parallel-rank": "7"}
            )

        assert [each.header("x-data-parallel-rank") for each in fake.received] == ["0", None]


async def test_forwarded_requests_count_as_load(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """In the same books as scored ones, until the last byte."""

    async def slow(received: Any, wire: Any) -> None:
        await wire.head()
        await wire.chunk(b"half")
        counted.append(proxy.in_flight())
        await wire.end()

    counted: list[int] = []
    async with engine(slow) as fake, balancer(instance(fake)) as proxy:
        await client.post(proxy.url + "/v1/messages", json={"model": "m"})
        await proxy.wait_for_records(1)

        assert counted == [1]
        assert proxy.in_flight() == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings"])
async def test_refused_request_leaves_no_load(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, path: str
) -> None:
    """Its 400 passes, and the rank is as idle as it was: nothing was computed."""

    async def refuse(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno")

    async with engine(refuse) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + path, json={"model": "m", "input": "a"})
        await proxy.wait_for_records(1)
        (rank,) = proxy.fleet.instances[0].rank_ids()

    assert (answer.status_code, answer.content) == (400, b"no")
    assert proxy.ledger.load(rank).arrivals_per_s == 0
