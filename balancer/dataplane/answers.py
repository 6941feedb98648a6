"""Passes an engine's answer on to the client, and reads its usage from the side.

Rules:

1. Status, end-to-end headers and body pass unchanged; ours are added (`x-kvlb-*`). After a prefill
   leg one value of `usage` is that leg's (`core.http.usage_splice`).
2. An event stream passes event by event, anything else as it comes. What isn't a stream is held
   until it is complete (up to 1 MiB), so that a cut one still becomes an honest 502, and one in which
   the engine gave up without a word the error that it is. A larger one passes as it comes, a cut one
   breaks off, and its usage stays unknown; so does that of whatever the engine has encoded.
3. A stream that breaks before `[DONE]` ends for the client in an error event and a broken
   connection, never in an end that looks like one.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from balancer.core.errors import BalancerError, EngineError, EngineRefusedError, StreamCutError
from balancer.core.http.headers import (
    ASKS_WHY,
    Headers,
    drop_header,
    find_header,
    pass_answer_headers,
)
from balancer.core.http.openai_errors import render_error_event
from balancer.core.http.sse import SseReader
from balancer.core.http.usage import Usage, usage_of
from balancer.core.http.usage_splice import with_details
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.routing.explain import explain_headers
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.answer_headers import encode_headers, plan_headers
from balancer.dataplane.beginnings import (
    MAX_HELD_BYTES,
    check_whole,
    check_words,
    end_watch,
    gather,
)
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.exchange import Exchange
from balancer.dataplane.one_leg import DecodeAnswer
from balancer.dataplane.passing_stream import Watch

_WORDLESS_BYTES: Final = 1024
"""Longer ones say something, unless they tell of no token."""


class AnswerPasser:
    """Writes answers of one request to its client. One per request."""

    def __init__(
        self,
        *,
        exchange: Exchange,
        record: RequestRecord,
        settings: DataPlaneSettings,
        clock: Callable[[], float],
        on_stream: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_stream` is told of each stream that goes on behind its first token."""
        self._exchange = exchange
        self._record = record
        self._on_stream = on_stream
        self._headers = settings.headers
        self._tells_prefill = settings.usage_of_prefill
        self._clock = clock
        self._passes_events = False

    def pass_generated(self, decoded: DecodeAnswer, *, withhold_usage: bool) -> Awaitable[None]:
        """Pass on the answer to a chat or completions request."""
        answer = decoded.answer
        own = plan_headers(decoded.plan)
        encode = self._record.encode
        if encode is not None:
            own = (*own, *encode_headers(encode))
        if find_header(self._exchange.headers, ASKS_WHY) is not None:
            own = (*own, *explain_headers(decoded.plan))
        headers = self._answer_headers(answer.headers, own)
        if answer.is_encoded or answer.status != 200:  # a redirect, whatever it calls itself
            return self._pass_unread(decoded, headers)
        if answer.is_event_stream:
            return self._pass_events(decoded, headers, withhold_usage=withhold_usage)
        if answer.is_over and len(decoded.first) < MAX_HELD_BYTES:
            return self._pass_held(decoded, decoded.first, headers)
        return self._pass_gathered(decoded, headers)

    async def pass_forwarded(
        self,
        answer: UpstreamAnswer,
        first: bytes,
        leg: LegRecord,
        watch: Watch | None = None,
        *,
        has_word: bool = True,
    ) -> None:
        """Pass on whatever an instance answered. `watch` sees it go by, and b"" at its end."""
        plan = self._record.plan
        if plan is not None and plan.decode.candidate.instance.alias == leg.alias:
            own = plan_headers(plan)
        else:
            own = ((b"x-kvlb-instance", leg.alias.encode()),)
        headers = self._answer_headers(answer.headers, own)
        await self._start(answer.status, headers, has_word=has_word)
        await self._pass_rest(answer, first, watch)

    def note_word(self) -> None:
        """What its client has waited for is here."""
        if self._record.first_byte_s is None:
            self._record.first_byte_s = self._clock()

    def note_error(self, leg: LegRecord) -> None:
        """The stream has passed, and told of an error."""
        leg.error = self._record.error = "engine_error_event"

    async def pass_refusal(self, refused: EngineRefusedError) -> None:
        """Pass on an engine's 4xx or 5xx: status, headers (Retry-After) and body are its own."""
        headers = self._answer_headers(
            refused.headers, ((b"x-kvlb-instance", refused.alias.encode()),)
        )
        headers = drop_header(headers, b"content-length")
        length = str(len(refused.body)).encode()
        await self._send(refused.status, (*headers, (b"content-length", length)), refused.body)

    async def pass_own(self, status: int, headers: Headers, body: bytes) -> None:
        """Send an answer of our own."""
        own = self._retried() if self._headers == "full" else ()
        await self._send(status, (*headers, *own, *self._id_headers()), body)

    async def break_off(self, error: BalancerError) -> None:
        """End an answer that is under way, and not as if it were complete."""
        if self._record.ended_s is not None:
            return
        if self._passes_events:
            # It may have been inside an event; a blank line more is harmless.
            await self._exchange.write(b"\n\n" + render_error_event(error))
        await self._exchange.abort()

    async def _pass_events(
        self, decoded: DecodeAnswer, headers: Headers, *, withhold_usage: bool
    ) -> None:
        details = self._details(decoded)
        has_word = decoded.on_word is None
        reader = SseReader(withhold_usage=withhold_usage, details=details, has_data=has_word)
        if withhold_usage or details is not None:
            headers = drop_header(headers, b"content-length")
        await self._start(decoded.answer.status, headers, has_word=has_word)
        self._passes_events = True
        passage = _Passage(decoded, reader, self._exchange.push, self._clock, self.note_word)
        try:
            await self._pass_until_done(decoded, passage)
        except EngineError as error:
            ending = b"\n\n" if reader.is_inside_event else b""
            await self._exchange.write(ending + render_error_event(error))
            await self._exchange.abort()
            raise
        finally:
            _note_usage(decoded, reader.usage)
        if reader.has_error:
            self.note_error(decoded.leg)
        else:
            passage.keep()
        await self._finish()

    async def _pass_until_done(self, decoded: DecodeAnswer, passage: "_Passage") -> None:
        exchange, reader, take = self._exchange, passage.reader, passage.take
        try:
            if not take(decoded.first):
                await exchange.drain()
            if not decoded.answer.is_complete:
                self._on_stream()
            while not await decoded.answer.hand_to(take):
                await exchange.drain()
        except EngineError:
            if not reader.is_done:
                raise
        rest = reader.finish()
        if not reader.is_done and not reader.has_error:
            raise StreamCutError("the engine's stream ended before it was done")
        if rest:
            await exchange.write(rest)

    async def _pass_unread(self, decoded: DecodeAnswer, headers: Headers) -> None:
        decoded.guard.first_token()
        await self._start(decoded.answer.status, headers)
        await self._pass_rest(decoded.answer, decoded.first)

    async def _pass_gathered(self, decoded: DecodeAnswer, headers: Headers) -> None:
        """Hold what is no stream until it is complete, or too large for that."""
        answer = decoded.answer
        held = await gather(answer, decoded.first)
        if len(held) >= MAX_HELD_BYTES:
            await self._start(answer.status, headers)
            await self._pass_rest(answer, held, end_watch(answer))
            return
        await self._pass_held(decoded, held, headers)

    def _pass_held(self, decoded: DecodeAnswer, held: bytes, headers: Headers) -> Awaitable[None]:
        check_whole(decoded.answer, held)
        usage = usage_of(held)
        may_be_wordless = (
            len(held) < _WORDLESS_BYTES or usage is None or not usage.completion_tokens
        )
        if may_be_wordless and decoded.answer.status == 200:
            check_words(held, decoded.leg, is_handed=decoded.is_handed)
        decoded.guard.first_token()
        _note_usage(decoded, usage)
        if decoded.keep is not None:
            decoded.keep(held)
        details = None if decoded.plan.prefill is None else self._details(decoded)
        if details is not None:
            held = with_details(held, details)
            headers = _with_length(headers, len(held))
        return self._send(decoded.answer.status, headers, held)

    async def _pass_rest(
        self,
        answer: UpstreamAnswer,
        first: bytes,
        watch: Watch | None = None,
    ) -> None:
        """Pass `first` and what follows; a cut one breaks the client's connection, too."""
        push = self._exchange.push if watch is None else _tapped(self._exchange.push, watch)
        exchange = self._exchange
        try:
            if first and not push(first):
                await exchange.drain()
            while not await answer.hand_to(push):
                await exchange.drain()
            if watch is not None:
                watch(b"")
        except EngineError:
            await exchange.abort()
            raise
        await self._finish()

    def _details(self, decoded: DecodeAnswer) -> bytes | None:
        """What the usage is to say of the prompt, where another engine read it."""
        if not self._tells_prefill or decoded.plan.prefill is None:
            return None
        leg = self._record.prefill_leg
        return None if leg is None else leg.prompt_details

    def _send(self, status: int, headers: Headers, body: bytes) -> Awaitable[None]:
        """Send an answer that is here as a whole."""
        record = self._record
        record.status = status
        record.first_byte_s = record.ended_s = self._clock()
        return self._exchange.answer(status, headers, body)

    def _start(self, status: int, headers: Headers, *, has_word: bool = True) -> Awaitable[None]:
        """`has_word`: a comment isn't what its client has waited for."""
        self._record.status = status
        if has_word:
            self.note_word()
        return self._exchange.start(status, headers)

    def _finish(self) -> Awaitable[None]:
        # First the note, then the end: from here on the client may leave without a loss.
        self._record.ended_s = self._clock()
        return self._exchange.finish()

    def _answer_headers(self, engine: Headers, own: Headers) -> Headers:
        shown = (*own, *self._retried()) if self._headers == "full" else ()
        passed = pass_answer_headers(engine)
        if self._headers == "off":
            return passed
        return (*passed, *shown, (b"x-request-id", self._record.request_id.encode()))

    def _retried(self) -> Headers:
        retries = self._record.retries
        return ((b"x-kvlb-retries", str(retries).encode()),) if retries else ()

    def _id_headers(self) -> Headers:
        if self._headers == "off":
            return ()
        return ((b"x-request-id", self._record.request_id.encode()),)


class _Passage:
    """One event stream on its way, taken piece by piece as the engine's connection reads it."""

    __slots__ = ("_clock", "_decoded", "_is_computed", "_note_word", "_push", "_raw", "reader")

    def __init__(
        self,
        decoded: DecodeAnswer,
        reader: SseReader,
        push: Callable[[bytes], bool],
        clock: Callable[[], float],
        note_word: Callable[[], None],
    ) -> None:
        self.reader = reader
        self._decoded = decoded
        self._push = push
        self._clock = clock
        self._note_word = note_word
        self._is_computed = False
        self._raw = None if decoded.keep is None else bytearray()

    def take(self, chunk: bytes) -> bool:
        """Pass a piece on; False if the client is slow."""
        reader = self.reader
        passed = reader.feed(chunk)
        if not self._is_computed and reader.has_data:
            self._is_computed = True
            self._on_token()
        if self._raw is not None and len(self._raw) < MAX_HELD_BYTES:
            self._raw += chunk
        return self._push(passed) if passed else True

    def _on_token(self) -> None:
        decoded = self._decoded
        if decoded.on_word is not None:
            if self.reader.has_error:
                return  # none of it: there was nothing but comments before
            decoded.on_word()
            self._note_word()
        decoded.leg.first_token_s = self._clock()
        decoded.guard.first_token()

    def keep(self) -> None:
        """It is complete; what was too large to be kept isn't told."""
        if self._decoded.keep and self._raw is not None and len(self._raw) < MAX_HELD_BYTES:
            self._decoded.keep(bytes(self._raw))


def _tapped(push: Callable[[bytes], bool], watch: Watch) -> Callable[[bytes], bool]:
    def push_watched(chunk: bytes) -> bool:
        watch(chunk)
        return push(chunk)

    return push_watched


def _with_length(headers: Headers, length: int) -> Headers:
    """The same headers; a length that they tell is this one."""
    if find_header(headers, b"content-length") is None:
        return headers
    told = (b"content-length", str(length).encode())
    return (*drop_header(headers, b"content-length"), told)


def _note_usage(decoded: DecodeAnswer, usage: Usage | None) -> None:
    if usage is None:
        return
    leg = decoded.leg
    leg.prompt_tokens = usage.prompt_tokens
    leg.cached_tokens = usage.cached_tokens
    leg.completion_tokens = usage.completion_tokens
    if usage.completion_tokens is not None:
        decoded.guard.generated(usage.completion_tokens)
    if usage.cached_tokens is not None:
        decoded.guard.cached(usage.cached_tokens)
