"""How many updates are on the way to Redis at once."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from indexer.redis_index.places import Places


async def test_no_more_than_so_many_at_once() -> None:
    """The next one goes on as soon as one is through."""
    places, entered = Places(2), asyncio.Event()
    async with AsyncExitStack() as first, places.one(), asyncio.TaskGroup() as group:
        await first.enter_async_context(places.one())

        async def third() -> None:
            async with places.one():
                entered.set()

        group.create_task(third())
        await asyncio.sleep(0)
        was_in = entered.is_set()
        await first.aclose()
        async with asyncio.timeout(20):
            await entered.wait()

    assert not was_in


async def test_nobody_waits_long() -> None:
    """A Redis that hangs keeps the places; the others find out for themselves."""
    places = Places(1)
    async with places.one(), asyncio.timeout(20), places.one(), places.one():
        pass
    async with asyncio.timeout(20), places.one():
        is_full = places.are_taken

    assert is_full
    assert not places.are_taken


async def test_place_is_given_back_after_a_failure() -> None:
    """Whatever happens to the update."""
    places = Places(1)
    with pytest.raises(ZeroDivisionError):
        async with places.one():
            raise ZeroDivisionError

    assert not places.are_taken
