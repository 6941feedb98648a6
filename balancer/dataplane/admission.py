"""Who is decided at once, and who waits in the balancer until a rank has room.

Rules:

1. Nobody waits while any rank that could answer has room and nobody waited before. Where prefill
   instances serve the model, one of them needs room, too. And no more than `requests_per_s`: what the
   pace lets in the lines that it holds back take in turn, whichever model is asked for most.
2. A request that waited is decided by what the fleet, the index and the load are then, not by what
   they were when it came.
3. Whoever has to wait is looked up first: what of its prompt is cached says when it is its turn.
4. A client that leaves gives up its place at once.
5. Only first decisions wait: a further attempt of a request that an engine failed doesn't.

Room comes with time as well as with events, so whoever is first looks every `LOOK_S`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count

from balancer.core.errors import OverloadedError
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.http.headers import find_header
from balancer.core.load.ledger import LoadLedger
from balancer.core.reliability.vetting import Vetting
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.candidates import BYTES_PER_TOKEN, find_pool
from balancer.core.routing.client_classes import ClientClasses
from balancer.core.routing.pace import Pace
from balancer.core.routing.room import RankLimits, RankState, has_room
from balancer.core.routing.waiting_line import Ticket, WaitingLine
from balancer.core.settings.admission import AdmissionSettings
from balancer.dataplane.jobs import Job
from indexer.core.types import RankId

LOOK_S = 0.01

CachedShare = Callable[[Fleet, GenerateRequest, PromptView], Awaitable[float]]
"""Of a prompt, the most that any rank holds."""


class Room:
    """Whether ranks can take more."""

    def __init__(
        self,
        *,
        ledger: LoadLedger,
        vetting: Vetting,
        settings: AdmissionSettings,
        block_size: Callable[[RankId], int | None],
        max_requests_per_rank: Callable[[], int],
    ) -> None:
        """`block_size`: of a rank, in tokens; None if its events haven't told."""
        self._ledger = ledger
        self._vetting = vetting
        self._settings = settings
        self._block_size = block_size
        self._max_requests = max_requests_per_rank

    def exists(self, fleet: Fleet, model: str) -> bool:
        """Tell if a request for `model` can be decided now. Raises ModelNotFoundError or NoInstanceError."""
        most = self._max_requests()
        is_judged = self._settings.promise_s > 0 and self._ledger.knows_prefill
        if not is_judged and not most:
            return True
        limits = RankLimits(
            settings=self._settings if is_judged else None, max_requests=most or None
        )
        pool = find_pool(fleet, model)
        return self._any(pool.answering, limits) and (
            not pool.prefill or self._any(pool.prefill, limits)
        )

    def _any(self, instances: Sequence[Instance], limits: RankLimits) -> bool:
        for instance in self._vetting.usable(instances, frozenset()):
            capacity = instance.rank_cache_tokens
            decodes = instance.role.answers_clients
            for rank in instance.rank_ids():
                size = self._block_size(rank)
                state = RankState(
                    load=self._ledger.load(rank),
                    decodes=decodes,
                    memory_tokens=capacity if size else None,
                    block_size=size or 0,
                )
                if has_room(state, limits):
                    return True
        return False


class Turn:
    """Somebody was let in: nobody else is, before `end`."""

    __slots__ = ("_end",)

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def end(self) -> None:
        """It has booked, or given up."""
        self._end()


class Admission:
    """One per process."""

    def __init__(
        self,
        *,
        room: Room,
        settings: AdmissionSettings,
        fleet: Callable[[], Fleet],
        clock: Callable[[], float],
        cached_share: CachedShare,
        on_waited: Callable[[str, float], None] = lambda _outcome, _seconds: None,
    ) -> None:
        """`on_waited` is told what came of each wait (admitted, refused, left) and its seconds."""
        self._room = room
        self._settings = settings
        self._fleet = fleet
        self._clock = clock
        self._cached_share = cached_share
        self._on_waited = on_waited
        self._pace = Pace(settings.requests_per_s)
        self._classes = ClientClasses(settings.classes.values())
        self._lines: dict[str, WaitingLine] = {}
        self._turns = count()

    @property
    def waiting(self) -> Mapping[str, int]:
        """Requests that wait, by base model."""
        return {model: len(line) for model, line in self._lines.items()}

    def must_wait(self, job: Job) -> bool:
        """Whether `wait` is to be called before the request is decided; if not, it is let in."""
        if job.request.base_model in self._lines or not self._is_open(job):
            return True
        self._pace.take()
        return False

    async def wait(self, job: Job) -> Turn:
        """Return when it is its turn. Raises OverloadedError, or as `Room.exists` does."""
        cached_share = await self._cached_share(job.fleet, job.request, job.prompt)
        model = job.request.base_model
        line = self._lines.get(model)
        if line is None:
            line = WaitingLine(self._settings, paced_s=self._paced_s, turn=next(self._turns))
            self._lines[model] = line
        woken = asyncio.Event()
        arrived_s = self._clock()
        outcome = "left"
        try:
            ticket = line.enter(
                client=self._classes.client(_key(job.request)),
                priority=_priority(job.request),
                cached_share=cached_share,
                tokens=job.prompt.prompt_tokens or len(job.request.raw_body) // BYTES_PER_TOKEN,
                now_s=arrived_s,
                wake=woken.set,
            )
            await self._until_first(job, line, ticket, woken)
            outcome = "admitted"
        except OverloadedError:
            outcome = "refused"
            raise
        finally:
            job.record.waited_s = self._clock() - arrived_s
            self._on_waited(outcome, job.record.waited_s)
            self._tidy(model, line)
        return Turn(lambda: self._end(model, line))

    async def _until_first(
        self, job: Job, line: WaitingLine, ticket: Ticket, woken: asyncio.Event
    ) -> None:
        try:
            while not self._may_enter(job, line, is_first=line.first is ticket):
                line.refuse_overdue(self._clock())
                if ticket.is_refused:
                    raise line.refusal(ticket, self._clock())
                await _woken(woken, LOOK_S if line.first is ticket else None)
            line.take(ticket)
            line.turn = next(self._turns)
            self._pace.take()
        finally:
            line.leave(ticket)

    def _may_enter(self, job: Job, line: WaitingLine, *, is_first: bool) -> bool:
        if not is_first or line.is_taken:
            return False
        now_s = self._clock()
        has_room = self._room.exists(self._fleet(), job.request.model)
        if has_room and self._pace.has_room(now_s) and self._is_due(line):
            return True
        line.hold_back(now_s, by_pace=has_room)
        return False

    def _is_open(self, job: Job) -> bool:
        return (
            self._pace.has_room(self._clock())
            and not any(each.is_paced for each in self._lines.values())
            and self._room.exists(job.fleet, job.request.model)
        )

    def _is_due(self, line: WaitingLine) -> bool:
        """No other line that only the pace holds back has waited for its turn for longer."""
        lines = self._lines.values()
        return not any(each.is_paced and each.turn < line.turn for each in lines)

    def _paced_s(self) -> float:
        """How long the pace takes for everybody who waits."""
        return self._pace.seconds_for(sum(map(len, self._lines.values())))

    def _end(self, model: str, line: WaitingLine) -> None:
        line.end_turn()
        self._tidy(model, line)

    def _tidy(self, model: str, line: WaitingLine) -> None:
        if line.is_idle:
            self._lines.pop(model, None)


async def _woken(woken: asyncio.Event, within_s: float | None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await woken.wait()
    woken.clear()


def _key(request: GenerateRequest) -> str:
    """Whose share it takes. It isn't kept: the line gets its digest."""
    for name in (b"authorization", b"x-api-key"):
        value = find_header(request.headers, name)
        if value:
            return value.decode("latin-1")
    return ""


def _priority(request: GenerateRequest) -> int:
    """As vLLM reads it: `priority` of the body, else the header; smaller is earlier."""
    asked = request.body.get("priority")
    if isinstance(asked, int):
        return asked
    header = find_header(request.headers, b"x-vllm-priority")
    try:
        return int(header) if header else 0
    except ValueError:
        return 0  # the engine says what is wrong with it
