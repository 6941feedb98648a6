"""Prefill and decode legs under requests that broke other proxies, before engines that insist on their rules."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

BLOCK = 16
PROMPT = list(range(1_000, 1_400))
LETTERS = "the quick brown fox jumps over the lazy dog; "
CONTEXT = 32768
ALWAYS_REMOTE = {"force": "remote", "local_prefill_max_tokens": 0}

Pair = Callable[[], AbstractAsyncContextManager["Stage"]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """kvlb before a prefill and a decode engine, and an engine of the same kind that does both."""

    kvlb: Any
    prefill: Any
    decode: Any
    alone: Any

    async def ask(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        asked = {"model": "sim", **body}
        answer: httpx.Response = await self.kvlb.http.post(
            self.kvlb.url + path, json=asked, headers=headers
        )
        return answer

    async def ask_alone(self, body: dict[str, Any]) -> httpx.Response:
        """What one engine says to the same."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer: httpx.Response = await self.kvlb.http.post(
            self.alone.url + path, json={"model": "sim", **body}
        )
        return answer

    def legs(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Bodies that came to the prefill and to the decode engine."""
        return bodies(self.prefill), bodies(self.decode)


def asked(engine: Any) -> list[Any]:
    return [
        each
        for each in engine.engine.received
        if each.method == "POST" and each.path.endswith("completions")
    ]


def bodies(engine: Any) -> list[dict[str, Any]]:
    return [json.loads(each.body) for each in asked(engine)]


@pytest.fixture
def pair_up(kvlb_up: Any, engines_up: Any, describe: Callable[..., dict[str, Any]]) -> Pair:
    """Starts the three, and waits until kvlb knows two of them."""

    @asynccontextmanager
    async def start() -> AsyncIterator[Stage]:
        async with engines_up("1p1d1m") as fleet:
            prefill, decode, alone = fleet.engines
            entries = [
                describe(each, role=each.role, connector="nixl") for each in (prefill, decode)
            ]
            async with kvlb_up(entries, pd=ALWAYS_REMOTE) as kvlb:
                await kvlb.all_known(["p0", "d0"])
                yield Stage(kvlb=kvlb, prefill=prefill, decode=decode, alone=alone)

    return start


async def test_f31_a_lower_limit_of_the_answer_is_no_limit_of_the_prefill_leg(
    pair_up: Pair,
) -> None:
    """Engines refuse `min_tokens` above `max_tokens`; decode keeps both."""
    async with pair_up() as stage:
        answer = await stage.ask({"prompt": PROMPT, "max_tokens": 120, "min_tokens": 100})
        (prefill,), (decode,) = stage.legs()

    assert answer.json()["usage"]["completion_tokens"] >= 100
    assert (prefill["max_tokens"], prefill["min_tokens"]) == (1, 1)
    assert (decode["max_tokens"], decode["min_tokens"]) == (120, 100)


@pytest.mark.parametrize("path", ["completions", "chat"])
@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}], ids=["absent", "null"])
async def test_f32_a_limit_that_nobody_set_is_not_set_by_us(
    pair_up: Pair, path: str, limit: dict[str, Any]
) -> None:
    """Absent stays absent and null null: the answer is what one engine says."""
    chat = {"messages": [{"role": "user", "content": LETTERS * 4}]}
    body = {**(chat if path == "chat" else {"prompt": PROMPT}), **limit}
    async with pair_up() as stage:
        answer = await stage.ask(body)
        expected = await stage.ask_alone(body)
        (_,), (decode,) = stage.legs()

    assert text_of(answer) == text_of(expected) != ""
    assert {name: decode[name] for name in decode if name == "max_tokens"} == limit


@pytest.mark.parametrize(
    ("path", "limits"),
    [
        pytest.param("completions", {"max_tokens": 0}, id="none"),
        pytest.param("completions", {"max_tokens": 10**7}, id="over the context"),
        pytest.param("completions", {"max_tokens": CONTEXT - 399}, id="over it with the prompt"),
        pytest.param("chat", {"max_completion_tokens": 10**7}, id="of a chat"),
        pytest.param("chat", {"max_tokens": 3, "logprobs": 2}, id="logprobs of a completion"),
    ],
)
async def test_f32_a_limit_of_none_is_refused_by_the_engine_before_any_work(
    pair_up: Pair, path: str, limits: dict[str, Any]
) -> None:
    """The decode engine's own words; the prefill engine hears nothing of it."""
    chat = {"messages": [{"role": "user", "content": LETTERS * 6}]}
    body = {**(chat if path == "chat" else {"prompt": PROMPT}), **limits}
    async with pair_up() as stage:
        answer = await stage.ask(body)
        expected = await stage.ask_alone(body)
        prefills, _ = stage.legs()

    assert (answer.status_code, answer.json()) == (expected.status_code, expected.json())
    assert answer.status_code == 400
    assert prefills == []


@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": "5"},
        {"max_tokens": 5.0},
        {"max_tokens": True},
        {"max_tokens": 5, "max_completion_tokens": 0},
    ],
    ids=repr,
)
async def test_f32_a_limit_that_engines_take_is_split_as_it_is(
    pair_up: Pair, limits: dict[str, Any]
) -> None:
    """Numbers by another type, and a field that completions don't have."""
    async with pair_up() as stage:
        answer = await stage.ask({"prompt": PROMPT, **limits})
        expected = await stage.ask_alone({"prompt": PROMPT, **limits})
        (prefill,), (decode,) = stage.legs()

    assert text_of(answer) == text_of(expected) != ""
    assert prefill["max_tokens"] == 1
    assert {name: decode[name] for name in limits} == limits


async def test_f33_a_stream_is_of_the_decode_leg_only(pair_up: Pair) -> None:
    """Engines refuse `stream_options` without a stream; the client's is whole, with its usage."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with pair_up() as stage:
        answer = await stage.ask({"prompt": PROMPT, "max_tokens": 20, **streamed})
        expected = await stage.ask_alone({"prompt": PROMPT, "max_tokens": 20})
        (prefill,), (decode,) = stage.legs()

    *events, end = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    said = [json.loads(event) for event in events]
    assert end == "[DONE]"
    assert "".join(each["choices"][0]["text"] for each in said[:-1]) == text_of(expected)
    assert said[-1]["usage"]["completion_tokens"] == 20
    assert prefill["stream"] is False
    assert "stream_options" not in prefill
    assert (decode["stream"], decode["stream_options"]) == (True, {"include_usage": True})


@pytest.mark.parametrize(
    "wanted",
    [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 3}],
    ids=["prompt_logprobs", "echo"],
)
async def test_f34_what_needs_every_position_is_computed_where_it_is_answered(
    pair_up: Pair, wanted: dict[str, Any]
) -> None:
    """One leg: blocks that were handed over have no logits."""
    body = {"prompt": PROMPT, "max_tokens": 4, **wanted}
    async with pair_up() as stage:
        answer = await stage.ask(body)
        expected = await stage.ask_alone(body)
        prefills, (decode,) = stage.legs()

    assert answer.json()["choices"] == expected.json()["choices"]
    assert prefills == []
    assert "kv_transfer_params" not in decode


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_f35_what_was_handed_over_was_not_cached(pair_up: Pair, stream: bool) -> None:
    """A client reads what the prefill engine found, cold and again."""
    options: dict[str, Any] = (
        {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    )
    cached = []
    async with pair_up() as stage:
        for _ in range(2):
            answer = await stage.ask({"prompt": PROMPT, "max_tokens": 4, **options})
            usage = (
                json.loads(answer.text.split("data: ")[-2])["usage"]
                if stream
                else answer.json()["usage"]
            )
            cached.append((usage["prompt_tokens_details"] or {}).get("cached_tokens"))

    assert cached == [0, len(PROMPT) - BLOCK]


@pytest.mark.parametrize("named", [True, False], ids=["the client's", "made up"])
async def test_f39_both_legs_and_the_answer_have_one_id(pair_up: Pair, named: bool) -> None:
    """Logs of both engines and of the client can be joined."""
    async with pair_up() as stage:
        headers = {"x-request-id": "abc"} if named else {}
        answer = await stage.ask({"prompt": PROMPT, "max_tokens": 2}, **headers)
        ids = {
            each.headers["x-request-id"]
            for engine in (stage.prefill, stage.decode)
            for each in asked(engine)
        }

    assert ids == {answer.headers["x-request-id"]}
    assert ids == {"abc"} or not named


@pytest.mark.parametrize("tokens", [20 * BLOCK - 1, 20 * BLOCK, 20 * BLOCK + 1])
async def test_f40_decode_gets_the_clients_prompt_and_says_its_first_token(
    pair_up: Pair, tokens: int
) -> None:
    """Around a whole number of blocks: nothing appended, none lost, none twice."""
    body = {"prompt": PROMPT[:tokens], "max_tokens": 12}
    async with pair_up() as stage:
        answer = await stage.ask(body)
        expected = await stage.ask_alone(body)
        (prefill,), (decode,) = stage.legs()

    assert text_of(answer) == text_of(expected)
    assert answer.json()["usage"]["completion_tokens"] == 12
    assert prefill["prompt"] == decode["prompt"] == body["prompt"]


async def test_x2_four_choices_are_computed_where_they_are_answered(pair_up: Pair) -> None:
    """A hand-over serves one of them; none costs a prefill leg anything."""
    async with pair_up() as stage:
        answer = await stage.ask({"prompt": PROMPT, "max_tokens": 4, "n": 4, "temperature": 1.0})
        prefills, (decode,) = stage.legs()

    assert len(answer.json()["choices"]) == 4
    assert decode["n"] == 4
    assert prefills == []


async def test_x3_what_shapes_an_answer_shapes_no_prefill_leg(pair_up: Pair) -> None:
    """A forced tool, stop strings, biases and logprobs: the prefill leg ends by its length."""
    body = {
        "messages": [{"role": "user", "content": LETTERS * 6}],
        "max_tokens": 30,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "stop": ["e"],
        "logit_bias": {"7": 5},
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 3,
    }
    async with pair_up() as stage:
        answer = await stage.ask(body)
        expected = await stage.ask_alone(body)
        (prefill,), (decode,) = stage.legs()

    assert answer.status_code == expected.status_code == 200
    assert answer.json()["choices"] == expected.json()["choices"]
    assert not {"logprobs", "top_logprobs"} & prefill.keys()
    assert decode.items() >= body.items()


@pytest.mark.parametrize("path", ["completions", "chat"])
async def test_x3_probabilities_of_named_tokens_are_asked_of_decode_alone(
    pair_up: Pair, path: str
) -> None:
    """Engines refuse `logprob_token_ids` without the `logprobs` that a prefill leg doesn't have."""
    chat = {"messages": [{"role": "user", "content": LETTERS * 6}], "logprobs": True}
    prompt = chat if path == "chat" else {"prompt": PROMPT, "logprobs": 1}
    body = {**prompt, "max_tokens": 4, "logprob_token_ids": [1, 2]}
    async with pair_up() as stage:
        answer = await stage.ask(body)
        expected = await stage.ask_alone(body)
        (prefill,), (decode,) = stage.legs()

    assert (answer.status_code, answer.json()["choices"]) == (200, expected.json()["choices"])
    assert "logprob_token_ids" not in prefill
    assert decode.items() >= body.items()


async def test_f36_no_prompt_is_computed_by_a_decode_engine_behind_our_back(
    pair_up: Pair,
) -> None:
    """All prefill engines are down and nobody may stand in: a 503 in OpenAI's form, soon."""
    async with pair_up() as stage:
        await stage.prefill.stop()
        async with asyncio.timeout(20):
            answer = await stage.ask({"prompt": PROMPT, "max_tokens": 4})
        decodes = bodies(stage.decode)

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] in {"prefill_failed", "no_prefill_instance"}
    assert decodes == []


def text_of(answer: httpx.Response) -> str:
    choice = answer.json()["choices"][0]
    said: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return said
