"""What a process knows of its peers before its first request."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from balancer.sharing import ChannelError, Company

WAY_S = 0.05
"""How long a message is under way."""


class Wire:
    """One end of a channel between two processes; the other end is another one."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue(1000)
        self.other: Wire = self

    async def send(self, messages: Sequence[bytes]) -> None:
        await asyncio.sleep(WAY_S)
        for each in messages:
            await self.other._arrived.put(each)

    async def receive(self, on_message: Callable[[bytes], None]) -> None:
        while True:
            on_message(await self._arrived.get())


class Broken(Wire):
    """Nobody is there."""

    async def send(self, messages: Sequence[bytes]) -> None:  # noqa: ARG002
        raise ChannelError("no way there")


async def peers_of(balancer: Any) -> float:
    lines = (await balancer.http.get("/metrics")).text.splitlines()
    return next(float(each.split()[1]) for each in lines if each.startswith("kvlb_peers "))


async def test_who_answers_knows_its_peers_and_is_known(engine: Any, balancer_factory: Any) -> None:
    """Else siblings of one prompt that come to both at once would be spread."""
    here, there = Wire(), Wire()
    here.other, there.other = there, here
    config = {"instances": [{"url": engine.url}]}
    async with (
        balancer_factory(config, company=Company(channel=here)) as first,
        balancer_factory(config, company=Company(channel=there)) as second,
    ):
        assert [await peers_of(each) for each in (first, second)] == [1, 1]


async def test_who_reaches_nobody_answers_all_the_same(engine: Any, balancer_factory: Any) -> None:
    """After a second."""
    config = {"instances": [{"url": engine.url}]}
    async with balancer_factory(config, company=Company(channel=Broken())) as balancer:
        await balancer.available()
        answer = await balancer.http.post("/v1/completions", json={"model": "tiny", "prompt": [1]})

    assert answer.status_code == 200
