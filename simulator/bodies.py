"""Reads and checks request bodies as vLLM does: which are refused, with which status and words.

Unknown fields are accepted. What pydantic refuses on its own (types, required fields) is a
"Bad Request"; what the engine refuses after reading the body is a "BadRequestError". As pydantic
reads without being strict, "5", 5.0 and true are numbers.
"""

import json
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from simulator.core.errors import InvalidBodyError, RequestRefusedError

_LONGEST_SALT = 1024
_MOST_CHOICES = 128
"""Twice the seats of a simulated engine; vLLM's own limit is VLLM_MAX_N_SEQUENCES."""
_MOST_LOGPROBS = 20
"""vLLM's `--max-logprobs`, as it is without it."""

_FLAG: TypeAdapter[bool | None] = TypeAdapter(bool | None)
_STREAM_FLAGS = ("include_usage", "continuous_usage_stats")

Body = TypeVar("Body", bound=msgspec.Struct)
TokenId = Annotated[int, Meta(ge=0)]
"""No tokenizer has one below."""


class GenerationBody(msgspec.Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    echo: bool | None = None
    use_beam_search: bool = False
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    session_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def output_limit_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def repeats_usage(self) -> bool:
        """Whether every chunk carries usage."""
        return self.includes_usage and bool(
            (self.stream_options or {}).get("continuous_usage_stats")
        )

    @property
    def reports_full(self) -> bool:
        return (self.vllm_xargs or {}).get("kv_cache_report_mode") == "full"


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any] | None = None
    add_special_tokens: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = 16
    n: int = 1

    @property
    def output_limit_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    echo: bool = False
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def output_limit_tokens(self) -> int | None:
        wanted = self.max_completion_tokens
        return self.max_tokens if wanted is None else wanted


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize, in its completion and its chat form."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


def decode_body(raw: bytes, content_type: str, kind: type[Body]) -> Body:
    """Read a JSON body, or raise InvalidBodyError saying what is wrong with it."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidBodyError("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_leniently(raw, kind)


def has_field(raw: bytes, name: str) -> bool:
    """Tell whether a body, if it is any, has a field: what decides where a path takes several."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and name in body


def _decode_leniently(raw: bytes, kind: type[Body]) -> Body:
    """Read what engines take beside: byte order marks, lone surrogates, NaN, "5" for 5."""
    try:
        return msgspec.convert(_coerced(json.loads(raw), kind), kind)
    except msgspec.ValidationError as error:
        raise InvalidBodyError(str(error), param=_field_of(str(error))) from error
    except (ValueError, RecursionError) as error:
        raise InvalidBodyError(f"JSON decode error: {error}") from error


def _coerced(body: Any, kind: type[msgspec.Struct]) -> Any:
    """Return `body` with its fields as pydantic makes them of what came, as vLLM has it do."""
    if not isinstance(body, dict):
        return body
    read = dict(body)
    for name, adapter in _adapters(kind).items():
        if name not in read:
            continue
        try:
            read[name] = adapter.validate_python(read[name])
        except ValidationError as error:
            raise InvalidBodyError(f"{name}: {error.errors()[0]['msg']}", param=name) from error
    return read


@cache
def _adapters(kind: type[msgspec.Struct]) -> dict[str, TypeAdapter[Any]]:
    """One per field, but for those that hold structs of their own."""
    found: dict[str, TypeAdapter[Any]] = {}
    for each in msgspec.structs.fields(kind):
        with suppress(PydanticSchemaGenerationError):
            found[each.name] = TypeAdapter(each.type)
    return found


def check_generation(body: GenerationBody) -> None:
    """Refuse combinations that no engine runs."""
    _read_stream_options(body)
    if body.stream_options and not body.stream:
        raise InvalidBodyError(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    if body.stream and body.prompt_logprobs:
        raise InvalidBodyError("`prompt_logprobs` are not available when `stream=True`.")
    _check_logprobs(body)
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= _LONGEST_SALT:
        raise InvalidBodyError(
            "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt"
        )
    _check_range("n", body.n, least=1, most=_MOST_CHOICES)
    _check_range("best_of", body.best_of, least=1, most=_MOST_CHOICES)
    _check_range("max_tokens", body.output_limit_tokens, least=1)
    _check_range("min_tokens", body.min_tokens, least=0)
    if body.temperature is not None and body.temperature < 0:
        raise RequestRefusedError(
            f"temperature must be non-negative, got {body.temperature}.", param="temperature"
        )
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise RequestRefusedError(f"top_p must be in (0, 1], got {body.top_p}.", param="top_p")


def _read_stream_options(body: GenerationBody) -> None:
    """Make flags of what came as such: "false" is none, and "perhaps" is refused."""
    if not body.stream_options:
        return
    read = dict(body.stream_options)
    for name in _STREAM_FLAGS:
        try:
            read[name] = _FLAG.validate_python(read.get(name))
        except ValidationError as error:
            field = f"stream_options.{name}"
            raise InvalidBodyError(f"{field}: {error.errors()[0]['msg']}", param=field) from error
    body.stream_options = read


def _check_logprobs(body: GenerationBody) -> None:
    """Refuse what asks for log probabilities without saying so, and more than `--max-logprobs`."""
    is_chat = isinstance(body, ChatBody)
    asked = getattr(body, "logprobs", None)
    has_logprobs = bool(asked) if is_chat else asked is not None
    if body.logprob_token_ids and (body.use_beam_search or not has_logprobs):
        why = "don't go with beam search" if body.use_beam_search else "need `logprobs` to be set"
        raise InvalidBodyError(f"`logprob_token_ids` {why}.", param="logprob_token_ids")
    name = "top_logprobs" if is_chat else "logprobs"
    counted = getattr(body, name, None)
    if is_chat and counted and not has_logprobs:
        raise InvalidBodyError(
            "when using `top_logprobs`, `logprobs` must be set to true.", param=name
        )
    for field, count in ((name, counted), ("prompt_logprobs", body.prompt_logprobs)):
        if count is not None and not 0 <= count <= _MOST_LOGPROBS:
            raise InvalidBodyError(f"`{field}` must be at most {_MOST_LOGPROBS}.", param=field)


def check_limits(body: GenerationBody, prompt_tokens: int, context_tokens: int) -> int:
    """Return how many tokens may be generated, or refuse a request that doesn't fit."""
    wanted = body.output_limit_tokens
    limit = f"This model's maximum context length is {context_tokens} tokens. However, "
    if prompt_tokens >= context_tokens:
        raise RequestRefusedError(
            f"{limit}your prompt contains {prompt_tokens} input tokens, which exceeds this limit "
            "even without any output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    if wanted is not None and prompt_tokens + wanted > context_tokens:
        raise RequestRefusedError(
            f"{limit}you requested {wanted} output tokens and your prompt contains "
            f"{prompt_tokens} input tokens, for a total of {prompt_tokens + wanted} tokens. Please "
            "reduce the length of the input prompt or the number of requested output tokens. "
            f"(parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    most = context_tokens - prompt_tokens if wanted is None else wanted
    if body.min_tokens > most:
        raise RequestRefusedError(
            f"min_tokens must be less than or equal to max_tokens={most}, got {body.min_tokens}.",
            param="min_tokens",
        )
    return most


def _check_range(name: str, value: int | None, *, least: int, most: int | None = None) -> None:
    if value is None:
        return
    if value < least:
        raise RequestRefusedError(f"{name} must be at least {least}, got {value}.", param=name)
    if most is not None and value > most:
        raise RequestRefusedError(f"{name} must be at most {most}, got {value}.", param=name)


def _field_of(message: str) -> str | None:
    """Return the field a msgspec message complains about: `... - at `$.max_tokens``."""
    _, found, path = message.partition("`$.")
    return path.rstrip("`").partition("[")[0] if found else None
