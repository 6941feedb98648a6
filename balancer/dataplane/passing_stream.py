"""What is learned of a forwarded answer while it passes: its first word, its id, and how it ends.

Rules:

1. Nothing here changes or delays a byte.
2. A stream that ends without having come to its end raises StreamCutError, for whoever passes it to break off.
   So does JSON that nothing but its connection ends.
"""

from collections.abc import Callable

from balancer.core.errors import StreamCutError
from balancer.core.http.json_end import JsonEnd
from balancer.core.http.stored_responses import ResponseIdReader
from balancer.core.http.stream_beginning import FirstWord
from balancer.core.http.stream_end import StreamEnd

Watch = Callable[[bytes], None]
"""Sees every piece of an answer go by, and b"" at its end."""


def watching(*watches: Watch | None) -> Watch | None:
    """All of them in one."""
    present = [each for each in watches if each is not None]
    if len(present) < 2:
        return present[0] if present else None

    def watch(chunk: bytes) -> None:
        for each in present:
            each(chunk)

    return watch


def watch_first_word(*tell: Callable[[], None]) -> Watch:
    """Tell of the first word of a stream that began with a comment."""
    word = FirstWord()

    def watch(chunk: bytes) -> None:
        if word.take(chunk):
            for each in tell:
                each()

    return watch


def watch_id(reader: ResponseIdReader, on_id: Callable[[str], None]) -> Watch:
    """Tell of the id of a response as soon as it has passed."""

    def watch(chunk: bytes) -> None:
        if reader.is_over:
            return
        if chunk:
            reader.feed(chunk)
        else:
            reader.finish()
        if reader.id is not None:
            on_id(reader.id)

    return watch


def watch_end(end: StreamEnd, on_error: Callable[[], None]) -> Watch:
    """Raise StreamCutError at the end of a cut stream; tell of one that told of an error."""

    def watch(chunk: bytes) -> None:
        if chunk:
            end.feed(chunk)
        elif not end.is_whole:
            raise StreamCutError("the engine's stream ended before it was done")
        elif end.has_error:
            on_error()

    return watch


def watch_whole(end: JsonEnd) -> Watch:
    """Raise StreamCutError at the end of a document that was cut."""

    def watch(chunk: bytes) -> None:
        if chunk:
            end.feed(chunk)
            return
        if not end.is_whole:
            raise StreamCutError("the engine's answer was cut")

    return watch
