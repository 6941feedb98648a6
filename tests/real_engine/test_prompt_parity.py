"""Ids of a running vLLM beside ours: every recorded request once more, templates sent along."""

import asyncio
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from balancer.core.prompt.any_shape import shape_prompt
from balancer.core.prompt.shape import ChatShape, TextShape, UnscorableError
from balancer.core.prompt.tokenize_body import tokenize_bodies
from balancer.core.request import Endpoint, GenerateRequest
from balancer.core.settings.control import EngineFlags
from balancer.tokens.directory import load_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TESTS = Path(__file__).parents[1]
TEMPLATES = TESTS / "chat_templates"
FLAGS = (
    "--trust-request-chat-template",
    "--enable-scale-out",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
)
StartEngines = Callable[..., AbstractContextManager[dict[str, Any]]]


@pytest.fixture(scope="module")
def url(start_engines: StartEngines) -> Iterator[str]:
    """One engine that takes templates from clients."""
    with start_engines("e0", flags=FLAGS) as engines:
        yield engines["e0"].url


@pytest.fixture(scope="module")
def maker() -> Any:
    """tests/chat_templates/make_requests.py, which is a script."""
    spec = importlib.util.spec_from_file_location("made", TEMPLATES / "make_requests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shaped(request: Mapping[str, Any]) -> TextShape | ChatShape:
    body = dict(request["body"])
    if request["family"] is not None:
        template = TEMPLATES / "families" / f"{request['family']}.jinja"
        body["chat_template"] = template.read_text("utf-8")
    shape = shape_prompt(
        GenerateRequest(
            request_id="r",
            endpoint=Endpoint(request["path"]),
            body=body,
            raw_body=b"",
            headers=(),
            model="tiny",
            base_model="tiny",
            lora=None,
        )
    )
    assert isinstance(shape, TextShape | ChatShape)
    return shape


def test_ids_are_those_of_the_running_engine(url: str, maker: Any) -> None:
    """All that it accepts: 19 templates, tools, several turns, and the other APIs."""
    flags = EngineFlags(trust_request_chat_template=True)
    own = load_tokenizer(TESTS / "tokenizer", lambda _: "2026", flags)
    outcomes: Counter[str] = Counter()
    different: list[str] = []

    for request in maker.requests():
        ids = maker.ask(url, request)
        if ids is None:
            outcomes["refused by the engine"] += 1
            continue
        is_same = list(own.encode(shaped(request))[0]) == ids
        outcomes["same" if is_same else "different"] += 1
        if not is_same:
            different.append(f"{request['family']}: {request['name']}")

    print(dict(outcomes))  # noqa: T201 - a figure of docs/real-engine.md
    assert different == []
    assert outcomes["same"] >= 600


async def test_comparison_raises_no_false_alarm(url: str, maker: Any) -> None:
    """What `/tokenize` is asked for the parity watch gives the ids that the other paths are fed."""
    outcomes: Counter[str] = Counter()
    sample = [each for number, each in enumerate(maker.requests()) if number % 3 == 0]

    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        for request in sample:
            try:
                (body,) = tokenize_bodies(shaped(request), "tiny")
            except UnscorableError:
                outcomes["not asked"] += 1
                continue
            ids = await asyncio.to_thread(maker.ask, url, request)
            answer = await http.post(f"{url}/tokenize", json=body)
            if ids is None or answer.status_code != 200:
                outcomes["refused by the engine"] += 1
                continue
            outcomes["same" if answer.json()["tokens"] == ids else "different"] += 1

    print(dict(outcomes))  # noqa: T201 - as above
    assert outcomes["different"] == 0
    assert outcomes["same"] >= 200
