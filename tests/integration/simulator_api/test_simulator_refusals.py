"""What a simulated engine refuses, in the words and forms of vLLM."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

HELLO = {"role": "user", "content": "a"}

Started = Callable[..., AbstractAsyncContextManager[Any]]


async def test_body_that_breaks_off_does_no_harm(api: Any) -> None:
    """A client that leaves while sending is forgotten."""
    host, port = api.engine.url.removeprefix("http://").split(":")
    _reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    assert (await api.complete())["usage"]["completion_tokens"] == 4


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
            {"prompt": "a", "stream": True, "stream_options": {"include_usage": "perhaps"}},
            400,
            "stream_options.include_usage",
            id="stream-options-of-wrong-type",
        ),
        pytest.param(
            {"prompt": "a", "stream": True, "prompt_logprobs": 1},
            400,
            "not available",
            id="streamed-prompt-logprobs",
        ),
        pytest.param({"prompt": "a", "logprobs": -2}, 400, "`logprobs`", id="logprobs-negative"),
        pytest.param({"prompt": "a", "logprobs": 21}, 400, "at most 20", id="logprobs-too-many"),
        pytest.param({"prompt": "a", "prompt_logprobs": 21}, 400, "at most 20", id="of-the-prompt"),
        pytest.param(
            {"prompt": "a", "logprob_token_ids": [1]}, 400, "need `logprobs`", id="token-ids-alone"
        ),
        pytest.param(
            {"prompt": "a", "logprobs": 1, "logprob_token_ids": [1], "use_beam_search": True},
            400,
            "beam search",
            id="token-ids-with-beams",
        ),
        pytest.param({"prompt": "a", "use_beam_search": None}, 400, "use_beam_search", id="beams"),
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
async def test_bad_completion_is_refused(api: Any, body: Any, status: int, words: str) -> None:
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
        pytest.param({"messages": [HELLO], "logprobs": 2}, "logprobs", id="logprobs-are-no-number"),
        pytest.param({"messages": [HELLO], "top_logprobs": 2}, "logprobs", id="top-logprobs-alone"),
        pytest.param({"messages": [HELLO], "echo": None}, "echo", id="echo-null"),
        pytest.param(
            {"messages": [HELLO], "logprob_token_ids": [1], "logprobs": False},
            "need `logprobs`",
            id="token-ids-alone",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0},
            "max_tokens",
            id="max-completion-tokens-wins",
        ),
    ],
)
async def test_bad_chat_is_refused(api: Any, body: Any, words: str) -> None:
    """Chat bodies are checked as completions are."""
    response = await api.post("/v1/chat/completions", body)

    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        pytest.param({"max_tokens": "3"}, 3, id="text"),
        pytest.param({"max_tokens": 3.0}, 3, id="float"),
        pytest.param({"max_tokens": True}, 1, id="boolean"),
        pytest.param({"max_tokens": 3, "max_completion_tokens": 0}, 3, id="no-such-field"),
    ],
)
async def test_numbers_are_read_as_vllm_reads_them(
    api: Any, limits: dict[str, Any], tokens: int
) -> None:
    """Its models aren't strict, and pass over fields that they don't have."""
    answer = await api.complete(ignore_eos="yes", temperature="0", **limits)

    assert answer["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize(
    "limits",
    [{"min_tokens": None}, {"n": None}, {"max_tokens": "null"}, {"max_tokens": 2.5}],
    ids=repr,
)
async def test_other_values_are_no_numbers(api: Any, limits: dict[str, Any]) -> None:
    """Refused by the field's name."""
    response = await api.post("/v1/completions", {"prompt": "a", **limits})

    assert response.status_code == 400
    assert response.json()["error"]["param"] in limits


async def test_tokenize_needs_something_to_tokenize(api: Any) -> None:
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
    api: Any, content: bytes, content_type: str, words: str
) -> None:
    """What can't be parsed is refused with 400 in the ordinary form."""
    headers = {"content-type": content_type}
    response = await api.client.post("/v1/completions", content=content, headers=headers)

    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_media_type_may_have_parameters(api: Any) -> None:
    """A charset after the type is fine."""
    response = await api.client.post(
        "/v1/completions",
        content=b'{"prompt":"a","max_tokens":1}',
        headers={"content-type": "application/json; charset=utf-8"},
    )

    assert response.status_code == 200


async def test_old_release_sends_flat_errors(started_engine: Started) -> None:
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
    api: Any, method: str, path: str, status: int
) -> None:
    """404 and 405 have the shape of other errors."""
    response = await api.client.request(method, path)

    assert response.status_code == status
    assert response.json()["error"]["code"] == status


async def test_key_guards_the_api_and_nothing_else(started_engine: Started) -> None:
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


async def test_queue_limit_refuses_with_503(started_engine: Started) -> None:
    """Beyond the limit a request is refused and counted, and served again when there is room."""
    async with started_engine(max_queued_requests=1, inter_token_ms=5) as api:
        async with asyncio.TaskGroup() as group:
            long = group.create_task(api.complete(max_tokens=4000, ignore_eos=True))
            await api.wait_until(running=1)
            refused = await api.post("/v1/completions", {"prompt": "a"})
            long.cancel()
        await api.wait_until(running=0)
        served = await api.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        metrics = (await api.client.get("/metrics")).text

    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    assert served.status_code == 200
    assert 'vllm:admission_rejections_total{engine="0",model_name="sim",reason="queue_full"} 1' in (
        metrics
    )


async def test_kept_responses_need_the_store(started_engine: Started) -> None:
    """Off by default, as in vLLM: an answer that is given is not kept."""
    async with started_engine() as one:
        made = await one.post("/v1/responses", {"input": "hello", "max_output_tokens": 2})
        kept = await one.client.get(f"/v1/responses/{made.json()['id']}")

    assert made.json()["status"] == "incomplete"
    assert kept.status_code == 404
    assert kept.json()["error"]["message"].endswith("not found.")


@pytest.mark.parametrize(
    ("serves", "path", "status"),
    [
        ("generate", "/v1/embeddings", 404),
        ("pooling", "/v1/chat/completions", 404),
        ("pooling", "/v1/responses/resp_1", 404),
        ("transcription", "/rerank", 404),
    ],
)
async def test_other_kinds_of_models_have_other_paths(
    serves: str, path: str, status: int, started_engine: Started
) -> None:
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
async def test_pooling_refusals(
    path: str, body: Any, message: str, started_engine: Started
) -> None:
    """400, in the words of vLLM."""
    async with started_engine(serves="pooling") as one:
        answer = await one.post(path, body)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_messages_are_refused_in_their_own_form(started_engine: Started) -> None:
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
