"""A simulated engine over HTTP: the shapes, refusals and streams of vLLM."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, running_fleet

Started = Callable[..., AbstractAsyncContextManager["Api"]]


class Api:
    """One engine and a client for it."""

    def __init__(self, engine: RunningEngine, client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.client = client

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=named)

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", {"prompt": "hello", "max_tokens": 4} | body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def chat(self, *contents: str, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content} for content in contents]
        response = await self.post("/v1/chat/completions", {"messages": messages} | body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, path: str, body: Any) -> list[Any]:
        """Return the events of a stream, the end marker as it is."""
        response = await self.post(path, body | {"stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    async def state(self) -> dict[str, Any]:
        """Return the state of rank 0."""
        answer: dict[str, Any] = (await self.client.get("/simulator/state")).json()["ranks"][0]
        return answer

    async def wait_until(self, **expected: int) -> None:
        """Wait until the state of rank 0 has these values."""
        async with asyncio.timeout(5):
            while True:
                state = await self.state()
                if all(state[name] == value for name, value in expected.items()):
                    return
                await asyncio.sleep(0.005)


@asynccontextmanager
async def started_engine(**settings: Any) -> AsyncIterator[Api]:
    fast = {"prefill_tokens_per_s": 1e6, "inter_token_ms": 0.5, "num_blocks": 512}
    engine = EngineSettings(**(fast | settings))
    async with (
        running_fleet(FleetSpec.parse("1"), engine=engine) as fleet,
        httpx.AsyncClient(base_url=fleet.engines[0].url) as client,
    ):
        yield Api(fleet.engines[0], client)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with started_engine(adapters=("sql",)) as api:
        yield api


async def test_completion_has_the_shape_of_vllm(api: Api) -> None:
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


async def test_chat_has_the_shape_of_vllm(api: Api) -> None:
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


async def test_repeated_prompt_is_cached_and_answered_alike(api: Api) -> None:
    """The second answer is the same text with cached tokens."""
    first = await api.complete(prompt="word " * 20)
    second = await api.complete(prompt="word " * 20)

    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_next_turn_hits_prompt_and_answer(api: Api) -> None:
    """A conversation's next turn finds everything but its new message."""
    messages = [{"role": "user", "content": "question " * 10}]
    first = await api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 40})
    messages.append(first.json()["choices"][0]["message"])
    messages.append({"role": "user", "content": "and then?"})
    second = await api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})

    known_tokens = first.json()["usage"]["total_tokens"] - 1
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == known_tokens // 16 * 16


async def test_old_release_says_nothing_cached_with_null() -> None:
    """Up to 0.25 no cached tokens is no object."""
    async with started_engine(version="0.16.0") as api:
        answer = await api.complete(prompt="word " * 20)
        again = await api.complete(prompt="word " * 20)

    assert answer["usage"]["prompt_tokens_details"] is None
    assert answer["system_fingerprint"] is None
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}


async def test_completion_stream_gives_the_text_of_the_whole_answer(api: Api) -> None:
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


async def test_chat_stream_opens_with_the_role_and_has_usage_only_on_request(api: Api) -> None:
    """The first chunk is the role, and without the option no usage chunk comes."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    opening, *chunks, end = await api.stream("/v1/chat/completions", body)

    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert end == "[DONE]"


async def test_usage_rides_on_every_chunk_on_request(api: Api) -> None:
    """`continuous_usage_stats` counts as the answer grows."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _usage, _end = await api.stream(
        "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream_options": options}
    )

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


async def test_chat_stream_ends_with_usage_on_request(api: Api) -> None:
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


async def test_streamed_token_ids_come_with_the_first_chunk(api: Api) -> None:
    """`return_token_ids` gives the prompt's ids once and every token's id."""
    *chunks, _end = await api.stream(
        "/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 3, "return_token_ids": True}
    )

    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["prompt_token_ids"] for choice in choices] == [[7, 8, 9], None, None]
    assert bytes(token for choice in choices for token in choice["token_ids"]).decode() == "".join(
        choice["text"] for choice in choices
    )


async def test_answer_ends_by_itself_and_the_end_has_no_text(api: Api) -> None:
    """Without a limit that is reached the answer stops; the end token counts but isn't text."""
    answer = await api.complete(max_tokens=400, return_token_ids=True)

    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["token_ids"][-1] == 258
    assert len(choice["text"]) == len(choice["token_ids"]) - 1
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


async def test_nothing_stops_before_min_tokens(api: Api) -> None:
    """Neither a stop string nor the end of the text counts before `min_tokens`."""
    free = (await api.complete(max_tokens=60))["choices"][0]["text"]
    bound = await api.complete(max_tokens=60, min_tokens=30, stop=free[5])

    assert bound["usage"]["completion_tokens"] >= 30


async def test_large_body_in_pieces_is_read_whole(api: Api) -> None:
    """A body larger than one network read is put together."""
    answer = await api.complete(prompt=[1] * 8000, max_tokens=1)

    assert answer["usage"]["prompt_tokens"] == 8000


async def test_body_that_breaks_off_does_no_harm(api: Api) -> None:
    """A client that leaves while sending is forgotten."""
    host, port = api.engine.url.removeprefix("http://").split(":")
    _reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    assert (await api.complete())["usage"]["completion_tokens"] == 4


async def test_several_answers_differ_and_the_first_is_the_ordinary_one(api: Api) -> None:
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
async def test_several_prompts_are_several_choices(api: Api, prompt: Any) -> None:
    """Each prompt gets its choice; ids are taken as they are."""
    answer = await api.complete(prompt=prompt, return_token_ids=True)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    if isinstance(prompt[0], list):
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompt


async def test_token_ids_of_a_prompt_and_its_text_are_the_same_prompt(api: Api) -> None:
    """What /tokenize says is what the engine computes."""
    tokens = (await api.post("/tokenize", {"prompt": "word " * 20})).json()["tokens"]
    text = await api.complete(prompt="word " * 20)
    ids = await api.complete(prompt=tokens)

    assert ids["choices"][0]["text"] == text["choices"][0]["text"]
    assert ids["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_tokenize_renders_a_chat_as_chat_does(api: Api) -> None:
    """The chat form gives the prompt's length and ids, with texts on request."""
    messages = [{"role": "user", "content": "hi"}]
    tokens = await api.post("/tokenize", {"messages": messages, "return_token_strs": True})
    answer = await api.chat("hi", max_tokens=1, return_token_ids=True)

    body = tokens.json()
    assert body["tokens"] == answer["prompt_token_ids"]
    assert body["count"] == answer["usage"]["prompt_tokens"] == len(body["token_strs"])
    text = (await api.post("/detokenize", {"tokens": body["tokens"]})).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_stop_string_cuts_the_answer(api: Api) -> None:
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


async def test_echo_returns_the_prompt_first(api: Api) -> None:
    """Text prompts come back before the answer, whole and streamed."""
    plain = await api.complete()
    echoed = await api.complete(echo=True)
    chunk, *_rest = await api.stream(
        "/v1/completions", {"prompt": "hello", "max_tokens": 2, "echo": True}
    )

    assert echoed["choices"][0]["text"] == "hello" + plain["choices"][0]["text"]
    assert chunk["choices"][0]["text"] == "hello"


async def test_prompt_logprobs_skip_the_cache(api: Api) -> None:
    """One entry per prompt token, computed anew."""
    await api.complete(prompt="word " * 20)
    answer = await api.complete(prompt="word " * 20, prompt_logprobs=1)

    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(answer["choices"][0]["prompt_logprobs"]) == 101
    assert answer["choices"][0]["prompt_logprobs"][0] is None


async def test_logprobs_are_given_per_token(api: Api) -> None:
    """Completions and chat have their own shapes for them."""
    completion = await api.complete(logprobs=1)
    chat = await api.chat("hi", max_tokens=3, logprobs=True, top_logprobs=1)

    assert completion["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert len(chat["choices"][0]["logprobs"]["content"]) == 3


async def test_request_id_names_the_answer(api: Api) -> None:
    """The header wins over the body; both get the prefix of the path."""
    named = await api.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": "b"}, X_Request_Id="h"
    )
    by_body = await api.complete(request_id="b")

    assert named.json()["id"] == "cmpl-h"
    assert by_body["id"] == "cmpl-b"


async def test_adapter_is_served_under_its_name(api: Api) -> None:
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


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        pytest.param({"prompt": ""}, 400, "non-empty", id="empty-prompt"),
        pytest.param({"prompt": []}, 400, "non-empty", id="no-prompt-at-all"),
        pytest.param({"prompt": [""]}, 400, "expected strings", id="empty-prompt-in-a-list"),
        pytest.param({"prompt": 5}, 400, "prompt", id="prompt-of-wrong-type"),
        pytest.param({"prompt": [1, "a"]}, 400, "integers", id="mixed-ids"),
        pytest.param({"prompt": [10**6]}, 400, "vocabulary", id="unknown-token"),
        pytest.param({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", id="max-tokens-zero"),
        pytest.param(
            {"prompt": "a", "max_tokens": 1, "min_tokens": 2},
            400,
            "min_tokens must be less than or equal to max_tokens=1",
            id="min-tokens-above-max-tokens",
        ),
        pytest.param(
            {"prompt": "a", "stream_options": {"include_usage": True}},
            400,
            "Stream options",
            id="stream-options-without-stream",
        ),
        pytest.param(
            {"prompt": "a", "stream": True, "prompt_logprobs": 1},
            400,
            "not available",
            id="streamed-prompt-logprobs",
        ),
        pytest.param({"prompt": "a" * 9000}, 400, "maximum context length", id="prompt-too-long"),
        pytest.param(
            {"prompt": "a" * 8000, "max_tokens": 500}, 400, "requested 500", id="answer-too-long"
        ),
        pytest.param({"prompt": "a", "n": 0}, 400, "n must be", id="no-choice"),
        pytest.param({"prompt": "a", "n": 129}, 400, "n must be at most 128, got 129", id="n"),
        pytest.param({"prompt": "a", "best_of": 129}, 400, "best_of must be at most", id="best-of"),
        pytest.param({"prompt": "a", "temperature": -1}, 400, "temperature", id="temperature"),
        pytest.param({"prompt": "a", "top_p": 0}, 400, "top_p", id="top-p"),
        pytest.param({"prompt": "a", "cache_salt": ""}, 400, "cache_salt", id="empty-salt"),
        pytest.param(
            {"prompt": "a", "truncate_prompt_tokens": -2}, 400, "truncate", id="truncation"
        ),
        pytest.param({"prompt": "a", "model": "nope"}, 404, "does not exist", id="unknown-model"),
        pytest.param({"prompt": "a", "model": 42}, 400, "model", id="model-of-wrong-type"),
        pytest.param([], 400, "object", id="not-an-object"),
    ],
)
async def test_bad_completion_is_refused(api: Api, body: Any, status: int, words: str) -> None:
    """The status is vLLM's and the error names the fault."""
    response = await api.post("/v1/completions", body)

    assert response.status_code == status
    error = response.json()["error"]
    assert words in error["message"]
    assert error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param({}, "messages", id="no-messages"),
        pytest.param({"messages": []}, "messages", id="empty-messages"),
        pytest.param(
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"},
            "untrusted",
            id="template",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0},
            "max_tokens",
            id="max-completion-tokens-wins",
        ),
    ],
)
async def test_bad_chat_is_refused(api: Api, body: Any, words: str) -> None:
    """Chat bodies are checked as completions are."""
    response = await api.post("/v1/chat/completions", body)

    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_tokenize_needs_something_to_tokenize(api: Api) -> None:
    """Neither prompt nor messages is a bad request."""
    assert (await api.post("/tokenize", {})).status_code == 400


@pytest.mark.parametrize(
    ("content", "content_type", "words"),
    [
        pytest.param(b'{"prompt', "application/json", "JSON", id="malformed"),
        pytest.param(b"\xff", "application/json", "JSON", id="not-utf-8"),
        pytest.param(b"{}", "text/plain", "Unsupported Media Type", id="media-type"),
    ],
)
async def test_unreadable_body_is_a_bad_request(
    api: Api, content: bytes, content_type: str, words: str
) -> None:
    """What can't be parsed is refused with 400 in the ordinary form."""
    headers = {"content-type": content_type}
    response = await api.client.post("/v1/completions", content=content, headers=headers)

    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_media_type_may_have_parameters(api: Api) -> None:
    """A charset after the type is fine."""
    response = await api.client.post(
        "/v1/completions",
        content=b'{"prompt":"a","max_tokens":1}',
        headers={"content-type": "application/json; charset=utf-8"},
    )

    assert response.status_code == 200


async def test_truncation_keeps_the_end_of_the_prompt(api: Api) -> None:
    """-1 keeps as much as the model takes, a number that many tokens."""
    kept = await api.complete(prompt="abcdef", truncate_prompt_tokens=3, return_token_ids=True)
    most = await api.post(
        "/v1/completions", {"prompt": "a" * 9000, "truncate_prompt_tokens": -1, "max_tokens": 1}
    )

    assert kept["choices"][0]["prompt_token_ids"] == list(b"def")
    assert most.status_code == 400  # no room for an answer is left


async def test_old_release_sends_flat_errors() -> None:
    """Up to 0.10.0 the error is not nested."""
    async with started_engine(version="0.10.0") as api:
        response = await api.post("/v1/completions", {"prompt": "a", "model": "nope"})
        sources = await api.client.get("/kv_event_sources")

    assert response.json()["object"] == "error"
    assert response.json()["code"] == 404
    assert sources.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
    ],
)
async def test_unknown_routes_answer_in_the_error_form(
    api: Api, method: str, path: str, status: int
) -> None:
    """404 and 405 have the shape of other errors."""
    response = await api.client.request(method, path)

    assert response.status_code == status
    assert response.json()["error"]["code"] == status


async def test_key_guards_the_api_and_nothing_else() -> None:
    """Without the key /v1 is closed with a shape of its own; probes and /tokenize are open."""
    async with started_engine(api_key="k1") as api:
        closed = await api.client.get("/v1/models")
        opened = await api.client.get("/v1/models", headers={"authorization": "Bearer k1"})
        probes = [
            (await api.client.get(path)).status_code
            for path in ("/health", "/metrics", "/version", "/load", "/kv_event_sources")
        ]
        tokens = await api.post("/tokenize", {"prompt": "a"})

    assert (closed.status_code, closed.json()) == (401, {"error": "Unauthorized"})
    assert opened.status_code == 200
    assert probes == [200] * 5
    assert tokens.status_code == 200


async def test_queue_limit_refuses_with_503() -> None:
    """Beyond the limit a request is refused and counted, and served again when there is room."""
    async with started_engine(max_queued_requests=1, inter_token_ms=5) as api:
        async with asyncio.TaskGroup() as group:
            long = group.create_task(api.complete(max_tokens=100, ignore_eos=True))
            await api.wait_until(running=1)
            refused = await api.post("/v1/completions", {"prompt": "a"})
            assert not long.done()
        served = await api.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        metrics = (await api.client.get("/metrics")).text

    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    assert served.status_code == 200
    assert 'vllm:admission_rejections_total{engine="0",model_name="sim",reason="queue_full"} 1' in (
        metrics
    )


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_client_that_leaves_stops_the_engine(api: Api, stream: bool) -> None:
    """A closed connection aborts the request (F41, F42)."""
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await api.client.post("/v1/completions", json=body)

    await api.wait_until(running=0, in_flight=0)
    assert (await api.state())["finished"] == {"abort": 1}


async def test_concurrent_answers_are_those_of_one_at_a_time(api: Api) -> None:
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


async def test_metrics_count_under_the_names_of_vllm(api: Api) -> None:
    """Tokens asked, hit, computed and generated, by model and rank."""
    await api.complete(prompt="word " * 20)
    await api.complete(prompt="word " * 20)
    text = (await api.client.get("/metrics")).text
    values = {
        (sample.name, sample.labels.get("source") or sample.labels.get("finished_reason")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    assert values["vllm:prefix_cache_queries_total", None] == 202
    assert values["vllm:prefix_cache_hits_total", None] == 96
    assert values["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 96
    assert values["vllm:prompt_tokens_by_source_total", "local_compute"] == 106
    assert values["vllm:generation_tokens_total", None] == 8
    assert values["vllm:request_success_total", "length"] == 2
    assert values["vllm:time_to_first_token_seconds_count", None] == 2
    assert values["vllm:inter_token_latency_seconds_count", None] == 6
    assert values["vllm:num_requests_running", None] == 0
    assert values["vllm:kv_cache_usage_perc", None] == 0
    assert 'num_gpu_blocks="512"' in text


async def test_what_came_in_can_be_looked_at(api: Api) -> None:
    """Tests see path, headers and body of every request."""
    await api.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, X_Request_Id="me")

    received = api.engine.engine.received[-1]
    assert received.path == "/v1/completions"
    assert received.headers["x-request-id"] == "me"
    assert json.loads(received.body)["prompt"] == "a"


async def test_prefix_cache_can_be_reset_while_idle(api: Api) -> None:
    """A reset forgets everything."""
    await api.complete(prompt="word " * 20)
    reset = await api.client.post("/reset_prefix_cache")
    after = await api.complete(prompt="word " * 20)

    assert reset.json() == {"success": True}
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_prefix_cache_cannot_be_reset_while_a_request_runs() -> None:
    """A reset that finds blocks in use says that it failed."""
    async with started_engine(inter_token_ms=10) as api, asyncio.TaskGroup() as group:
        running = group.create_task(api.complete(max_tokens=1000, ignore_eos=True))
        await api.wait_until(running=1)
        busy = await api.client.post("/reset_prefix_cache")
        running.cancel()

    assert busy.json() == {"success": False}


async def test_lone_probes_answer(api: Api) -> None:
    """Health is empty, version and load are small objects."""
    assert (await api.client.get("/health")).content == b""
    assert (await api.client.get("/version")).json() == {"version": "0.33.0"}
    assert (await api.client.get("/load")).json() == {"server_load": 0}


async def test_kept_responses_need_the_store() -> None:
    """Off by default, as in vLLM: an answer that is given is not kept."""
    async with started_engine() as one:
        made = await one.post("/v1/responses", {"input": "hello", "max_output_tokens": 2})
        kept = await one.client.get(f"/v1/responses/{made.json()['id']}")

    assert made.json()["status"] == "incomplete"
    assert kept.status_code == 404
    assert kept.json()["error"]["message"].endswith("not found.")


async def test_stream_of_a_response_is_named_events() -> None:
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


@pytest.mark.parametrize(
    ("serves", "path", "status"),
    [
        ("generate", "/v1/embeddings", 404),
        ("pooling", "/v1/chat/completions", 404),
        ("pooling", "/v1/responses/resp_1", 404),
        ("transcription", "/rerank", 404),
    ],
)
async def test_other_kinds_of_models_have_other_paths(serves: str, path: str, status: int) -> None:
    """Where a router was never mounted the framework answers."""
    async with started_engine(serves=serves) as one:
        answer = await one.post(path, {})

    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "Not Found"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": []}, "at least one"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "Input lengths"),
        ("/v1/embeddings", {"input": "x" * 40_000}, "maximum context length"),
    ],
)
async def test_pooling_refusals(path: str, body: Any, message: str) -> None:
    """400, in the words of vLLM."""
    async with started_engine(serves="pooling") as one:
        answer = await one.post(path, body)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_messages_are_refused_in_their_own_form() -> None:
    """But a body that can't be read in the form of every path."""
    hello = [{"role": "user", "content": "hello"}]
    async with started_engine() as one:
        unknown = await one.post(
            "/v1/messages", {"model": "nope", "messages": hello, "max_tokens": 1}
        )
        unread = await one.post("/v1/messages", {"messages": hello})
        counted = await one.post("/v1/messages/count_tokens", {"model": "nope", "messages": hello})

    assert unknown.json() == counted.json()
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    assert (unread.status_code, unread.json()["error"]["type"]) == (400, "Bad Request")
