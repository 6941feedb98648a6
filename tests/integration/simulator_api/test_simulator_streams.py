"""Streams of a simulated engine: chunks, usage, ids, and clients that leave."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

Started = Callable[..., AbstractAsyncContextManager[Any]]


async def test_completion_stream_gives_the_text_of_the_whole_answer(api: Any) -> None:
    """Chunks add up to the answer; the last has the reason; usage and the end marker follow."""
    body = {"prompt": "hello", "max_tokens": 6}
    whole = await api.complete(**body)
    *chunks, usage, end = await api.stream(
        "/v1/completions", body | {"stream_options": {"include_usage": True}}
    )

    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 5 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert end == "[DONE]"


async def test_chat_stream_opens_with_the_role_and_has_usage_only_on_request(api: Any) -> None:
    """The first chunk is the role, and without the option no usage chunk comes."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    opening, *chunks, end = await api.stream("/v1/chat/completions", body)

    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert end == "[DONE]"


async def test_usage_rides_on_every_chunk_on_request(api: Any) -> None:
    """`continuous_usage_stats` counts as the answer grows."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _usage, _end = await api.stream(
        "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream_options": options}
    )

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


async def test_chat_stream_ends_with_usage_on_request(api: Any) -> None:
    """Chat streams count usage at the end as completions do."""
    *_chunks, usage, end = await api.stream(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2,
            "stream_options": {"include_usage": True},
        },
    )

    assert usage["usage"]["completion_tokens"] == 2
    assert end == "[DONE]"


async def test_flags_of_stream_options_are_read_as_pydantic_reads_them(api: Any) -> None:
    """The word "false" asks for nothing."""
    options = {"include_usage": "false"}
    *chunks, end = await api.stream(
        "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream_options": options}
    )

    assert (len(chunks), end) == (3, "[DONE]")
    assert all(chunk["choices"] for chunk in chunks)


async def test_streamed_token_ids_come_with_the_first_chunk(api: Any) -> None:
    """`return_token_ids` gives the prompt's ids once and every token's id."""
    *chunks, _end = await api.stream(
        "/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 3, "return_token_ids": True}
    )

    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["prompt_token_ids"] for choice in choices] == [[7, 8, 9], None, None]
    assert bytes(token for choice in choices for token in choice["token_ids"]).decode() == "".join(
        choice["text"] for choice in choices
    )


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_client_that_leaves_stops_the_engine(api: Any, stream: bool) -> None:
    """A closed connection aborts the request (F41, F42)."""
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(api.client.post("/v1/completions", json=body))
        await api.wait_until(running=1)
        asked.cancel()

    await api.wait_until(running=0, in_flight=0)
    assert (await api.state())["finished"] == {"abort": 1}


async def test_stream_of_a_response_is_named_events(started_engine: Started) -> None:
    """In order, numbered, and without an end marker."""
    async with started_engine() as one:
        body = {"input": "hello", "max_output_tokens": 2, "stream": True}
        answer = await one.post("/v1/responses", body)

    events = [each.split("\n") for each in answer.text.split("\n\n") if each]
    names = [lines[0].removeprefix("event: ") for lines in events]
    data = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
    assert names == [each["type"] for each in data]
    assert (names[0], names[-1]) == ("response.created", "response.completed")
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
