"""Reads one row of a trace, in any of three formats.

Rules:

1. The first row says which format it is: `hash_ids` (Mooncake), `messages` (chats), `requests` (text).
   Every other row has to be of the same format; what is wrong with one is told with its line.
2. Fields that nothing here needs are left alone. Times are milliseconds.
3. A chat row holds a whole conversation: request k is `messages[:request_points[k]]`. It has no times
   and no lengths: times are drawn when the schedule is planned; an answer is as long as what the
   assistant said next, at `CHARS_PER_TOKEN`.

Cost: O(row).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

CHARS_PER_TOKEN = 4
USUAL_OUTPUT_TOKENS = 64
"""Where a trace doesn't tell how long an answer was."""
BLOCK_SIZES = tuple(1 << power for power in range(4, 14))


class TraceRowError(Exception):
    """A row that can't be replayed; the text names its line and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrompt:
    """A prompt of which only block ids are known: equal ids, equal blocks."""

    hash_ids: Sequence[int]
    input_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """A prompt in full."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The messages of a chat so far."""

    messages: Sequence[Mapping[str, Any]]


TracePrompt = BlockPrompt | TextPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    line: int
    at_s: float | None
    """Seconds on the trace's clock; None: the trace tells no times."""
    prompt: TracePrompt
    output_tokens: int
    session: str | None = None
    """Requests of one session belong to one conversation."""


_Time = Annotated[float, msgspec.Meta(ge=0)]
_Tokens = Annotated[int, msgspec.Meta(ge=0)]


class _BlockRow(msgspec.Struct, frozen=True):
    timestamp: _Time
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: _Tokens
    hash_ids: Annotated[list[_Tokens], msgspec.Meta(min_length=1)]
    session: str | int | None = None


class _ChatRow(msgspec.Struct, frozen=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    request_points: Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(min_length=1)]
    id: str | None = None


class _TextCall(msgspec.Struct, frozen=True):
    prompt: str
    output_tokens: _Tokens | None = msgspec.field(name="Output Length", default=None)


class _TextRow(msgspec.Struct, frozen=True):
    timestamp: _Time
    requests: Annotated[list[_TextCall], msgspec.Meta(min_length=1)]


_Row = _BlockRow | _ChatRow | _TextRow
_FORMATS: dict[str, type[_Row]] = {
    "hash_ids": _BlockRow,
    "messages": _ChatRow,
    "requests": _TextRow,
}


class RowReader:
    """Reads the rows of one trace, one after the other."""

    def __init__(self) -> None:
        self._decoder: msgspec.json.Decoder[_Row] | None = None

    def read(self, line: int, row: bytes) -> Sequence[TraceRequest]:
        """The requests of a row, none of a blank one. Raises TraceRowError."""
        if not row.strip():
            return ()
        try:
            if self._decoder is None:
                self._decoder = msgspec.json.Decoder(_find_format(row))
            return tuple(_requests(line, self._decoder.decode(row)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TraceRowError(f"line {line}: {error}") from error
        except _RowError as error:
            raise TraceRowError(f"line {line}: {error}") from error


class _RowError(Exception):
    pass


def _find_format(row: bytes) -> type[_Row]:
    fields = msgspec.json.decode(row)
    for name, kind in _FORMATS.items():
        if isinstance(fields, dict) and name in fields:
            return kind
    raise _RowError(
        "no format that is known: a row has `hash_ids` (Mooncake), `messages` (chats) or `requests` (text)"
    )


def _requests(line: int, row: _Row) -> Iterator[TraceRequest]:
    if isinstance(row, _ChatRow):
        yield from _chat_requests(line, row)
    elif isinstance(row, _TextRow):
        yield from _text_requests(line, row)
    else:
        yield TraceRequest(
            line=line,
            at_s=row.timestamp / 1000,
            prompt=BlockPrompt(hash_ids=row.hash_ids, input_tokens=row.input_length),
            output_tokens=max(1, row.output_length),
            session=None if row.session is None else str(row.session),
        )


def _text_requests(line: int, row: _TextRow) -> Iterator[TraceRequest]:
    for call in row.requests:
        yield TraceRequest(
            line=line,
            at_s=row.timestamp / 1000,
            prompt=TextPrompt(text=call.prompt),
            output_tokens=max(1, call.output_tokens or USUAL_OUTPUT_TOKENS),
        )


def _chat_requests(line: int, row: _ChatRow) -> Iterator[TraceRequest]:
    for point in row.request_points:
        if point > len(row.messages):
            raise _RowError(
                f"request point {point} is behind the last of {len(row.messages)} messages"
            )
        yield TraceRequest(
            line=line,
            at_s=None,
            prompt=ChatPrompt(messages=row.messages[:point]),
            output_tokens=_said_tokens(row.messages[point : point + 1]),
            session=row.id or f"line {line}",
        )


def _said_tokens(following: Sequence[Mapping[str, Any]]) -> int:
    for message in following:
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str) and content:
            return max(1, len(content) // CHARS_PER_TOKEN)
    return USUAL_OUTPUT_TOKENS


def find_block_tokens(requests: Sequence[TraceRequest]) -> int | None:
    """Tokens of a trace's blocks: the power of two that fits most rows; None without block ids."""
    prompts = [each.prompt for each in requests if isinstance(each.prompt, BlockPrompt)]
    if not prompts:
        return None
    fitting = {size: sum(_fits(each, size) for each in prompts) for size in BLOCK_SIZES}
    return max(BLOCK_SIZES, key=lambda size: fitting[size])


def _fits(prompt: BlockPrompt, size: int) -> bool:
    blocks = len(prompt.hash_ids)
    return (blocks - 1) * size < prompt.input_tokens <= blocks * size
