"""Reads a capture: one file of events, one of requests, JSON lines, gzipped or not.

Rules:

1. Every error names the file and the line, and what was expected there.
2. Files that are cut are read as far as they go: `lines`.
3. Rows of unknown kind are kept as they are: captures carry notes.
4. Nothing is interpreted here; that is the business of `publishers`, `streams` and `sent`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvlb.audit.lines import CaptureError, Cut, read_lines


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One ZMQ message as it arrived."""

    t: float
    src: str
    frames: list[str]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer."""

    i: int
    src: str
    path: str
    t0: float
    t1: float | None = None
    status: int | None = None
    phase: str = "serial"
    label: str | None = None
    headers: dict[str, Any] | None = None
    body: dict[str, Any] | None = None
    tokenize: list[int] | None = None
    response: Any = None
    usage: dict[str, Any] | None = None


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay socket answered, message by message, as a DEALER saw it."""

    src: str
    frames: list[list[str]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One published batch: raw, with its publisher's label in the capture."""

    src: str
    topic: str
    seq: int
    payload: bytes
    arrived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Everything two files said, in file order."""

    messages: Sequence[Message]
    requests: Sequence[RequestRow]
    replayed: Sequence[Message]
    """Messages of recorded replays; they arrived when they were asked for, so `arrived_s` is 0."""
    notes: Sequence[Mapping[str, Any]]
    """Rows of every other kind: `config`, `started`, ..."""
    events_cut: Cut | None = None
    """Where the file of events is cut; None: it is whole."""
    requests_cut: Cut | None = None

    @property
    def heard_until_s(self) -> float:
        """From when on messages may be missing: the last one of a file that is cut, else never."""
        if self.events_cut is None:
            return math.inf
        return max((message.arrived_s for message in self.messages), default=-math.inf)


def read_capture(events: Path, requests: Path) -> Capture:
    """Read both files. Raises CaptureError."""
    told, steps = read_lines(events), read_lines(requests)
    messages = [_read_message(where, line) for where, line in told.rows]
    asked: list[RequestRow] = []
    replayed: list[Message] = []
    notes: list[Mapping[str, Any]] = []
    for where, line in steps.rows:
        row = _decode(where, line, dict[str, Any])
        match row.get("kind"):
            case "request":
                asked.append(_convert(where, row, RequestRow))
            case "replay":
                replayed.extend(_read_replay(where, _convert(where, row, ReplayRow)))
            case str():
                notes.append(row)
            case _:
                raise CaptureError(
                    f"{where}: expected a row with `kind`; is this the requests file?"
                )
    return Capture(
        messages=messages,
        requests=asked,
        replayed=replayed,
        notes=notes,
        events_cut=told.cut,
        requests_cut=steps.cut,
    )


T = TypeVar("T")


def _decode(where: str, line: bytes, row_type: type[T], hint: str = "") -> T:
    try:
        return msgspec.json.decode(line, type=row_type)
    except msgspec.ValidationError as error:
        raise CaptureError(f"{where}: {error}{hint}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CaptureError(f"{where}: {error}") from error


def _convert(where: str, row: Mapping[str, Any], row_type: type[T]) -> T:
    try:
        return msgspec.convert(row, row_type)
    except msgspec.ValidationError as error:
        raise CaptureError(f"{where}: {error}") from error


def _read_message(where: str, line: bytes) -> Message:
    row = _decode(where, line, EventRow, hint="; is this the events file?")
    if len(row.frames) != 3:
        raise CaptureError(
            f"{where}: expected 3 frames (topic, number, payload), got {len(row.frames)}"
        )
    return _message(where, row.src, row.frames, row.t)


def _read_replay(where: str, row: ReplayRow) -> Iterator[Message]:
    for frames in row.frames:
        # The topic frame came with 0.26; the last two frames are number and payload in every release.
        if len(frames) >= 2 and frames[-1]:
            topic = frames[-3] if len(frames) >= 4 else ""
            yield _message(where, row.src, [topic, *frames[-2:]], 0.0)


def _message(where: str, src: str, frames: Sequence[str], arrived_s: float) -> Message:
    try:
        topic, seq, payload = (bytes.fromhex(frame) for frame in frames)
    except ValueError as error:
        raise CaptureError(f"{where}: frames must be hexadecimal: {error}") from error
    return Message(
        src=src,
        topic=topic.decode(errors="replace"),
        seq=int.from_bytes(seq, "big"),
        payload=payload,
        arrived_s=arrived_s,
    )
