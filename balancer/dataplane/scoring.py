"""Where a request that is handed over whole goes by what is cached: messages, responses, token ids.

Rules:

1. What can be read of its prompt is looked up and weighed as for chats, over the ranks that answer
   clients; no prefill leg is made of it. The choice is booked until the request has ended there.
2. Cache knowledge is advice: whatever fails here costs it, and the request goes by load.
3. An instance that doesn't have the path is no candidate.
"""

from collections.abc import Iterable
from typing import Protocol

import msgspec

from balancer.core.errors import BadRequestError, FleetError
from balancer.core.fleet.model_lookup import find_model
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.http.body import whole
from balancer.core.http.engine_paths import EnginePath
from balancer.core.http.forwarded import ReadBody
from balancer.core.http.headers import Headers
from balancer.core.http.rewrite import decode_body
from balancer.core.prompt.known_ids import IdTexts
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.sessions import opening
from balancer.core.routing.unread import UNREAD
from balancer.dataplane.jobs import note_candidate, note_plan, overlap
from balancer.dataplane.placing import Place
from balancer.routing.route import Route
from balancer.routing.router import Router


class Prompts(Protocol):
    """What the data plane needs of the tokens stage."""

    texts: IdTexts
    """Prompts of token ids that were read."""

    async def read(self, fleet: Fleet, request: GenerateRequest) -> PromptView:
        """Find the request's tokens within a deadline; never fails the request."""
        ...


class ScoredPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that was chosen, and the booking there."""

    place: Place
    route: Route
    is_read: bool
    """Whether anything is expected of its cache."""

    def first_of(self, places: Iterable[Place]) -> list[Place]:
        """It, then the others as they were."""
        others = [each for each in places if each.instance.id != self.place.instance.id]
        return [self.place, *others]

    def note(self, leg: LegRecord) -> None:
        """Write down what was expected of it."""
        candidate = self.route.plan.decode.candidate
        leg.rank = candidate.rank.rank
        if self.is_read:
            leg.overlap_tokens = overlap(candidate)
            note_candidate(leg, candidate)


class Scoring:
    """One per process."""

    def __init__(self, reader: Prompts, router: Router) -> None:
        self._reader = reader
        self._router = router

    async def find(
        self,
        fleet: Fleet,
        use: EnginePath,
        read: ReadBody,
        headers: Headers,
        record: RequestRecord,
        lacking: Iterable[Instance] = (),
    ) -> ScoredPlace | None:
        """Choose and book; None: nothing is known that could decide. `lacking` aren't asked."""
        request = _request(fleet, use, read, headers, record)
        if request is None:
            return None
        try:
            is_read = self._router.reads_prompt(fleet, request.model)
        except FleetError:
            return None
        prompt = await self._reader.read(fleet, request) if is_read else UNREAD
        record.prompt_tokens = prompt.prompt_tokens
        record.prompt_source = prompt.source
        record.unscorable = prompt.unscorable
        if is_read and not prompt.prompts and opening(request.body) is None:
            return None
        exclude = frozenset(rank for each in lacking for rank in each.rank_ids())
        try:
            route = await self._router.route(fleet, request, prompt, exclude=exclude)
        except FleetError:  # all are full, or none is left: by load they may still be asked
            return None
        note_plan(record, route.plan)
        chosen = route.plan.decode.candidate
        place = Place(instance=chosen.instance, rank=chosen.rank)
        return ScoredPlace(place=place, route=route, is_read=is_read)


def _request(
    fleet: Fleet, use: EnginePath, read: ReadBody, headers: Headers, record: RequestRecord
) -> GenerateRequest | None:
    if use.scored is None or read.model is None or read.previous_response is not None:
        return None
    raw = whole(read.body)
    try:
        decoded = decode_body(raw)
    except BadRequestError:  # the engine will say what is wrong with it
        return None
    meant = find_model(fleet, read.model)
    return GenerateRequest(
        request_id=record.request_id,
        endpoint=use.scored,
        body=decoded.value,
        raw_body=raw,
        headers=headers,
        model=meant.model,
        base_model=meant.base_model,
        lora=meant.lora,
        is_unicode=decoded.is_unicode,
    )
