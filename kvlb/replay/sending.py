"""The open loop: sends each request when it is due, whatever the answers do.

Bodies are written while there is nothing to send, so that a burst doesn't wait for them. Above
`max_in_flight` a request that is due isn't sent at all and counts as `in_flight_limit`: sending it
later would make the load depend on the answers.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvlb.openai_endpoint import CallFailedError, OpenAiEndpoint
from kvlb.replay.core.answer import AnswerReader
from kvlb.replay.core.outcomes import Outcome
from kvlb.replay.core.prompts import PromptWriter, WrittenRequest
from kvlb.replay.core.schedule import Timed

WRITTEN_AHEAD: Final = 64
SPARE_S: Final = 0.005
"""Nothing is written so shortly before a request is due."""
ENGINE_HEADERS: Final = (
    "x-kvlb-instance",
    "x-gateway-destination-endpoint-served",
    "x-gateway-destination-endpoint",
    "x-worker-id",
    "x-served-by",
    "x-upstream-addr",
)
"""Of an answer: who computed it, as balancers say it. The first that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """How requests are sent."""

    max_in_flight: int = 1024
    timeout_s: float = 600.0
    session_header: str | None = None
    """Carries the session, where the trace has one."""
    engine_header: str | None = None
    """Names the engine; None: one of `ENGINE_HEADERS`."""


@dataclass(slots=True, kw_only=True)
class Sent:
    """What has happened so far."""

    outcomes: list[Outcome] = field(default_factory=list)
    in_flight: int = 0
    answered: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    """By kind of error, what the first one said."""

    @property
    def failed(self) -> int:
        return len(self.outcomes) - self.answered

    def add(self, outcome: Outcome, reason: str | None = None) -> None:
        self.outcomes.append(outcome)
        if outcome.error is None:
            self.answered += 1
        elif reason:
            self.reasons.setdefault(outcome.error, reason)


class Sender:
    """Sends one request at a time, and knows what became of each."""

    def __init__(self, endpoint: OpenAiEndpoint, options: SendOptions, sent: Sent) -> None:
        self._endpoint = endpoint
        self._options = options
        self._sent = sent

    @property
    def has_room(self) -> bool:
        return self._sent.in_flight < self._options.max_in_flight

    def pass_over(self, timed: Timed) -> None:
        """It is due, but too many are under way."""
        self._sent.add(_outcome(timed, "in_flight_limit"))

    async def ask(self, timed: Timed, written: WrittenRequest, due_s: float) -> None:
        """Send one request; whatever comes of it is an outcome."""
        reader = AnswerReader()
        sent_s = time.monotonic()
        outcome = replace(_outcome(timed, "stopped"), late_s=max(0.0, sent_s - due_s))
        reason = None
        self._sent.in_flight += 1
        try:
            async with asyncio.timeout(self._options.timeout_s):
                headers = await self._endpoint.stream(
                    written.path,
                    written.body,
                    lambda piece: reader.feed(piece, time.monotonic()),
                    self._headers(timed),
                )
            outcome = _answered(outcome, reader, sent_s, self._engine(headers))
        except CallFailedError as error:
            outcome, reason = replace(outcome, error=error.kind), str(error)
        except TimeoutError:
            outcome = replace(outcome, error="timeout")
        finally:
            self._sent.in_flight -= 1
            self._sent.add(outcome, reason)

    def _headers(self, timed: Timed) -> dict[str, str]:
        name, session = self._options.session_header, timed.request.session
        return {name: session} if name and session is not None else {}

    def _engine(self, headers: Mapping[str, str]) -> str | None:
        own = self._options.engine_header
        names = (own.lower(),) if own else ENGINE_HEADERS
        return next((headers[name] for name in names if name in headers), None)


class OpenLoop:
    """Sends one schedule."""

    def __init__(self, sender: Sender, writer: PromptWriter) -> None:
        self._sender = sender
        self._writer = writer
        self._written: deque[tuple[Timed, WrittenRequest]] = deque()

    async def run(self, schedule: Sequence[Timed], stopped: asyncio.Event) -> float:
        """Send all of it, wait for the answers, and say how long it took.

        Once `stopped` is set nothing more is sent, and what is under way counts as `stopped`.
        """
        waiting = deque(schedule)
        for _ in range(min(WRITTEN_AHEAD, len(waiting))):
            self._write(waiting.popleft())
        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = await self._send_all(waiting, begun_s, stopped, group)
            if tasks:
                stopping = group.create_task(stopped.wait())
                answering = group.create_task(_wait_for(tasks))
                await asyncio.wait((stopping, answering), return_when=asyncio.FIRST_COMPLETED)
                for task in (stopping, answering, *tasks):
                    task.cancel()
        return time.monotonic() - begun_s

    async def _send_all(
        self,
        waiting: deque[Timed],
        begun_s: float,
        stopped: asyncio.Event,
        group: asyncio.TaskGroup,
    ) -> set[asyncio.Task[None]]:
        tasks: set[asyncio.Task[None]] = set()
        while waiting or self._written:
            if self._may_write(begun_s) and waiting:
                self._write(waiting.popleft())
                await asyncio.sleep(0)
                continue
            timed, written = self._written.popleft()
            due_s = begun_s + timed.at_s
            if not await _is_due(due_s, stopped):
                break
            if not self._sender.has_room:
                self._sender.pass_over(timed)
                continue
            task = group.create_task(self._sender.ask(timed, written, due_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(0)
        return tasks

    def _may_write(self, begun_s: float) -> bool:
        """There is time, or nothing else to do."""
        if not self._written:
            return True
        next_s = begun_s + self._written[0][0].at_s
        return len(self._written) < WRITTEN_AHEAD and next_s - time.monotonic() > SPARE_S

    def _write(self, timed: Timed) -> None:
        self._written.append((timed, self._writer.write(timed.request)))


def _outcome(timed: Timed, error: str) -> Outcome:
    request = timed.request
    return Outcome(line=request.line, session=request.session, at_s=timed.at_s, error=error)


def _answered(outcome: Outcome, reader: AnswerReader, sent_s: float, engine: str | None) -> Outcome:
    """What a complete HTTP answer amounts to."""
    error = reader.fault
    if error is None and not reader.is_done:
        error = "unfinished"
    if error is not None or reader.first_s is None:
        return replace(outcome, error=error or "empty")
    return replace(
        outcome,
        error=None,
        ttft_s=reader.first_s - sent_s,
        e2e_s=reader.last_s - sent_s,
        gaps_s=reader.gaps_s,
        prompt_tokens=reader.prompt_tokens,
        cached_tokens=reader.cached_tokens,
        output_tokens=reader.completion_tokens or reader.tokens,
        engine=engine,
    )


async def _is_due(due_s: float, stopped: asyncio.Event) -> bool:
    """Wait until then; False if it was stopped."""
    delay_s = due_s - time.monotonic()
    if delay_s > 0:
        try:
            async with asyncio.timeout(delay_s):
                await stopped.wait()
        except TimeoutError:
            pass
    return not stopped.is_set()


async def _wait_for(tasks: set[asyncio.Task[None]]) -> None:
    while tasks:
        await asyncio.wait(tasks)
