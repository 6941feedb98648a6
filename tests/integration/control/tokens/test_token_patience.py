"""Reading takes time: deadlines, queues, and a loop that stays responsive."""

import asyncio
from collections.abc import Callable
from typing import Any

from balancer.core.request import GenerateRequest
from balancer.tokens.reader import PromptReader

MakeRequest = Callable[..., GenerateRequest]
MakeReader = Callable[..., PromptReader]
FleetOf = Callable[..., Any]


async def test_deadline_passes_and_the_prompt_is_remembered(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """A long prompt costs its first request the overlap, and its repeat nothing."""
    reader = make_reader(models={"tiny": tokenizer_directory}, deadline_s=0.001)
    request = make_request({"prompt": "some words to read " * 30_000})

    first = await reader.read(fleet_of(), request)
    async with asyncio.timeout(20):
        view = await reader.read(fleet_of(), request)
        while view.source != "cache":
            await asyncio.sleep(0.01)
            view = await reader.read(fleet_of(), request)

    assert first.unscorable == "timeout"


async def test_full_queue_is_left_alone(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """More prompts than threads can take in time are routed by load at once."""
    reader = make_reader(models={"tiny": tokenizer_directory}, workers=1)
    text = "some words to read " * 10_000
    await reader.read(fleet_of(), make_request({"prompt": "load it"}))

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(reader.read(fleet_of(), make_request({"prompt": f"{number} {text}"})))
            for number in range(10)
        ]

    assert [task.result().unscorable for task in tasks].count("busy") == 5


async def test_short_prompts_do_not_wait_for_long_ones(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """F29: long texts that are new have a thread of their own."""
    reader = make_reader(models={"tiny": tokenizer_directory}, workers=1)
    await reader.read(fleet_of(), make_request({"prompt": "load it"}))
    ended: list[str] = []

    async def read(name: str, text: str) -> None:
        view = await reader.read(fleet_of(), make_request({"prompt": f"{name} {text}"}))
        assert view.source == "local"
        ended.append(name)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(read(f"long {number}", "some words to read " * 40_000))
        for number in range(2):
            group.create_task(read(f"short {number}", "some words"))

    assert ended[-1] == "long 2"


async def test_loop_stays_responsive_while_a_long_prompt_is_read(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """Tokenising happens in threads that let go of the interpreter."""
    reader = make_reader(models={"tiny": tokenizer_directory})
    turns = 0

    async with asyncio.TaskGroup() as group:
        body = {"prompt": "some words to read " * 50_000}
        task = group.create_task(reader.read(fleet_of(), make_request(body)))
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1

    assert task.result().source == "local"
    # Held without a break, the interpreter would leave the loop one turn or two.
    assert turns > 5
