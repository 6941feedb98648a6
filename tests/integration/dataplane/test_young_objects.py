"""Garbage is collected in small parts while streams begin."""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from balancer.dataplane.young_objects import (
    ALL_EVERY,
    APART_S,
    MIDDLE_EVERY,
    STREAMS,
    YoungObjects,
)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def collected_after(play: Callable[[YoungObjects, Clock], None]) -> list[int]:
    """Generations that were collected, in turn."""
    generations: list[int] = []
    clock = Clock()
    play(YoungObjects(clock=clock, collect=generations.append), clock)
    await asyncio.sleep(0)
    return generations


async def test_a_few_streams_are_collected_together() -> None:
    """Nothing is walked before enough of them have begun."""

    def play(young: YoungObjects, _: Clock) -> None:
        for _each in range(STREAMS - 1):
            young.stream_began()

    def play_one_more(young: YoungObjects, clock: Clock) -> None:
        play(young, clock)
        young.stream_began()

    assert await collected_after(play) == []
    assert await collected_after(play_one_more) == [0]


async def test_what_was_written_goes_out_first() -> None:
    """A first token doesn't wait for the collection that its stream causes."""
    generations: list[int] = []
    young = YoungObjects(clock=Clock(), collect=generations.append)
    for _ in range(STREAMS):
        young.stream_began()
    assert generations == []
    await asyncio.sleep(0)
    assert generations == [0]


async def test_short_streams_are_not_collected_for_each() -> None:
    """However many begin, two collections are some time apart."""

    def play(young: YoungObjects, clock: Clock) -> None:
        for _ in range(100 * STREAMS):
            clock.now_s += APART_S / 100
            young.stream_began()

    assert len(await collected_after(play)) == 4


async def test_what_outlived_its_part_is_looked_through_now_and_then() -> None:
    """A cycle that a failed stream left doesn't stay for ever."""

    def play(young: YoungObjects, clock: Clock) -> None:
        for _ in range(ALL_EVERY * STREAMS):
            clock.now_s += APART_S
            young.stream_began()

    counts = Counter(await collected_after(play))
    assert counts[1] == ALL_EVERY // MIDDLE_EVERY - 1
    assert counts[2] == 1


@contextmanager
def collections_by_hand() -> Iterator[list[int]]:
    """Generations that were collected although Python collects nothing by itself."""
    generations: list[int] = []

    def note(phase: str, told: dict[str, int]) -> None:
        if phase == "stop":
            generations.append(told["generation"])

    gc.disable()
    gc.callbacks.append(note)
    try:
        yield generations
    finally:
        gc.callbacks.remove(note)
        gc.enable()


async def test_streams_that_go_on_are_collected(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """A few streams that have begun, and not ended: theirs are the objects to be walked early."""
    go_on = asyncio.Event()
    begun = asyncio.Barrier(STREAMS + 1)

    async def answer(_received: Any, wire: Any) -> None:
        await wire.head(200, **{"content-type": "text/event-stream"})
        await wire.chunk(b'data: {"choices":[{"index":0,"text":"a"}]}\n\n')
        await go_on.wait()
        await wire.chunk(b"data: [DONE]\n\n")
        await wire.end()

    async def stream(url: str) -> None:
        body = {"model": "m", "prompt": [1], "stream": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as told:
            pieces = told.aiter_bytes()
            await anext(pieces)
            await begun.wait()
            assert [piece async for piece in pieces] == [b"data: [DONE]\n\n"]

    async with engine(answer) as fake, balancer(instance(fake)) as proxy:
        with collections_by_hand() as generations:
            async with asyncio.TaskGroup() as group:
                for _ in range(STREAMS):
                    group.create_task(stream(proxy.url))
                await begun.wait()
                assert generations == [0]
                go_on.set()
