"""What `/openapi.json` says holds: schemathesis asks a real kvlb in front of simulated engines."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from balancer.core.fleet.fan_out import COMMANDS
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, running_fleet

HELLO = [{"role": "user", "content": "hello"}]
GENERATED = {"choices": [{"index": 0, "token_ids": [104, 105]}]}
KEYED = {*COMMANDS, *(f"/instances/{each}" for each in ("add", "remove", "drain", "undrain"))}
MODELS: dict[Any, str] = {"generate": "sim", "pooling": "vectors", "transcription": "ears"}
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "once", "max_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2, "previous_response_id": None},
    "/v1/embeddings": {"input": ["one", [1, 2]]},
    "/pooling": {"input": "one"},
    "/classify": {"input": "one"},
    "/score": {"text_1": "one", "text_2": "two"},
    "/v1/score": {"text_1": "one", "text_2": "two"},
    **{
        path: {"query": "one", "documents": ["a", "b"]}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    "/v1/chat/completions/render": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/render": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions/render": {"prompt": "once"},
    "/v1/chat/completions/derender": {"generate_response": GENERATED},
    "/v1/completions/derender": {"generate_responses": [GENERATED]},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    "/v1/chat/completions/batch": {"messages": [HELLO, HELLO], "max_tokens": 2},
    "/generative_scoring": {"query": "one", "items": ["a", "b"], "label_token_ids": [1]},
    "/invocations": {"prompt": "once", "max_tokens": 2},
    "/v2/embed": {"texts": ["one"]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
}
"""Of fields that hardly anything made up would do for. The others stay as they were made up."""
ANSWERED = {*PLAIN, "/v1/audio/transcriptions", "/v1/audio/translations"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MOST = settings(
    max_examples=6,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def model_for(path: str) -> str:
    """The one of the fleet's models that may serve a path."""
    if "audio" in path:
        return MODELS["transcription"]
    pooled = ("embed", "pooling", "classify", "score", "rerank")
    is_pooled = any(each in path for each in pooled) and "generative" not in path
    return MODELS["pooling" if is_pooled else "generate"]


def ask(operation: Any, mode: GenerationMode, session: requests.Session, url: str) -> set[int]:
    """Send what is generated for one operation; the statuses that came. Raises what schemathesis finds."""
    statuses = set()

    @MOST
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        checks = list(CHECKS)
        if mode is GenerationMode.NEGATIVE:
            checks.append(negative_data_rejection)
        elif isinstance(case.body, dict):
            case.body |= PLAIN.get(operation.path, {}) | {"model": model_for(operation.path)}
        answer = case.call(base_url=url, session=session, timeout=20)
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=checks)

    with suppress(Unsatisfiable):  # where there is nothing to be wrong
        send()
    return statuses


def operations(document: dict[str, Any]) -> Iterator[Any]:
    """What may be asked without a WebSocket and without a key."""
    result: Any
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        if operation.path != "/v1/realtime" and operation.path not in KEYED:
            yield operation


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=str)
async def test_engine_paths_do_what_is_described(
    balancer_factory: Any, mode: GenerationMode
) -> None:
    """No 5xx, answers as described, and a 4xx for what is no body by the description."""

    def ask_all(document: dict[str, Any], url: str) -> tuple[dict[str, set[int]], list[str]]:
        came, found = {}, []
        with requests.Session() as session:
            session.trust_env = False
            for each in operations(document):
                name = f"{each.method.upper()} {each.path}"
                try:
                    came[name] = ask(each, mode, session, url)
                except FailureGroup as group:
                    found += [f"{name}: {each}"[:1500] for each in group.exceptions]
        return came, found

    async with AsyncExitStack() as stack:
        urls = []
        for serves, model in MODELS.items():
            engine = EngineSettings(
                serves=serves,
                model=model,
                responses_store=True,
                scale_out=True,
                tokenizer_info=True,
                inter_token_ms=0,
            )
            fleet = await stack.enter_async_context(
                running_fleet(FleetSpec.parse("1"), engine=engine)
            )
            urls.append({"url": fleet.engines[0].url})
        balancer = await stack.enter_async_context(balancer_factory({"instances": urls}))
        await balancer.available(3)
        document = (await balancer.http.get("/openapi.json")).json()
        came, found = await asyncio.to_thread(ask_all, document, balancer.url)

    assert not found, "\n\n".join(found)
    if mode is GenerationMode.POSITIVE:
        assert not {each for each in ANSWERED if 200 not in came[f"POST {each}"]}
