"""What can be asked of a simulated engine besides answers: metrics, its state, its cache."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Started = Callable[..., AbstractAsyncContextManager[Any]]


async def test_metrics_count_under_the_names_of_vllm(api: Any) -> None:
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


async def test_what_came_in_can_be_looked_at(api: Any) -> None:
    """Tests see path, headers and body of every request."""
    await api.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, X_Request_Id="me")

    received = api.engine.engine.received[-1]
    assert received.path == "/v1/completions"
    assert received.headers["x-request-id"] == "me"
    assert json.loads(received.body)["prompt"] == "a"


async def test_prefix_cache_can_be_reset_while_idle(api: Any) -> None:
    """A reset forgets everything."""
    await api.complete(prompt="word " * 20)
    reset = await api.client.post("/reset_prefix_cache")
    after = await api.complete(prompt="word " * 20)

    assert reset.json() == {"success": True}
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_prefix_cache_cannot_be_reset_while_a_request_runs(started_engine: Started) -> None:
    """A reset that finds blocks in use says that it failed."""
    async with started_engine(inter_token_ms=10) as api, asyncio.TaskGroup() as group:
        running = group.create_task(api.complete(max_tokens=1000, ignore_eos=True))
        await api.wait_until(running=1)
        busy = await api.client.post("/reset_prefix_cache")
        running.cancel()

    assert busy.json() == {"success": False}


async def test_lone_probes_answer(api: Any) -> None:
    """Health is empty, version and load are small objects."""
    assert (await api.client.get("/health")).content == b""
    assert (await api.client.get("/version")).json() == {"version": "0.33.0"}
    assert (await api.client.get("/load")).json() == {"server_load": 0}
