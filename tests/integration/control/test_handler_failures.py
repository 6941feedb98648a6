"""Handlers that fail in every way they can: a 503 for that request, and nothing else."""

import asyncio
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

IDS = {"model": "tiny", "prompt": [1, 2, 3]}

MODULE = """
import asyncio
import sys
import time
from balancer.core.errors import NoInstanceError
from balancer.core.handlers import Amend, Refuse, Reply

entered = asyncio.Event()

async def stubborn():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(0)

async def gate(request):
    what = request.headers.get("x-do")
    if what == "exit":
        sys.exit("prompt text")
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "group":
        raise BaseExceptionGroup("prompt text", [asyncio.CancelledError()])
    if what == "cancelled":
        raise asyncio.CancelledError
    if what == "generator-exit":
        raise GeneratorExit
    if what == "ours":
        raise NoInstanceError("prompt text")
    if what == "stubborn":
        await stubborn()
    if what == "blocking":
        time.sleep(0.4)  # holds up the event loop for longer than `timeout_s`: nobody can cancel it
    if what == "surrogate":
        return Refuse(status=403, message="prompt text \\ud800")
    if what == "code":
        return Refuse(status=403, message="prompt text", code={"a": 1})
    if what == "status":
        return Reply(body=b"prompt text", status=700)
    if what == "body":
        return Reply(body="prompt text")
    if what == "reply-length":
        return Reply(body=b"prompt text", headers={"content-length": "999"})
    if what == "list":
        return Amend(body=["prompt text"])
    if what == "object":
        return Amend(body={**request.body, "prompt": object()})
    if what == "length":
        return Amend(headers={"content-length": "3"})
    if what == "gone":
        entered.set()
        await stubborn()
    return None
"""

FAILURES = {
    "exit": "SystemExit",
    "interrupt": "KeyboardInterrupt",
    "group": "BaseExceptionGroup",
    "cancelled": "CancelledError",
    "generator-exit": "GeneratorExit",
    "ours": "NoInstanceError",
    "stubborn": "TimeoutError",
    "blocking": "TimeoutError",
    "surrogate": "UnusableVerdictError",
    "code": "UnusableVerdictError",
    "status": "UnusableVerdictError",
    "body": "UnusableVerdictError",
    "reply-length": "UnusableVerdictError",
    "list": "UnusableVerdictError",
    "object": "TypeError",
    "length": "UnusableVerdictError",
}
PATHS = {"completion": "/v1/completions", "forwarded": "/v1/embeddings"}


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Settings with a handler of the operator's under a key."""
    name = f"failing_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda key: {key: f"{name}:gate", "timeout_s": 0.2}


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize("what", FAILURES)
async def test_failure_is_one_request_refused(
    engine: Any, balancer_factory: Any, gate: Any, what: str, key: str
) -> None:
    """It is counted by its kind, no engine hears of it, nothing of it is told, the next one passes."""
    path, handlers = PATHS[key], gate(key)
    body = IDS if key == "completion" else {"model": "tiny", "input": "hi"}
    engine.answers = {"/v1/embeddings": (200, b"{}")}
    config = {"instances": [{"url": engine.url}], "handlers": handlers}
    with capture_logs() as log:
        async with balancer_factory(config) as balancer:
            await balancer.available()
            failed = await balancer.http.post(path, json=body, headers={"x-do": what})
            calls = engine.calls(path)
            passed = await balancer.http.post(path, json=body)
            metrics = (await balancer.http.get("/metrics")).text

    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "handler_failed")
    assert (calls, passed.status_code) == (0, 200)
    counted = f'error="{FAILURES[what]}",kind="handler"'
    assert f"kvlb_own_code_failures_total{{{counted}}} 1.0" in metrics
    assert "prompt text" not in failed.text + str(log)


async def test_client_that_leaves_is_not_held_by_a_handler(
    engine: Any, balancer_factory: Any, gate: Any, eventually: Any
) -> None:
    """One that swallows its cancellation doesn't send an engine what nobody waits for."""
    handlers = {**gate("completion"), "timeout_s": 60.0}
    config = {"instances": [{"url": engine.url}], "handlers": handlers}
    entered: asyncio.Event = import_module(handlers["completion"].partition(":")[0]).entered
    asked = httpx.Request("POST", "http://kvlb/v1/completions", json=IDS, headers={"x-do": "gone"})
    head = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
    async with balancer_factory(config) as balancer:
        await balancer.available()
        _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(balancer.url).port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + asked.content)
        await entered.wait()
        writer.close()
        await eventually(lambda: balancer.app.running == 0)
        metrics = (await balancer.http.get("/metrics")).text

    assert engine.calls("/v1/completions") == 0
    assert 'kind="handler"' not in metrics
