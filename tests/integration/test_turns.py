"""How ranks that have much to do share the event loop."""

import asyncio

from indexer.turns import Turns

RANKS = 8
ROUNDS = 5


async def test_one_rank_goes_on_per_turn_of_the_loop() -> None:
    """Somebody who waits for one turn of the loop waits for one rank, not for all of them."""
    turns, worked = Turns(), 0

    async def work() -> None:
        nonlocal worked
        for _ in range(ROUNDS):
            worked += 1
            await turns.pass_on()

    most = 0
    async with asyncio.TaskGroup() as group:
        ranks = [group.create_task(work()) for _ in range(RANKS)]
        await asyncio.sleep(0)  # each begins
        while not all(rank.done() for rank in ranks):
            before = worked
            await asyncio.sleep(0)
            most = max(most, worked - before)

    assert worked == RANKS * ROUNDS
    assert most == 1


async def test_everybody_gets_a_turn() -> None:
    """In the order in which they asked."""
    turns, order = Turns(), list[int]()

    async def work(number: int) -> None:
        for _ in range(ROUNDS):
            await turns.pass_on()
            order.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(RANKS):
            group.create_task(work(number))

    assert order == [*range(RANKS)] * ROUNDS
