"""Sends one request to one rank and writes it down: ids of its prompt, answer, usage, times."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from balancer.core.request import Endpoint
from kvlb.engine_http import Answer, CallFailedError
from kvlb.record.stations import Station
from kvlb.record.writer import CaptureWriter

PROMPT_FIELDS = (
    "model",
    "prompt",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
"""Of a request body, what `/tokenize` is asked with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What came back."""

    answer: Answer | None
    """None: nobody answered."""
    text: str = ""
    """What the model said."""


async def ask(
    station: Station, writer: CaptureWriter, body: Mapping[str, Any], *, phase: str, label: str
) -> Exchanged:
    """Send `body` to its path and write the row, whatever comes of it."""
    path = (Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS).value
    tokens = await _tokens(station, body)
    t0 = writer.clock()
    answer: Answer | None = None
    with suppress(CallFailedError):
        answer = await station.engine.post(path, body, station.headers)
    response, usage = _read(answer, is_stream=bool(body.get("stream")))
    writer.request(
        {
            "phase": phase,
            "label": label,
            "src": station.name,
            "path": path,
            "headers": dict(station.headers) or None,
            "body": body,
            "t0": t0,
            "t1": writer.clock(),
            "status": None if answer is None else answer.status,
            "stream": bool(body.get("stream")),
            "cut": None,
            "tokenize": tokens,
            "response": response,
            "usage": usage,
        }
    )
    return Exchanged(answer=answer, text=_said(response))


async def _tokens(station: Station, body: Mapping[str, Any]) -> list[int] | None:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return None  # ids, or several prompts: the body itself says all
    asked = {name: body[name] for name in PROMPT_FIELDS if name in body}
    tokens = await station.engine.tokenize(asked)
    return None if tokens is None else list(tokens)


def _read(answer: Answer | None, *, is_stream: bool) -> tuple[Any, Any]:
    """Response and usage as they stand in a capture."""
    if answer is None:
        return None, None
    if not is_stream or not answer.is_ok:
        body = answer.body
        return body, body.get("usage") if isinstance(body, Mapping) else None
    payloads = answer.stream_payloads()
    usage = None
    for chunk in _chunks(payloads):
        usage = chunk.get("usage") or usage
    return payloads, usage


def _chunks(payloads: list[str]) -> list[Mapping[str, Any]]:
    chunks = []
    for payload in payloads:
        try:
            chunk = msgspec.json.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            continue  # [DONE]
        if isinstance(chunk, Mapping):
            chunks.append(chunk)
    return chunks


def _said(response: Any) -> str:
    if isinstance(response, list):
        return "".join(map(_choice_text, _chunks(response)))
    return _choice_text(response) if isinstance(response, Mapping) else ""


def _choice_text(answer: Mapping[str, Any]) -> str:
    choice: Mapping[str, Any] = next(iter(answer.get("choices") or ()), {})
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")
