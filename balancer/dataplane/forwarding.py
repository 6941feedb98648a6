"""Hands a request whole to one capable instance: every engine path that isn't split or scored.

Rules:

1. The body passes untouched, whatever it is (`core.http.forwarded` says what little is read of it).
2. One retry elsewhere, as for generated answers: only while nothing has been answered. An instance
   that doesn't have the path is followed by another without one; the last one's words are the
   answer. A 500 is followed by another where a model is run while the client waits (an engine
   that died says so), not of what may have changed something. No instance is asked twice.
3. Of what runs a prompt nothing passes before its first word but comments (`dataplane.beginnings`),
   except of a response in the background, which its client may ask for by its id from then on. Streams
   are whole if they end as such streams do (`core.http.stream_end`).
4. A response that an instance keeps (Responses API) is asked of that instance, and what goes on
   from it goes there. If nobody remembers which one it is, the instances are asked, all at once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from balancer.core.errors import (
    EngineError,
    EngineRefusedError,
    NoInstanceError,
    ResponseNotFoundError,
)
from balancer.core.fleet.lacking import may_lack, says_lacking
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.handlers import Reply, reply_headers
from balancer.core.http.forwarded import ReadBody, read_body
from balancer.core.http.headers import Headers, drop_header, find_header
from balancer.core.http.stored_responses import ResponseIdReader, StoredResponses
from balancer.core.http.stream_end import StreamEnd
from balancer.core.load.ledger import LegGuard
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.answers import AnswerPasser
from balancer.dataplane.beginnings import MAX_ERROR_BYTES, end_watch, forwarded_beginning
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.elsewhere import try_places
from balancer.dataplane.forwarded_request import Forwarded, judge_forwarded
from balancer.dataplane.handling import Handling
from balancer.dataplane.leg_sender import LegSender
from balancer.dataplane.passing_stream import (
    Watch,
    watch_end,
    watch_first_word,
    watch_id,
    watching,
)
from balancer.dataplane.placing import Place, Placing
from balancer.dataplane.scoring import ScoredPlace, Scoring

_SEARCH_S: Final = 2.0
_MAX_ASKED: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Errand:
    """A request, understood."""

    request: Forwarded
    read: ReadBody
    record: RequestRecord
    passer: AnswerPasser

    @property
    def is_awaited(self) -> bool:
        """A prompt is run, and nothing of it is kept before its answer has come."""
        return self.request.use.generates and not self.read.background

    @property
    def may_repeat(self) -> bool:
        """Whatever an engine has done of it before it failed, another may do it again."""
        return self.request.use.infers and not self.read.background


class Forwarding:
    """One per process: it knows who keeps which response."""

    def __init__(
        self,
        *,
        sender: LegSender,
        settings: DataPlaneSettings,
        clock: Callable[[], float],
        placing: Placing,
        scoring: Scoring,
        handling: Handling,
    ) -> None:
        self._handling = handling
        self._placing = placing
        self._scoring = scoring
        self._sender = sender
        self._retries = settings.retries
        self._clock = clock
        self._stored = StoredResponses(settings.remembered_responses)

    async def carry(
        self, fleet: Fleet, request: Forwarded, record: RequestRecord, passer: AnswerPasser
    ) -> None:
        """Get it answered. Raises BalancerError."""
        kind = find_header(request.headers, b"content-type") or b""
        read = read_body(kind, request.body, generates=request.use.generates)
        if self._handling.sees_forwarded:
            told = await judge_forwarded(self._handling, fleet, request, read, record)
            if isinstance(told, Reply):
                await passer.pass_own(told.status, reply_headers(told), told.body)
                return
            request, read = told
        record.stream = read.stream
        errand = _Errand(request=request, read=read, record=record, passer=passer)
        reliability = self._sender.reliability
        reliability.requested()
        places = await self._places(fleet, errand)
        scored = await self._score(fleet, errand, places)
        if scored is not None:
            places = scored.first_of(places)
        await try_places(
            places,
            lambda place: self._carry_to(place, errand, scored),
            record=record,
            reliability=reliability,
            retries=self._retries,
            is_lacking=_is_lacking,
        )

    async def _places(self, fleet: Fleet, errand: _Errand) -> list[Place]:
        use, read = errand.request.use, errand.read
        named = use.response
        if named is None:
            # What is wrong with the model is told first, as engines do it.
            places = self._placing.places(
                fleet,
                model=read.model,
                path=errand.request.path,
                record=errand.record,
                generates=use.generates,
            )
            named = read.previous_response if use.makes_response else None
            if named is None:
                return places
        return [self._placing.place(await self._holder(fleet, named, errand.request.headers))]

    async def _score(
        self, fleet: Fleet, errand: _Errand, places: list[Place]
    ) -> ScoredPlace | None:
        """Who has most of its prompt; None: it isn't scored. What was booked is carried to at once."""
        request, now_s = errand.request, self._clock()
        if request.use.scored is None:
            return None
        lacks = self._placing.lacking.lacks
        lacking = [each.instance for each in places if lacks(each.instance.id, request.path, now_s)]
        lacking += filter(self._placing.is_bound, fleet.instances)
        return await self._scoring.find(
            fleet, request.use, errand.read, request.headers, errand.record, lacking
        )

    async def _holder(self, fleet: Fleet, response: str, headers: Headers) -> Instance:
        """Who keeps `response`. Raises ResponseNotFoundError or NoInstanceError."""
        known = self._stored.find(response)
        holder = None if known is None else fleet.by_id(known)
        if holder is None:
            holder = await self._search(fleet, response, headers)
            self._stored.put(response, holder.id)
        if not holder.healthy:
            raise NoInstanceError("the instance that keeps this response is not available")
        return holder

    async def _search(self, fleet: Fleet, response: str, headers: Headers) -> Instance:
        """Ask every instance at once; it is kept by one of them, or by none."""
        asked = [each for each in fleet.instances if each.healthy and each.role.answers_clients]
        if len(asked) == 1:
            return asked[0]  # it says itself if it doesn't keep it
        found: list[Instance] = []

        async def ask(instance: Instance) -> None:
            if await self._keeps(instance, response, headers):
                found.append(instance)

        async with asyncio.TaskGroup() as group:
            for instance in asked[:_MAX_ASKED]:
                group.create_task(ask(instance))
        if not found:
            message = f"Response with id '{response}' not found."
            raise ResponseNotFoundError(message, param="response_id")
        return found[0]

    async def _keeps(self, instance: Instance, response: str, headers: Headers) -> bool:
        bare = drop_header(drop_header(headers, b"content-type"), b"accept-encoding")
        try:
            async with asyncio.timeout(_SEARCH_S):
                answer = await self._sender.send(
                    instance, "GET", f"/v1/responses/{response}", bare, b""
                )
                answer.close()
        except (EngineError, TimeoutError):
            return False
        return answer.status == 200

    async def _carry_to(
        self, place: Place, errand: _Errand, scored: ScoredPlace | None = None
    ) -> None:
        request = errand.request
        headers = (*request.headers, *(place.pin if request.use.generates else ()))
        chosen = scored if scored is not None and scored.place is place else None
        with (
            self._placing.hold(place) if chosen is None else chosen.route.decode_guard as guard,
            self._sender.recorded(place.instance, "forward", errand.record, None) as leg,
        ):
            if chosen is not None:
                chosen.note(leg)
            answer = await self._sender.send(
                place.instance,
                request.method,
                request.path + request.query,
                headers,
                errand.read.body,
            )
            try:
                leg.status = answer.status
                await self._refuse(place, errand, answer, leg)
                await self._pass(place, errand, answer, leg, guard)
            finally:
                answer.close()

    async def _refuse(
        self, place: Place, errand: _Errand, answer: UpstreamAnswer, leg: LegRecord
    ) -> None:
        """Read what another instance might do better. Raises EngineRefusedError."""
        path, status = errand.request.path, answer.status
        kept = errand.request.use.response
        if kept is not None and status == 404:
            self._stored.drop(kept)
            return
        is_lacking = may_lack(status) and errand.request.method != "HEAD"
        if is_lacking or status == 503 or (status == 500 and errand.may_repeat):
            body = await answer.read(MAX_ERROR_BYTES)
            if says_lacking(status, body):
                self._placing.lacking.note(place.instance.id, path, self._clock())
            raise EngineRefusedError(status, answer.headers, body, alias=leg.alias)

    async def _pass(
        self,
        place: Place,
        errand: _Errand,
        answer: UpstreamAnswer,
        leg: LegRecord,
        guard: LegGuard,
    ) -> None:
        use = errand.request.use
        first, has_word = await forwarded_beginning(
            answer, leg, generates=errand.is_awaited, may_repeat=errand.may_repeat
        )
        on_word = self._sender.when_answered(leg, has_word=has_word)
        if answer.status >= 400:  # its words pass as they are, but nothing was computed
            refused = EngineRefusedError(answer.status, answer.headers, first, alias=leg.alias)
            guard.__exit__(EngineRefusedError, refused, None)
        elif use.generates and has_word:
            guard.first_token()
        watch = self._watch(place, errand, answer, leg)
        if on_word is not None:
            word_watch = watch_first_word(on_word, guard.first_token, errand.passer.note_word)
            watch = watching(word_watch, watch)
        await errand.passer.pass_forwarded(answer, first, leg, watch, has_word=has_word)

    def _watch(
        self, place: Place, errand: _Errand, answer: UpstreamAnswer, leg: LegRecord
    ) -> Watch | None:
        """Who looks at a good answer as it passes."""
        use, holder = errand.request.use, place.instance.id
        if answer.status != 200:
            return None
        id_watch = event_watch = None
        if use.makes_response:
            reader = ResponseIdReader(is_stream=answer.is_event_stream)
            id_watch = watch_id(reader, lambda kept: self._stored.put(kept, holder))
        if use.generates and answer.is_event_stream:
            end = StreamEnd(needs_mark=use.marks_end and errand.is_awaited)
            event_watch = watch_end(end, lambda: errand.passer.note_error(leg))
        return watching(id_watch, event_watch, end_watch(answer))


def _is_lacking(error: EngineError) -> bool:
    return isinstance(error, EngineRefusedError) and says_lacking(error.status, error.body)
