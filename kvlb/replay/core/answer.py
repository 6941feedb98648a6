"""Reads a streamed answer as it comes: first token, pauses between tokens, usage, errors, end.

Rules:

1. An event with something said is a token: text, a delta of anything but the role, or an empty text
   that doesn't end the answer (half a character). A chat's opening isn't one.
2. Tokens that arrive together have no pause between them: that is how the client sees it.
3. An answer is whole with `[DONE]`. Without, or with an error event, it has failed, whatever it said.
4. Bytes may be cut anywhere; lines end in LF or CRLF.

Cost: one decoding per event, a few microseconds.
"""

from array import array
from typing import Any, Final

import msgspec

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


class AnswerReader:
    """One answer. `feed` every piece with its time of arrival; then look."""

    __slots__ = (
        "_keeps_text",
        "_kept",
        "cached_tokens",
        "completion_tokens",
        "fault",
        "first_s",
        "gaps_s",
        "is_done",
        "last_s",
        "prompt_tokens",
        "text",
        "tokens",
    )

    def __init__(self, *, keeps_text: bool = False) -> None:
        self._keeps_text = keeps_text
        self._kept = b""
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gaps_s = array("f")
        self.tokens = 0
        """Events that said something."""
        self.text: list[str] = []
        """What was said, in pieces; only kept if asked for."""
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        """None: the endpoint didn't tell."""
        self.is_done = False
        self.fault: str | None = None
        """`error_event` or `garbled`, if there was one."""

    def feed(self, piece: bytes, now_s: float) -> None:
        """Take what arrived at `now_s`."""
        *lines, self._kept = (self._kept + piece).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._on_data(line[len(_DATA) :].strip(), now_s)

    def _on_data(self, data: bytes, now_s: float) -> None:
        if data == _DONE:
            self.is_done = True
            return
        try:
            event = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.fault = self.fault or "garbled"
            return
        if event.error is not None:
            self.fault = "error_event"
        if event.usage is not None:
            self._on_usage(event.usage)
        for choice in event.choices or ():
            self._on_choice(choice, now_s)

    def _on_usage(self, usage: _Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens
        self.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _on_choice(self, choice: _Choice, now_s: float) -> None:
        if not _says_something(choice):
            return
        if self._keeps_text:
            said = choice.text or (choice.delta or {}).get("content")
            self.text += [said] if isinstance(said, str) else []
        self.tokens += 1
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s


def _says_something(choice: _Choice) -> bool:
    if choice.delta is not None:
        return any(value for name, value in choice.delta.items() if name != "role")
    return bool(choice.text) or (choice.text is not None and choice.finish_reason is None)
