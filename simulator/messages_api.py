"""Anthropic's Messages API as vLLM serves it: a chat in other words."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from simulator.answers import AnswerOptions, Choice, render_usage
from simulator.bodies import ChatBody, decode_body
from simulator.core.errors import InvalidBodyError, RequestRefusedError
from simulator.engine import SimulatedEngine
from simulator.exchange import Exchange
from simulator.generation import making
from simulator.generation_api import generate
from simulator.named_events import Event, NamedGeneration
from simulator.prompts import read_chat_prompt

Content = str | list[dict[str, Any]]


class _Message(msgspec.Struct):
    role: str
    content: Content


class CountBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[_Message]
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("Model is required")

    def chat(self) -> ChatBody:
        """What the chat handler is given."""
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        said = [{"role": each.role, "content": _text(each.content)} for each in self.messages]
        tools = [
            {"type": "function", "function": {"name": tool.get("name")}}
            for tool in self.tools or ()
        ]
        return ChatBody(model=self.model, messages=[*system, *said], tools=tools or None)


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens <= 0:
            raise ValueError("max_tokens must be positive")

    def chat(self) -> ChatBody:
        chat = super().chat()
        chat.max_tokens = self.max_tokens
        chat.stop = self.stop_sequences
        chat.stream = self.stream
        chat.temperature = self.temperature
        chat.top_p = self.top_p
        chat.cache_salt = self.cache_salt
        chat.kv_transfer_params = self.kv_transfer_params
        return chat


async def create_message(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer a message. What the chat handler refuses is told in Anthropic's form."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), MessagesBody)
    try:
        await generate(engine, exchange, body.chat(), making(NamedGeneration, MessagesAnswer))
    except RequestRefusedError as error:
        await _refuse(exchange, error)


async def count_tokens(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Say how long a prompt is."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), CountBody)
    try:
        engine.find_adapter(body.model)
        prompt = read_chat_prompt(body.chat(), engine.settings.context_tokens)
    except RequestRefusedError as error:
        await _refuse(exchange, error)
        return
    tokens = len(prompt.token_ids)
    context = {"original_input_tokens": tokens}
    await exchange.send_json({"input_tokens": tokens, "context_management": context})


async def _refuse(exchange: Exchange, error: RequestRefusedError) -> None:
    kind = "BadRequestError" if isinstance(error, InvalidBodyError) else error.kind
    refusal = {"type": "error", "error": {"type": kind, "message": error.message}}
    await exchange.send_json(refusal, status=error.status)


class MessagesAnswer:
    """Answers of /v1/messages."""

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._is_open = False

    def render_whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        answer = {
            "id": self._options.response_id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": choice.output.text}],
            "model": self._options.model,
            **self._reason(choice),
            "usage": self._usage(choice),
            "kv_transfer_params": choice.transfer_params,
        }
        return {name: value for name, value in answer.items() if value is not None}

    def render_begin(self, choice: Choice, /) -> Iterable[Event]:
        message: dict[str, Any] = {
            "id": self._options.response_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._options.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(choice.prompt.token_ids), "output_tokens": 0},
        }
        yield {"type": "message_start", "message": message}

    def render_text(self, text: str) -> Iterable[Event]:
        if not self._is_open:
            self._is_open = True
            block = {"type": "text", "text": ""}
            yield {"type": "content_block_start", "content_block": block, "index": 0}
        delta = {"type": "text_delta", "text": text}
        yield {"type": "content_block_delta", "delta": delta, "index": 0}

    def render_end(self, choice: Choice) -> Iterable[Event]:
        if self._is_open:
            yield {"type": "content_block_stop", "index": 0}
        yield {
            "type": "message_delta",
            "delta": self._reason(choice),
            "usage": self._usage(choice),
        }
        yield {"type": "message_stop"}

    def render_failed(self, error: RequestRefusedError) -> Event:
        return {"type": "error", "error": {"type": error.kind, "message": error.message}}

    def _reason(self, choice: Choice) -> dict[str, Any]:
        if choice.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        """`input_tokens` are those that were neither cached nor put into the cache."""
        usage = render_usage(self._options.settings, [choice], is_chat=True)
        details = usage["prompt_tokens_details"] or {}
        rendered: dict[str, Any] = {}
        input_tokens = usage["prompt_tokens"]
        for name, told in (
            ("cached_tokens", "cache_read_input_tokens"),
            ("created_cache_tokens", "cache_creation_input_tokens"),
        ):
            if details.get(name) is not None:
                rendered[told] = details[name]
                input_tokens -= details[name]
        return {
            "input_tokens": input_tokens,
            "output_tokens": usage["completion_tokens"],
            **rendered,
        }


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text") or part.get("content") or "") for part in content)
