"""Sends one request and writes down what its client sees, byte by byte where it is a stream."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from benchmarks.chaos.requests import Ask

End = Literal["answered", "error", "error_event", "broken", "hung", "left"]
"""`broken`: the connection ended, and nothing said why."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a client got."""

    ask: Ask
    began_s: float
    end: End = "broken"
    ended_s: float = 0.0
    status: int | None = None
    error: object = None
    """Of an error status or an error event: what stands under `error`; None if nothing does."""
    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None
    has_done: bool = False
    """`[DONE]` was seen."""
    after_error: bool = False
    """Something followed the error event."""
    instance: str = ""


async def send(
    http: httpx.AsyncClient, ask: Ask, clock: Callable[[], float], deadline_s: float
) -> Outcome:
    """Ask, and wait for the end, at most until the deadline."""
    outcome = Outcome(ask=ask, began_s=clock())
    limit_s = deadline_s if ask.leaves_after_s is None else ask.leaves_after_s
    try:
        async with asyncio.timeout(limit_s):
            await _exchange(http, ask, outcome)
    except TimeoutError:
        outcome.end = "hung" if ask.leaves_after_s is None else "left"
    except httpx.HTTPError:
        # An error event is followed by a broken connection, so that nobody takes it for an end.
        outcome.end = "broken" if outcome.error is None else "error_event"
    outcome.ended_s = clock()
    return outcome


async def _exchange(http: httpx.AsyncClient, ask: Ask, outcome: Outcome) -> None:
    headers = {"x-request-id": ask.id}
    async with http.stream("POST", ask.path, json=ask.body, headers=headers) as answer:
        outcome.status = answer.status_code
        outcome.instance = answer.headers.get("x-kvlb-instance", "")
        if answer.status_code != httpx.codes.OK:
            outcome.error = _error_of(await answer.aread())
            outcome.end = "error"
        elif ask.streams:
            await _read_stream(answer, ask, outcome)
        else:
            _read_whole(json.loads(await answer.aread()), ask, outcome)


def _read_whole(answer: Mapping[str, Any], ask: Ask, outcome: Outcome) -> None:
    choice = answer["choices"][0]
    outcome.text = choice["message"]["content"] if ask.is_chat else choice["text"]
    outcome.finish_reason = choice["finish_reason"]
    outcome.completion_tokens = answer["usage"]["completion_tokens"]
    outcome.end = "answered"


async def _read_stream(answer: httpx.Response, ask: Ask, outcome: Outcome) -> None:
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        outcome.after_error = outcome.after_error or (
            outcome.error is not None and data != "[DONE]"
        )
        if data == "[DONE]":
            outcome.has_done = True
        else:
            _read_event(json.loads(data), ask, outcome)
    if outcome.error is not None:
        outcome.end = "error_event"
    elif outcome.has_done:
        outcome.end = "answered"


def _read_event(event: Mapping[str, Any], ask: Ask, outcome: Outcome) -> None:
    if event.get("error") is not None:
        outcome.error = event["error"]
        return
    usage = event.get("usage") or {}
    outcome.completion_tokens = usage.get("completion_tokens", outcome.completion_tokens)
    for choice in event["choices"]:
        said = choice["delta"].get("content") if ask.is_chat else choice["text"]
        outcome.text += said or ""
        outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason


def _error_of(body: bytes) -> object:
    try:
        told = json.loads(body)
    except ValueError:
        return None
    return told.get("error") if isinstance(told, dict) else None
