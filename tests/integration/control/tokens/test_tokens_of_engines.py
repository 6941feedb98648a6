"""Engines are asked for ids where we can't tell them: which, how often, for how long."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from balancer.core.request import GenerateRequest
from balancer.tokens.reader import PromptReader
from indexer.core.index import Prompt

SameTokens = Callable[[Prompt, list[int]], bool]

MakeRequest = Callable[..., GenerateRequest]
MakeReader = Callable[..., PromptReader]
FleetOf = Callable[..., Any]


async def test_engine_is_asked_without_a_tokenizer(
    engine: Any,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    same_tokens: SameTokens,
) -> None:
    """With the body it knows, once per prompt."""
    reader = make_reader()

    first = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))
    again = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))

    assert [first.source, again.source] == ["engine", "cache"]
    assert same_tokens(first.prompts[0], [7, 8, 9])
    assert [body for path, body, _ in engine.received if path == "/tokenize"] == [
        {"model": "tiny", "prompt": "a", "add_special_tokens": True}
    ]


async def test_engine_stands_in_for_a_broken_tokenizer(
    engine: Any,
    tmp_path: Path,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """Also for what the local one can't do."""
    reader = make_reader(models={"tiny": str(tmp_path)})

    view = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))

    assert view.source == "engine"


async def test_engine_is_not_asked_where_the_operator_says_so(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """`engine_fallback: false`."""
    reader = make_reader(engine_fallback=False)

    view = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))

    assert view.unscorable == "no_tokenizer"
    assert engine.received == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param((400, b"{}"), "refused", id="refused"),
        pytest.param((500, b"{}"), "no_tokenizer", id="failed"),
        pytest.param((404, b"{}"), "no_tokenizer", id="no-such-path"),
        pytest.param((200, b"{"), "no_tokenizer", id="no-json"),
        pytest.param((200, b'{"tokens": "x"}'), "no_tokenizer", id="wrong-json"),
        pytest.param((200, b'{"tokens": [-1]}'), "no_tokenizer", id="wrong-ids"),
    ],
)
async def test_engine_that_cannot_tell_costs_no_request(
    answer: tuple[int, bytes],
    reason: str,
    engine: Any,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """Whatever it answers, the request goes on."""
    engine.answers["/tokenize"] = answer

    view = await make_reader().read(fleet_of(engine), make_request({"prompt": "a"}))

    assert view.unscorable == reason


async def test_slow_engine_opens_the_breaker(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """After some timeouts it is left alone until the cool-down is over."""
    engine.stall.add("/tokenize")
    reader = make_reader(deadline_s=0.05, breaker_failures=2, breaker_cool_down_s=5.0)
    views = [
        await reader.read(fleet_of(engine), make_request({"prompt": f"{number}"}))
        for number in range(5)
    ]

    assert [view.unscorable for view in views] == ["timeout"] * 2 + ["no_tokenizer"] * 3
    assert engine.calls("/tokenize") <= 2


async def test_breaker_closes_after_a_good_trial(
    engine: Any,
    now: list[float],
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """The engine is tried again, and used again."""
    engine.answers["/tokenize"] = (500, b"")
    reader = make_reader(breaker_failures=1, breaker_cool_down_s=5.0)
    await reader.read(fleet_of(engine), make_request({"prompt": "a"}))
    del engine.answers["/tokenize"]

    during = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))
    now[0] = 5.0
    after = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))

    assert [during.unscorable, after.source] == ["no_tokenizer", "engine"]


async def test_another_engine_is_asked_when_one_is_gone(
    engine_factory: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """A refused connection is no reason to know nothing; who left the fleet is forgotten."""
    reader = make_reader(breaker_failures=1)
    async with engine_factory() as here:
        async with engine_factory() as gone:
            fleet = fleet_of(gone, here)
        views = [
            await reader.read(fleet, make_request({"prompt": f"{number}"})) for number in range(4)
        ]
        alone = await reader.read(fleet_of(here), make_request({"prompt": "alone"}))
        views.append(alone)

    assert {view.source for view in views} == {"engine"}


async def test_another_engine_is_asked_when_one_is_silent(
    engine_factory: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """Within the same deadline; and it is left alone after some of that."""
    reader = make_reader(deadline_s=2.0, breaker_failures=2, breaker_cool_down_s=60.0)
    async with engine_factory() as here, engine_factory() as hung:
        hung.stall.add("/tokenize")
        views = [
            await reader.read(fleet_of(hung, here), make_request({"prompt": f"{number}"}))
            for number in range(8)
        ]

    assert {view.source for view in views} == {"engine"}
    assert hung.calls("/tokenize") == 2


async def test_many_texts_are_not_worth_as_many_calls(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """A few are."""
    reader = make_reader()

    few = await reader.read(fleet_of(engine), make_request({"prompt": ["a", "b"]}))
    many = await reader.read(fleet_of(engine), make_request({"prompt": list("abcdefgh")}))

    assert len(few.prompts) == 2
    assert many.unscorable == "no_tokenizer"
    assert engine.calls("/tokenize") == 2


async def test_calls_to_engines_are_bounded(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """Tokenising must not compete with inference."""
    engine.stall.add("/tokenize")
    reader = make_reader(deadline_s=0.2, engine_concurrency=2, breaker_failures=100)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(reader.read(fleet_of(engine), make_request({"prompt": f"{number}"})))
            for number in range(5)
        ]

    assert (
        sorted(task.result().unscorable or "" for task in tasks) == ["busy"] * 3 + ["timeout"] * 2
    )


async def test_truncated_text_from_the_engine_is_unscorable(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """`/tokenize` doesn't truncate."""
    body = {"prompt": "a", "truncate_prompt_tokens": 2}

    view = await make_reader().read(fleet_of(engine), make_request(body))

    assert view.unscorable == "truncated"
