"""`kvlb load`: sends conversations to a balancer until it is stopped, and says how it goes.

Conversations begin at a steady rate whatever the answers do; a user's next turn follows the answer
before it. A failed turn ends its conversation, is counted, and nothing else: the point is to watch
a fleet over hours, through restarts and outages.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import msgspec
import structlog

from kvlb.balancer_url import balancer_url
from kvlb.errors import PeerError
from kvlb.event_loop import run_command, stop_event
from kvlb.logs import configure_logs
from kvlb.openai_endpoint import CallFailedError, OpenAiEndpoint
from kvlb.replay.core.answer import AnswerReader
from kvlb.replay.core.prompts import CHAT
from simulator.workload import Conversation, WorkloadShape, conversations

CONVERSATIONS_PER_SEED = 32
MOST_CONVERSATIONS = 64
"""Under way at once; a fleet that is slower than the rate isn't buried."""
MODEL_PAUSE_S = 1.0

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What the command line says."""

    url: str
    model: str | None
    conversations_per_s: float
    seed: int
    requests: int | None
    """Stop after so many; None: never."""
    report_s: float = 10.0
    timeout_s: float = 300.0
    wait_s: float = 60.0
    """For a model to be listed."""


@dataclass(slots=True)
class LoadCounts:
    """What came back so far."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add_answer(self, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        self.answered += 1
        self.prompt_tokens += prompt_tokens or 0
        self.cached_tokens += cached_tokens or 0
        self.changed.set()

    def add_failure(self) -> None:
        self.failed += 1
        self.changed.set()

    async def reached(self, requests: int | None) -> None:
        """Wait until so many were sent and came back."""
        while requests is None or self.answered + self.failed < requests:
            self.changed.clear()
            await self.changed.wait()


def load(options: LoadOptions) -> None:
    """Send traffic until SIGINT, SIGTERM or `options.requests`."""
    balancer_url(options.url)
    configure_logs()
    counts = run_command(send_load(options))
    if not counts.answered and counts.failed:
        raise PeerError(f"no request was answered by {options.url}")


async def send_load(options: LoadOptions) -> LoadCounts:
    """Send traffic until a signal or the last request; return what came back."""
    counts = LoadCounts()
    with stop_event() as stopped:
        async with (
            OpenAiEndpoint(options.url, silence_s=options.timeout_s) as endpoint,
            asyncio.TaskGroup() as group,
        ):
            sending = group.create_task(_Sender(options, endpoint, counts).run())
            reporting = group.create_task(_report_forever(counts, options.report_s))
            ends = (
                group.create_task(stopped.wait()),
                group.create_task(counts.reached(options.requests)),
            )
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in (sending, reporting, *ends):
                task.cancel()
    _report(counts)
    return counts


async def _report_forever(counts: LoadCounts, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        _report(counts)


def _report(counts: LoadCounts) -> None:
    cached = counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else 0.0
    _logger.info(
        "load_sent",
        answered=counts.answered,
        failed=counts.failed,
        cached_ratio=round(cached, 3),
    )


class _Sender:
    """Begins conversations and carries each on to its end."""

    def __init__(self, options: LoadOptions, endpoint: OpenAiEndpoint, counts: LoadCounts) -> None:
        self._options = options
        self._reason = "no answer"
        """Why there is no model yet."""
        self._endpoint = endpoint
        self._counts = counts
        self._room = asyncio.Semaphore(MOST_CONVERSATIONS)

    async def run(self) -> None:
        """Begin conversations until cancelled."""
        model = self._options.model or await self._find_model()
        pause_s = 1 / self._options.conversations_per_s
        next_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for conversation in _endless_conversations(self._options.seed):
                await self._room.acquire()
                group.create_task(self._converse(conversation, model))
                next_s = max(next_s + pause_s, time.monotonic())
                await asyncio.sleep(next_s - time.monotonic())

    async def _find_model(self) -> str:
        """Wait until the balancer lists a model. Raises PeerError after `wait_s`."""
        options = self._options
        try:
            async with asyncio.timeout(options.wait_s):
                while (model := await self._ask_model()) is None:
                    _logger.info("model_awaited", url=options.url, reason=self._reason)
                    await asyncio.sleep(MODEL_PAUSE_S)
        except TimeoutError as error:
            raise PeerError(
                f"{options.url} listed no model within {options.wait_s:g} s (--wait): {self._reason}"
            ) from error
        return model

    async def _ask_model(self) -> str | None:
        """The first model listed; None, and the reason noted, while the fleet isn't there yet."""
        try:
            return await self._endpoint.first_model()
        except CallFailedError as error:
            self._reason = str(error)
            return None

    async def _converse(self, conversation: Conversation, model: str) -> None:
        try:
            messages = []
            if conversation.system:
                messages.append({"role": "system", "content": conversation.system})
            for turn in conversation.turns:
                await asyncio.sleep(turn.think_s)
                messages.append({"role": "user", "content": turn.text})
                text = await self._ask(model, messages, turn.max_tokens)
                messages.append({"role": "assistant", "content": text})
        except CallFailedError as error:
            self._counts.add_failure()
            _logger.warning("turn_failed", reason=error.kind)
        finally:
            self._room.release()

    async def _ask(self, model: str, messages: list[dict[str, str]], max_tokens: int) -> str:
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reader = AnswerReader(keeps_text=True)
        await self._endpoint.stream(
            CHAT, msgspec.json.encode(body), lambda piece: reader.feed(piece, time.monotonic())
        )
        if reader.fault is not None:
            raise CallFailedError(reader.fault, "the answer was cut by an error")
        self._counts.add_answer(reader.prompt_tokens, reader.cached_tokens)
        return "".join(reader.text)


def _endless_conversations(seed: int) -> Iterator[Conversation]:
    shape = WorkloadShape(conversations=CONVERSATIONS_PER_SEED)
    for each in count(seed):
        yield from conversations(each, shape)
