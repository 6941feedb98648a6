"""`kvlb load`: sends conversations to a balancer until it is stopped, and says how it goes.

Conversations begin at a steady rate whatever the answers do; a user's next turn follows the answer
before it. A failed turn ends its conversation, is counted, and nothing else: the point is to watch
a fleet over hours, through restarts and outages.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import structlog

from kvlb.balancer_url import balancer_url
from kvlb.errors import PeerError
from kvlb.event_loop import run_command, stop_event
from kvlb.logs import configure_logs
from simulator.workload import Conversation, WorkloadShape, conversations

CONVERSATIONS_PER_SEED = 32
MOST_CONVERSATIONS = 64
"""Under way at once; a fleet that is slower than the rate isn't buried."""
MODEL_PAUSE_S = 1.0
DATA = "data: {"

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

    def add_answer(self, usage: Mapping[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.answered += 1
        self.prompt_tokens += usage.get("prompt_tokens") or 0
        self.cached_tokens += details.get("cached_tokens") or 0
        self.changed.set()

    def add_failure(self) -> None:
        self.failed += 1
        self.changed.set()

    async def reached(self, requests: int | None) -> None:
        """Wait until so many were sent and came back."""
        while requests is None or self.answered + self.failed < requests:
            self.changed.clear()
            await self.changed.wait()


class _TurnFailedError(Exception):
    """A turn brought no answer; the text says why."""


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
    limits = httpx.Limits(max_connections=2 * MOST_CONVERSATIONS)
    with stop_event() as stopped:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=options.timeout_s, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            sending = group.create_task(_Sender(options, http, counts).run())
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

    def __init__(self, options: LoadOptions, http: httpx.AsyncClient, counts: LoadCounts) -> None:
        self._options = options
        self._reason = "no answer"
        """Why there is no model yet."""
        self._http = http
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
            answer = await self._http.get(f"{self._options.url}/v1/models")
        except httpx.HTTPError as error:
            self._reason = str(error) or type(error).__name__
            return None
        if answer.status_code != httpx.codes.OK:
            self._reason = f"status {answer.status_code}"
            return None
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            self._reason = "the answer lists no model"
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
        except _TurnFailedError as error:
            self._counts.add_failure()
            _logger.warning("turn_failed", reason=str(error))
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
        url = f"{self._options.url}/v1/chat/completions"
        pieces: list[str] = []
        usage: Mapping[str, Any] = {}
        try:
            async with self._http.stream("POST", url, json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise _TurnFailedError(f"status {answer.status_code}")
                async for line in answer.aiter_lines():
                    if line.startswith(DATA):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise _TurnFailedError("the answer was cut by an error")
                        usage = chunk.get("usage") or usage
                        pieces += [_content(choice) for choice in chunk.get("choices") or ()]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise _TurnFailedError(type(error).__name__) from error
        self._counts.add_answer(usage)
        return "".join(pieces)


def _content(choice: Mapping[str, Any]) -> str:
    return choice.get("delta", {}).get("content") or ""


def _endless_conversations(seed: int) -> Iterator[Conversation]:
    shape = WorkloadShape(conversations=CONVERSATIONS_PER_SEED)
    for each in count(seed):
        yield from conversations(each, shape)
