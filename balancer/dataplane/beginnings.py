"""The beginnings of a leg: when it may be written, and what of its answer has to be seen first.

Rules:

1. An error status is the engine's refusal, with its body. So is an error inside a 200, as if it had
   had its status (`core.http.told_error`); an engine that gave up without a word told one. Other statuses
   (redirects) pass as they are.
2. Of an event stream whatever comes before the first token waits for it: engines send a 200, and
   some a chat's opening, before they have computed or loaded anything. A stream that ends or
   begins with an error there has failed like any answer, so another instance may be tried. It is
   one by its beginning, too, whatever kind it names. Where text is asked for an empty 200 has failed.
   A comment doesn't wait: with one the answer has begun, and what comes next is its client's to see.
   But of a leg that was handed blocks it does, since that they were read is only seen by the first token.
3. Blocks are handed over once. A leg that loads them is not written a second time, on whatever
   connection: the first may have been read, and who reads after that reads something else. Nor is
   one that keeps blocks under a name: the engine would have two of that name.
4. An engine that was handed blocks, and fails with 500, couldn't load them: nobody knows whose fault
   that is, and its words would tell its client nothing.
5. JSON whose end only the connection's tells has to be whole (`core.http.json_end`). It is held for
   that, where another instance may be asked; where not, or if it is too large, it breaks off at its end.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, NoReturn

from balancer.core.errors import (
    BlocksReadError,
    EngineClosedError,
    EngineRefusedError,
    HandOverFailedError,
    LeaseEndedError,
    StreamCutError,
)
from balancer.core.http.gave_up import read_silent
from balancer.core.http.headers import find_header
from balancer.core.http.json_end import JsonEnd, is_json_kind
from balancer.core.http.stream_beginning import (
    has_comment,
    is_usual_event,
    read_beginning,
    read_ended,
)
from balancer.core.http.told_error import (
    DECISIVE_BYTES,
    ToldError,
    begins_as_error,
    begins_as_events,
    is_usual,
    read_error,
    read_wordless,
)
from balancer.core.record import LegRecord
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.passing_stream import Watch, watch_whole

MAX_ERROR_BYTES: Final = 16 * 1024 * 1024
MAX_HELD_BYTES: Final = 1024 * 1024
"""Of an answer that is no stream: what is longer passes as it comes."""
_JSON: Final = ((b"content-type", b"application/json"),)
_LOAD_FAILED: Final = 500
_EMPTY: Final = "the engine answered 200 without a body"


class Readiness:
    """Whether one leg may be written now. One per leg; asked each time a connection is there."""

    def __init__(self, *, clock: Callable[[], float], by_s: float | None, is_handed: bool) -> None:
        """`is_handed`: the leg loads what another engine computed, at the latest by `by_s`.

        Or it keeps what it computes under a name that both legs have.
        """
        self._clock = clock
        self._by_s = by_s
        self._is_handed = is_handed
        self._is_written = False

    def check(self) -> None:
        """Raise LeaseEndedError if its blocks may be gone."""
        if self._is_handed and self._is_written:
            raise BlocksReadError("the engine closed the connection unanswered")
        if self._by_s is not None and self._clock() > self._by_s:
            raise LeaseEndedError("the prefill engine's blocks may be gone")
        self._is_written = True


async def check_status(answer: UpstreamAnswer, leg: LegRecord) -> None:
    """Raise EngineRefusedError if the engine refuses."""
    leg.status = answer.status
    if answer.status >= 400:
        body = await answer.read(MAX_ERROR_BYTES)
        raise EngineRefusedError(answer.status, answer.headers, body, alias=leg.alias)


class Beginning(NamedTuple):
    """The first bytes of an answer."""

    first: bytes
    has_word: bool
    """They say something; else they are comments, and what stood before them."""


def is_good(answer: UpstreamAnswer) -> bool:
    """Whether an answer is known for a good one by what is here: as a rule it is."""
    if answer.is_event_stream:
        return answer.status == 200 and is_usual_event(answer.piece)
    return answer.status < 400 and is_usual(answer.piece)


async def good_beginning(answer: UpstreamAnswer, leg: LegRecord, *, is_handed: bool) -> Beginning:
    """Wait for the first bytes of a good answer. Raises EngineError.

    `is_handed`: the leg loads what another engine computed.
    """
    leg.status = answer.status
    if is_good(answer):
        return Beginning(answer.take(), has_word=True)
    try:
        await check_status(answer, leg)
        return await _first_bytes(answer, leg, passes_comments=not is_handed)
    except EngineRefusedError as error:
        _blame(error, is_handed=is_handed)


def check_words(held: bytes, leg: LegRecord, *, is_handed: bool) -> None:
    """Raise EngineError if a whole answer is one of an engine that gave up without a word."""
    told = read_wordless(held)
    if told is not None:
        error = EngineRefusedError(told.status, _JSON, told.body, alias=leg.alias)
        _blame(error, is_handed=is_handed)


def _blame(error: EngineRefusedError, *, is_handed: bool) -> NoReturn:
    """Raise what a refusal is: of a leg that loads what another engine computed, rule 4."""
    if is_handed and error.status == _LOAD_FAILED:
        raise HandOverFailedError("the prompt could not be handed over") from error
    raise error


async def forwarded_beginning(
    answer: UpstreamAnswer, leg: LegRecord, *, generates: bool, may_repeat: bool
) -> Beginning:
    """Wait for the first bytes of whatever was answered. Raises EngineError.

    Only JSON is looked at for an error inside a 200, and an event stream whose first piece may be
    one. `generates`: also for the words of an engine that gave up, of a stream all up to its
    first word, and whatever kind it names. `may_repeat`: JSON without a length is waited for,
    since another instance may be asked.
    """
    held = await answer.next_chunk()
    if answer.status != 200 or answer.is_encoded:
        return Beginning(held, has_word=True)
    if generates and not held:
        raise EngineClosedError(_EMPTY)
    if answer.is_event_stream and (generates or b"error" in held):
        return await _stream_beginning(answer, leg, held, passes_comments=generates)
    if answer.is_event_stream:
        return Beginning(held, has_word=True)
    is_json = _is_json(answer)
    if is_json or generates:
        held = await _whole_beginning(answer, leg, held)
    if is_json and (generates or (may_repeat and answer.ends_with_connection)):
        held = await gather(answer, held)
        check_whole(answer, held)
        _check_forwarded_words(held, leg, generates=generates)
    return Beginning(held, has_word=True)


def _check_forwarded_words(held: bytes, leg: LegRecord, *, generates: bool) -> None:
    told = (read_wordless(held) or read_silent(held)) if generates else None
    if told is not None:
        raise EngineRefusedError(told.status, _JSON, told.body, alias=leg.alias)


def check_whole(answer: UpstreamAnswer, held: bytes) -> None:
    """Raise StreamCutError if an answer that is held to its end is JSON that was cut (rule 5)."""
    watch = end_watch(answer) if answer.is_over else None
    if watch is not None:
        watch(held)
        watch(b"")


def end_watch(answer: UpstreamAnswer) -> Watch | None:
    """Who looks, as a good answer passes, if it is whole; None: its framing or nobody tells."""
    if not answer.ends_with_connection or answer.status != 200 or answer.is_encoded:
        return None
    return watch_whole(JsonEnd()) if _is_json(answer) else None


async def gather(answer: UpstreamAnswer, first: bytes) -> bytes:
    """`first` and what comes behind it, up to where it is too large to be held."""
    held = bytearray(first)
    while len(held) < MAX_HELD_BYTES and (chunk := await answer.next_chunk()):
        held += chunk
    return bytes(held)


def _is_json(answer: UpstreamAnswer) -> bool:
    return is_json_kind(find_header(answer.headers, b"content-type"))


async def _first_bytes(
    answer: UpstreamAnswer, leg: LegRecord, *, passes_comments: bool
) -> Beginning:
    held = await _next_chunk(answer)
    if answer.status != 200:
        return Beginning(held, has_word=True)  # a redirect, whatever its body says
    if not held:
        raise EngineClosedError(_EMPTY)
    if answer.is_event_stream:
        return await _stream_beginning(answer, leg, held, passes_comments=passes_comments)
    if not answer.is_encoded:
        held = await _whole_beginning(answer, leg, held)
    return Beginning(held, has_word=True)


async def _stream_beginning(
    answer: UpstreamAnswer, leg: LegRecord, held: bytes, *, passes_comments: bool
) -> Beginning:
    told: ToldError | bool | None = read_beginning(held)
    while not told:
        if passes_comments and not answer.is_over and has_comment(held):
            return Beginning(held, has_word=False)
        chunk = await _next_chunk(answer)
        if not chunk:
            told = read_ended(held)
            if told is None:
                raise EngineClosedError("the engine's stream ended before its first word")
            break
        held += chunk
        told = read_beginning(held)
    if isinstance(told, ToldError):
        raise EngineRefusedError(told.status, _JSON, told.body, alias=leg.alias)
    return Beginning(held, has_word=True)


async def _whole_beginning(answer: UpstreamAnswer, leg: LegRecord, held: bytes) -> bytes:
    """The beginning of what is no stream. Raises EngineRefusedError if all of it is an error."""
    if is_usual(held):
        return held
    # One that is cut behind its first byte is told as that, however early.
    while len(held) < DECISIVE_BYTES and (chunk := await answer.next_chunk()):
        held += chunk
    if begins_as_events(held):
        return (await _stream_beginning(answer, leg, held, passes_comments=False)).first
    if not begins_as_error(held):
        return held
    held += await answer.read(MAX_ERROR_BYTES)
    told = read_error(held)
    if told is not None:
        raise EngineRefusedError(told.status, answer.headers, told.body, alias=leg.alias)
    return held


async def _next_chunk(answer: UpstreamAnswer) -> bytes:
    try:
        return await answer.next_chunk()
    except StreamCutError as error:
        raise EngineClosedError("the engine left before its answer's first token") from error
