"""Finds fields of a `multipart/form-data` body without looking at the files in it.

Rules:

1. Parts are told apart by the boundary alone: what stands inside a file is never taken for a
   field, whatever it looks like.
2. A form is refused that isn't as plain as clients send it (`form_head`): one that doesn't begin with
   its boundary or isn't closed, has a line that only begins with the boundary, more than a thousand parts (as engines
   allow), a head over 8 KiB, or one of the asked fields twice or over its limit.
3. A part with a file name is a file, not a field.
4. The body may be cut into pieces anywhere; it is not joined.

Cost: one substring search over the body, and one reading of each head. Pieces of less than 16 KiB
are put together first, so that many small ones cost no more than a large one; one piece is copied where a
head or an asked field crosses from one to the next.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from balancer.core.http.form_head import read_boundary, read_part, refused

MAX_PARTS: Final = 1000
MAX_HEAD_BYTES: Final = 8192
_LEAST_PIECE_BYTES: Final = 16_384
_UNCLOSED: Final = "it isn't closed by its boundary"


def read_fields(
    content_type: bytes, pieces: Iterable[bytes], asked: Mapping[bytes, int]
) -> dict[bytes, bytes]:
    """Return those of the `asked` fields that the form has; each may have that many bytes.

    Raises BadRequestError.
    """
    delimiter = b"\r\n--" + read_boundary(content_type)
    body = _Reader(_coarse(pieces))
    if body.read_until(delimiter[2:], 0) is None:
        raise refused("it has to begin with its boundary")
    found: dict[bytes, bytes] = {}
    for _ in range(MAX_PARTS + 1):
        if not _has_next(body):
            return found
        head = body.read_until(b"\r\n\r\n", MAX_HEAD_BYTES)
        if head is None:
            raise refused(f"the head of a part has no end within {MAX_HEAD_BYTES} bytes")
        part = read_part(head)
        if part.name in asked and not part.is_file:
            if part.name in found:
                raise refused(f"`{part.name.decode()}` is there twice", part.name.decode())
            found[part.name] = _value(body, delimiter, part.name, asked[part.name])
        elif not body.skip_past(delimiter):
            raise refused(_UNCLOSED)
    raise refused(f"it has more than {MAX_PARTS} parts")


def _has_next(body: "_Reader") -> bool:
    """Whether a part follows the boundary that was just read."""
    after = body.read(2)
    if after == b"\r\n":
        return True
    if after == b"--":
        return False
    raise refused("a line begins with its boundary and goes on" if len(after) == 2 else _UNCLOSED)


def _value(body: "_Reader", delimiter: bytes, name: bytes, most_bytes: int) -> bytes:
    value = body.read_until(delimiter, most_bytes)
    if value is None:
        field = name.decode()
        raise refused(f"`{field}` has to be closed, and at most {most_bytes} bytes long", field)
    return value


def _coarse(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in fewer pieces, if they are very small."""
    small: list[bytes] = []
    size_bytes = 0
    for piece in pieces:
        if not small and len(piece) >= _LEAST_PIECE_BYTES:
            yield piece
            continue
        small.append(piece)
        size_bytes += len(piece)
        if size_bytes >= _LEAST_PIECE_BYTES:
            yield b"".join(small)
            small, size_bytes = [], 0
    yield b"".join(small)


class _Reader:
    """A place in the body."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._data = b""
        self._at = 0

    def skip_past(self, mark: bytes) -> bool:
        """Go to the end of the next `mark`; False if there is none."""
        while True:
            found = self._data.find(mark, self._at)
            if found >= 0:
                self._at = found + len(mark)
                return True
            kept = self._data[max(self._at, len(self._data) - len(mark) + 1) :]
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._data, self._at = piece, 0
            if len(piece) < len(mark):
                self._data = kept + piece
            elif (found := (kept + piece[: len(mark) - 1]).find(mark)) >= 0:
                self._at = found + len(mark) - len(kept)
                return True

    def read_until(self, mark: bytes, limit_bytes: int) -> bytes | None:
        """Return what stands before the next `mark` and go past it.

        None, without a step, if it is over the limit or there is no mark.
        """
        most = limit_bytes + len(mark)
        while (found := self._data.find(mark, self._at, self._at + most)) < 0:
            if len(self._data) - self._at >= most or not self._read_on():
                return None
        value = self._data[self._at : found]
        self._at = found + len(mark)
        return value

    def read(self, size_bytes: int) -> bytes:
        """Return the next bytes, or what there is of them."""
        while len(self._data) - self._at < size_bytes and self._read_on():
            pass
        value = self._data[self._at : self._at + size_bytes]
        self._at += len(value)
        return value

    def _read_on(self) -> bool:
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self._data, self._at = self._data[self._at :] + piece, 0
        return True
