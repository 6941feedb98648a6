"""OpenAI's Responses API as vLLM serves it: a chat in other words, kept on demand.

Answers are kept in the engine's memory if it was started so (`VLLM_ENABLE_RESPONSES_API_STORE`).
Nothing runs in the background here, so nothing can be cancelled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from simulator.answers import AnswerOptions, Choice, render_usage
from simulator.bodies import ChatBody, GenerationBody, decode_body
from simulator.core.errors import (
    RequestRefusedError,
    ResponseNotFoundError,
    ResponseRefusedError,
)
from simulator.engine import KeptResponse, SimulatedEngine
from simulator.exchange import Exchange
from simulator.generation import Sequences
from simulator.generation_api import generate
from simulator.named_events import Event, NamedGeneration
from simulator.rank import EngineRank

_NO_STORE = (
    "This vLLM engine does not support `store=True` and therefore does not support the background "
    "mode. To enable these features, set the environment variable "
    "`VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    background: bool | None = False
    previous_response_id: str | None = None
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] = []
    truncation: str | None = "disabled"
    user: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def said(self) -> list[dict[str, Any]]:
        """What this request adds to its conversation."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [
            {"role": item["role"], "content": _text(item.get("content"))}
            for item in self.input
            if isinstance(item.get("role"), str)
        ]

    def chat(self, earlier: Sequence[dict[str, Any]]) -> ChatBody:
        """What the chat template is given."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ChatBody(
            model=self.model,
            messages=[*system, *earlier, *self.said()],
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            cache_salt=self.cache_salt,
            session_id=self.session_id,
            kv_transfer_params=self.kv_transfer_params,
            tools=self.tools or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request, and the conversation it goes on with."""

    engine: SimulatedEngine
    body: ResponsesBody
    messages: list[dict[str, Any]]
    response_id: str


async def create_response(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer a request, and keep the answer if that is wanted."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), ResponsesBody)
    engine.find_adapter(body.model)
    if body.background:
        raise ResponseRefusedError(_NO_STORE, param="background")
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        earlier = _find(engine, body.previous_response_id).messages
    asked = _Asked(
        engine=engine,
        body=body,
        messages=[*earlier, *body.said()],
        response_id=body.request_id or f"resp_{engine.random_hex(32)}",
    )
    await generate(engine, exchange, body.chat(earlier), partial(_make, asked))


async def read_response(engine: SimulatedEngine, exchange: Exchange, response_id: str) -> None:
    """Show a kept answer."""
    await exchange.send_json(_find(engine, response_id).response)


async def cancel_response(engine: SimulatedEngine, response_id: str) -> None:
    """Refuse: no kept answer is still being made."""
    _find(engine, response_id)
    raise ResponseRefusedError("Cannot cancel a synchronous response.", param="response_id")


def _find(engine: SimulatedEngine, response_id: str) -> KeptResponse:
    kept = engine.responses.get(response_id)
    if kept is None:
        raise ResponseNotFoundError(
            f"Response with id '{response_id}' not found.", param="response_id"
        )
    return kept


def _make(
    asked: _Asked,
    rank: EngineRank,
    exchange: Exchange,
    body: GenerationBody,
    options: AnswerOptions,
    sequences: Sequences,
) -> NamedGeneration:
    answer = ResponsesAnswer(asked, options, sequences[0][1].max_tokens)
    return NamedGeneration(rank, exchange, body, answer, sequences)


class ResponsesAnswer:
    """Answers of /v1/responses."""

    def __init__(self, asked: _Asked, options: AnswerOptions, max_tokens: int) -> None:
        self._asked = asked
        self._options = options
        self._max_tokens = max_tokens
        self._item_id = f"msg_{asked.engine.random_hex(32)}"
        self._number = 0
        self._is_open = False

    def render_whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        response = self._render(status, [self._item(choice.output.text, "completed")], choice)
        self._keep(response, choice.output.text)
        return response

    def render_begin(self, _choice: Choice, /) -> Iterable[Event]:
        response = self._render("in_progress", [], None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def render_text(self, text: str) -> Iterable[Event]:
        if not self._is_open:
            self._is_open = True
            item = {**self._item("", "in_progress"), "content": []}
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._part_event("response.content_part.added", part=_part(""))
        yield self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def render_end(self, choice: Choice) -> Iterable[Event]:
        text = choice.output.text
        if self._is_open:
            yield self._part_event("response.output_text.done", text=text, logprobs=[])
            yield self._part_event("response.content_part.done", part=_part(text))
            item = self._item(text, "completed")
            yield self._event("response.output_item.done", output_index=0, item=item)
        # vLLM ends every stream with this event, whatever the status in it.
        yield self._event("response.completed", response=self.render_whole([choice]))

    def render_failed(self, error: RequestRefusedError) -> Event:
        return self._event(
            "error", message=error.message, code=str(error.status), param=error.param
        )

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _part_event(self, kind: str, **fields: Any) -> Event:
        place = {"output_index": 0, "content_index": 0, "item_id": self._item_id}
        return self._event(kind, **place, **fields)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "content": [_part(text)],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _render(
        self, status: str, output: list[dict[str, Any]], choice: Choice | None
    ) -> dict[str, Any]:
        body = self._asked.body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._asked.response_id,
            "created_at": self._options.created_unix_s,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": self._options.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": "auto" if body.tools else "none",
            "tools": body.tools,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": bool(body.background),
            "max_output_tokens": self._max_tokens,
            "max_tool_calls": None,
            "previous_response_id": body.previous_response_id,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": body.truncation,
            "usage": None if choice is None else self._usage(choice),
            "user": body.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None if choice is None else choice.transfer_params,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _usage(self, choice: Choice) -> dict[str, Any]:
        usage = render_usage(self._options.settings, [choice], is_chat=True)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": choice.cached_tokens,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": usage["total_tokens"],
        }

    def _keep(self, response: dict[str, Any], text: str) -> None:
        asked = self._asked
        if asked.engine.settings.responses_store and asked.body.store:
            said = [*asked.messages, {"role": "assistant", "content": text}]
            asked.engine.responses[asked.response_id] = KeptResponse(response, said)


def _part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
