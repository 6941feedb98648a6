"""docs/migrating.md: every kvlb line in it serves the engines of the proxy that it replaces."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest
import yaml

from simulator.core import tokenizer
from simulator.core.chat_template import render_chat
from simulator.core.generation import seed_answer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

OnStage = Callable[[Any], AbstractAsyncContextManager[Any]]
ADMIN_KEY = "ADMIN_API_KEY=choose-one"


async def test_line_serves_what_the_proxy_served(documented: Any, on_stage: OnStage) -> None:
    """Completion and chat, whole and streamed: the right text, by the legs that the headers name."""
    async with on_stage(documented) as stage:
        is_split = any(each.role == "prefill" for each in stage.fleet.engines)
        for number, (path, stream) in enumerate(
            (path, stream)
            for path in ("/v1/completions", "/v1/chat/completions")
            for stream in (False, True)
        ):
            marker = f"request-{number}"
            answer = await stage.http.post(path, json=body(path, marker, stream=stream))

            assert answer.status_code == 200, answer.text
            assert told(answer, stream=stream) == expected_text(path, marker)
            roles = stage.roles_of(marker)
            if answer.headers["x-kvlb-prefill"] in {"none", "skipped"}:
                assert roles == ["decode" if is_split else "mixed"]
            else:
                assert sorted(roles) == ["decode", "prefill"]
            if is_split and number == 0:
                assert len(roles) == 2, answer.headers

        if any(each.role == "encode" for each in stage.fleet.engines):
            await check_encoders(stage)
        await check_pages(stage)
        if ADMIN_KEY in documented.line:
            await check_membership(stage)


async def test_limits_of_the_benchmark_proxy_limit(page: Any, on_stage: OnStage) -> None:
    """Its `--rate-limit` and `--queue-size`: what comes faster waits and is served, none too many."""
    documented = next(each for each in page.lines if "limits.yaml" in each.line)
    limits = yaml.safe_load(page.files["limits.yaml"])["admission"]
    sent = 4 * limits["requests_per_s"]  # long after a line would stand
    async with on_stage(documented) as stage:
        async with asyncio.TaskGroup() as group:
            asked = [body("/v1/completions", str(number), stream=False) for number in range(sent)]
            answers = [
                group.create_task(stage.http.post("/v1/completions", json=each)) for each in asked
            ]
        metrics = (await stage.http.get("/metrics")).text

    assert limits == {"requests_per_s": 40, "max_waiting": 500}
    assert {each.result().status_code for each in answers} == {200}
    waited = re.search(r'wait_seconds_count\{outcome="admitted"\} (\d+)', metrics)
    assert waited is not None
    assert int(waited[1]) > 0


async def check_encoders(stage: Any) -> None:
    """A picture is encoded by an encode engine, and nobody else runs an encoder."""
    part = {"type": "image_url", "image_url": {"url": "data:,cat"}}
    chat = body("/v1/chat/completions", "picture", stream=False)
    chat["messages"][0]["content"] = [{"type": "text", "text": "what is this?"}, part]
    answer = await stage.http.post("/v1/chat/completions", json=chat)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvlb-encode"] in {each.name for each in stage.fleet.engines}
    runs = {each.role: each.engine.encoder.counts.runs for each in stage.fleet.engines}
    assert runs.pop("encode") == 1
    assert set(runs.values()) == {0}


async def check_membership(stage: Any) -> None:
    """An engine leaves and comes by the example's own words, while everything runs."""
    headers = {"x-api-key": ADMIN_KEY.partition("=")[2]}
    before = (await stage.http.get("/status")).json()
    named = {"type": "decode", "instance": before["decode_nodes"][-1]}
    removed = await stage.http.post("/instances/remove", json=named, headers=headers)
    without = (await stage.http.get("/status")).json()
    added = await stage.http.post("/instances/add", json=named, headers=headers)
    after = (await stage.http.get("/status")).json()

    assert removed.is_success, removed.text
    assert added.status_code == 200, added.text
    assert without["decode_node_count"] == before["decode_node_count"] - 1
    assert sorted(after["decode_nodes"]) == sorted(before["decode_nodes"])


async def check_pages(stage: Any) -> None:
    """The paths that the proxies had beside those of OpenAI."""
    prefill = sum(each.role == "prefill" for each in stage.fleet.engines)
    counted = (await stage.http.get("/healthcheck")).json()
    status = (await stage.http.get("/status")).json()
    models = (await stage.http.get("/v1/models")).json()
    health = await stage.http.get("/health")

    assert counted["prefill_instances"] == status["prefill_node_count"] == prefill
    encode = sum(each.role == "encode" for each in stage.fleet.engines)
    assert status["encode_node_count"] == encode
    assert len(status["decode_nodes"]) == len(stage.fleet.engines) - prefill - encode
    assert [each["id"] for each in models["data"]] == ["sim"]
    assert health.status_code == 200


def body(path: str, marker: str, *, stream: bool) -> dict[str, Any]:
    """A request of about 2,000 tokens that begins as no other does."""
    told = f"{marker}: " + "say what there is to be said of it " * 60
    shape = (
        {"messages": [{"role": "user", "content": told}], "conversation_id": marker}
        if "chat" in path
        else {"prompt": told}
    )
    return {"model": "sim", "max_tokens": 12, "stream": stream, **shape}


def expected_text(path: str, marker: str) -> str:
    """What any engine says that has computed or read the prompt right."""
    asked = body(path, marker, stream=False)
    if "chat" in path:
        tokens = tokenizer.encode(render_chat(asked["messages"]), add_special_tokens=False)
    else:
        tokens = tokenizer.encode(asked["prompt"], add_special_tokens=True)
    sampler = seed_answer(tokens, 0)
    return tokenizer.decode([sampler.token_at(index, may_end=True) for index in range(12)])


def told(answer: httpx.Response, *, stream: bool) -> str:
    """The text of an answer."""
    if not stream:
        assert answer.headers["content-type"].startswith("application/json")
        return text_of(answer.json()["choices"][0])
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return "".join(map(text_of, choices))


def text_of(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta") or choice
    return said.get("content") or said.get("text") or ""
