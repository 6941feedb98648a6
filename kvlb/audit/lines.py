"""Reads the lines of one file of a capture, gzipped or not, and as far as it goes.

Rules:

1. A recorder that is killed leaves files that are cut. All that is whole of them is read, and where they
   end is told (`Cut`): gzip without its end, or a last line that has begun and isn't whole.
2. Anything else is an error: what no recorder has left must not pass for a short recording.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvlb.errors import KvlbError

GZIP_MAGIC = b"\x1f\x8b"
GZIP_ONLY = 16 + zlib.MAX_WBITS


class CaptureError(KvlbError):
    """A capture that cannot be read; the message names file, line and fault."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Where a file ends although it isn't finished."""

    file: str
    after_line: int
    """The last line that was read, counted from 1; 0 if there is none."""
    dropped_lines: int
    """1 if the line after it had begun, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Every whole line that isn't empty, with its place (`FILE:LINE`), in order."""

    rows: Sequence[tuple[str, bytes]]
    cut: Cut | None
    """None: the file is whole."""


def read_lines(path: Path) -> Lines:
    """Read a file. Raises CaptureError if it can't be, or if it is damaged and not just cut."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CaptureError(f"{path}: cannot be read: {error.strerror or error}") from error
    is_cut = False
    if raw and raw[:2] == GZIP_MAGIC[: len(raw)]:
        try:
            raw, is_cut = _unpack(raw)
        except zlib.error as error:
            raise CaptureError(f"{path}: broken gzip file: {error}") from error
    lines = raw.split(b"\n")
    last = lines[-1]
    # A first line that isn't whole is no sign of JSON lines, unless they were packed as such.
    has_dropped = (is_cut or len(lines) > 1) and _has_only_begun(last)
    if has_dropped or not last:
        lines.pop()
    rows = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    cut = Cut(file=str(path), after_line=len(lines), dropped_lines=int(has_dropped))
    return Lines(rows=rows, cut=cut if is_cut or has_dropped else None)


def _unpack(packed: bytes) -> tuple[bytes, bool]:
    """The content, and whether the end is missing. Raises zlib.error if anything else is wrong."""
    parts: list[bytes] = []
    while packed:
        member = zlib.decompressobj(wbits=GZIP_ONLY)
        parts.append(member.decompress(packed))
        if not member.eof:
            return b"".join(parts), True
        packed = member.unused_data.lstrip(b"\0")  # padding, as the gzip module has it
    return b"".join(parts), False


def _has_only_begun(line: bytes) -> bool:
    """Whether a line without its end is the beginning of a JSON object."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return False
