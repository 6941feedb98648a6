"""Answers of a simulated engine have the shapes of vLLM's."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

Started = Callable[..., AbstractAsyncContextManager[Any]]


async def test_completion_has_the_shape_of_vllm(api: Any) -> None:
    """All fields that vLLM sends are there, with the release in the fingerprint."""
    answer = await api.complete()

    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "sim"
    assert answer["system_fingerprint"].startswith("vllm-0.33.0-")
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "total_tokens": 10,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert len(choice["text"]) == 4


async def test_chat_has_the_shape_of_vllm(api: Any) -> None:
    """Chat answers carry a message and count what they add to the cache."""
    answer = await api.chat("hi", max_tokens=5)

    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert len(answer["choices"][0]["message"]["content"]) == 5
    assert answer["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "created_cache_tokens": 16,
    }


async def test_repeated_prompt_is_cached_and_answered_alike(api: Any) -> None:
    """The second answer is the same text with cached tokens."""
    first = await api.complete(prompt="word " * 20)
    second = await api.complete(prompt="word " * 20)

    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_next_turn_hits_prompt_and_answer(api: Any) -> None:
    """A conversation's next turn finds everything but its new message."""
    messages = [{"role": "user", "content": "question " * 10}]
    first = await api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 40})
    messages.append(first.json()["choices"][0]["message"])
    messages.append({"role": "user", "content": "and then?"})
    second = await api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})

    known_tokens = first.json()["usage"]["total_tokens"] - 1
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == known_tokens // 16 * 16


async def test_old_release_says_nothing_cached_with_null(started_engine: Started) -> None:
    """Up to 0.25 no cached tokens is no object."""
    async with started_engine(version="0.16.0") as api:
        answer = await api.complete(prompt="word " * 20)
        again = await api.complete(prompt="word " * 20)

    assert answer["usage"]["prompt_tokens_details"] is None
    assert answer["system_fingerprint"] is None
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}


async def test_answer_ends_by_itself_and_the_end_has_no_text(api: Any) -> None:
    """Without a limit that is reached the answer stops; the end token counts but isn't text."""
    answer = await api.complete(max_tokens=400, return_token_ids=True)

    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["token_ids"][-1] == 258
    assert len(choice["text"]) == len(choice["token_ids"]) - 1
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


async def test_nothing_stops_before_min_tokens(api: Any) -> None:
    """Neither a stop string nor the end of the text counts before `min_tokens`."""
    free = (await api.complete(max_tokens=60))["choices"][0]["text"]
    bound = await api.complete(max_tokens=60, min_tokens=30, stop=free[5])

    assert bound["usage"]["completion_tokens"] >= 30


async def test_large_body_in_pieces_is_read_whole(api: Any) -> None:
    """A body larger than one network read is put together."""
    answer = await api.complete(prompt=[1] * 8000, max_tokens=1)

    assert answer["usage"]["prompt_tokens"] == 8000


async def test_several_answers_differ_and_the_first_is_the_ordinary_one(api: Any) -> None:
    """`n` gives as many choices and counts the prompt once."""
    single = await api.complete(max_tokens=20)
    answer = await api.complete(max_tokens=20, n=3)

    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[0] == single["choices"][0]["text"]
    assert len(set(texts)) == 3
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 60)


@pytest.mark.parametrize(
    "prompt", [["one", "two"], [[1, 2, 3], [4, 5]]], ids=["strings", "token-ids"]
)
async def test_several_prompts_are_several_choices(api: Any, prompt: Any) -> None:
    """Each prompt gets its choice; ids are taken as they are."""
    answer = await api.complete(prompt=prompt, return_token_ids=True)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    if isinstance(prompt[0], list):
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompt


async def test_token_ids_of_a_prompt_and_its_text_are_the_same_prompt(api: Any) -> None:
    """What /tokenize says is what the engine computes."""
    tokens = (await api.post("/tokenize", {"prompt": "word " * 20})).json()["tokens"]
    text = await api.complete(prompt="word " * 20)
    ids = await api.complete(prompt=tokens)

    assert ids["choices"][0]["text"] == text["choices"][0]["text"]
    assert ids["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_tokenize_renders_a_chat_as_chat_does(api: Any) -> None:
    """The chat form gives the prompt's length and ids, with texts on request."""
    messages = [{"role": "user", "content": "hi"}]
    tokens = await api.post("/tokenize", {"messages": messages, "return_token_strs": True})
    answer = await api.chat("hi", max_tokens=1, return_token_ids=True)

    body = tokens.json()
    assert body["tokens"] == answer["prompt_token_ids"]
    assert body["count"] == answer["usage"]["prompt_tokens"] == len(body["token_strs"])
    text = (await api.post("/detokenize", {"tokens": body["tokens"]})).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [1, -1]}),
        ("/detokenize", {"tokens": [1, "-1"]}),
        ("/v1/completions", {"prompt": [1, -1]}),
    ],
)
async def test_ids_that_no_tokenizer_has_are_refused(
    api: Any, path: str, body: dict[str, Any]
) -> None:
    """A 400, not a failure of the engine."""
    assert (await api.post(path, body)).status_code == 400


async def test_stop_string_cuts_the_answer(api: Any) -> None:
    """The text ends before the stop string, whole and streamed; the engine stops computing."""
    whole = await api.complete(max_tokens=60)
    stop = whole["choices"][0]["text"][10:13]
    before = whole["choices"][0]["text"].partition(stop)[0]
    stopped = await api.complete(max_tokens=60, stop=stop)
    *chunks, _end = await api.stream(
        "/v1/completions", {"prompt": "hello", "max_tokens": 60, "stop": [stop]}
    )

    choice = stopped["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        before,
        "stop",
        stop,
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == before
    await api.wait_until(running=0, in_flight=0)


async def test_echo_returns_the_prompt_first(api: Any) -> None:
    """Text prompts come back before the answer, whole and streamed."""
    plain = await api.complete()
    echoed = await api.complete(echo=True)
    chunk, *_rest = await api.stream(
        "/v1/completions", {"prompt": "hello", "max_tokens": 2, "echo": True}
    )

    assert echoed["choices"][0]["text"] == "hello" + plain["choices"][0]["text"]
    assert chunk["choices"][0]["text"] == "hello"


async def test_prompt_logprobs_skip_the_cache(api: Any) -> None:
    """One entry per prompt token, computed anew."""
    await api.complete(prompt="word " * 20)
    answer = await api.complete(prompt="word " * 20, prompt_logprobs=1)

    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(answer["choices"][0]["prompt_logprobs"]) == 101
    assert answer["choices"][0]["prompt_logprobs"][0] is None


async def test_logprobs_are_given_per_token(api: Any) -> None:
    """Completions and chat have their own shapes for them."""
    completion = await api.complete(logprobs=1)
    chat = await api.chat("hi", max_tokens=3, logprobs=True, top_logprobs=1)

    assert completion["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert len(chat["choices"][0]["logprobs"]["content"]) == 3


async def test_request_id_names_the_answer(api: Any) -> None:
    """The header wins over the body; both get the prefix of the path."""
    named = await api.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": "b"}, X_Request_Id="h"
    )
    by_body = await api.complete(request_id="b")

    assert named.json()["id"] == "cmpl-h"
    assert by_body["id"] == "cmpl-b"


async def test_adapter_is_served_under_its_name(api: Any) -> None:
    """Adapters are listed below their base model and have their own cache."""
    cards = (await api.client.get("/v1/models")).json()["data"]
    await api.complete(prompt="word " * 20)
    answer = await api.complete(prompt="word " * 20, model="sql")

    assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
        ("sim", None, 8176),
        ("sql", "sim", None),
    ]
    assert answer["model"] == "sql"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_truncation_keeps_the_end_of_the_prompt(api: Any) -> None:
    """-1 keeps as much as the model takes, a number that many tokens."""
    kept = await api.complete(prompt="abcdef", truncate_prompt_tokens=3, return_token_ids=True)
    most = await api.post(
        "/v1/completions", {"prompt": "a" * 9000, "truncate_prompt_tokens": -1, "max_tokens": 1}
    )

    assert kept["choices"][0]["prompt_token_ids"] == list(b"def")
    assert most.status_code == 400  # no room for an answer is left


async def test_concurrent_answers_are_those_of_one_at_a_time(api: Any) -> None:
    """Batching changes nothing about a text."""
    prompts = [f"prompt {index}" for index in range(12)]
    alone = [
        (await api.complete(prompt=prompt, max_tokens=24))["choices"][0]["text"]
        for prompt in prompts
    ]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(api.complete(prompt=prompt, max_tokens=24)) for prompt in prompts
        ]

    assert [task.result()["choices"][0]["text"] for task in tasks] == alone
