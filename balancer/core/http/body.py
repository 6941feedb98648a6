"""A request body as it came: in pieces, so that a large one is never copied to be passed on.

Rules:

1. The pieces are the client's bytes, in order; nothing here changes or joins them unasked.
2. `whole` joins them, for bodies that have to be read (JSON).
"""


class PiecedBody:
    """The pieces of one body. As long as it is kept, so are they."""

    __slots__ = ("pieces", "size_bytes")

    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        self.pieces = pieces
        self.size_bytes = sum(map(len, pieces))


Body = bytes | PiecedBody


def size_bytes(body: Body) -> int:
    """How long the body is."""
    return len(body) if isinstance(body, bytes) else body.size_bytes


def whole(body: Body) -> bytes:
    """The body in one piece; a copy only if it has several."""
    if isinstance(body, bytes):
        return body
    return body.pieces[0] if len(body.pieces) == 1 else b"".join(body.pieces)


def pieces(body: Body) -> tuple[bytes, ...]:
    """The body as it can be written, one after the other."""
    return (body,) if isinstance(body, bytes) else body.pieces
