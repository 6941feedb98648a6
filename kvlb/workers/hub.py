"""The parent's part in what its workers share: load passed on, figures added up.

Workers and other balancers are peers of each other, wherever they are. What a worker tells goes to its
siblings at once, and to other balancers over Redis where there is one; what those tell goes to every
worker. So siblings agree while Redis is gone, and Redis has one reader per balancer, not per worker.

Of a worker that has ended, counters stay as they were last read: `balancer.core.merged_figures` says why.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog

from balancer.core.decision_log import TimedDecision
from balancer.core.load.peer_messages import (
    WIRE_VERSION,
    Batch,
    Left,
    PeerMessageError,
    decode_message,
    encode_message,
)
from balancer.core.merged_figures import Family, Figures, keep, merge
from balancer.sharing import RETRY_S, Channel, ChannelError
from kvlb.workers.pipe import Load, Pipe, PipeClosedError
from kvlb.workers.seat import FIGURES, decode_figures, decode_recent

ANSWER_S = 1.0
"""Who takes longer is shown as read last."""
MOST_WAITING = 10_000
"""Messages for other balancers, while Redis doesn't take any."""

_logger = structlog.get_logger(__name__)


class Hub:
    """One per parent."""

    def __init__(self, own_figures: Callable[[], Figures], channel: Channel | None) -> None:
        """`own_figures` are the parent's own. `channel` leads to other balancers."""
        self._own_figures = own_figures
        self._channel = channel
        self._pipes: dict[int, Pipe] = {}
        self._names: dict[int, str] = {}
        """What each worker is called among peers."""
        self._heard_s: dict[int, float] = {}
        """When each worker gave its last sign of life."""
        self._last: dict[int, Figures] = {}
        self._ended: list[Family] = []
        self._waiting: list[bytes] = []
        self._wake = asyncio.Event()
        self._tells_fault = True

    def join(self, number: int, pipe: Pipe) -> None:
        """A worker has been started."""

        async def answer(what: str, limit: int) -> bytes:
            return await self._answer(number, what, limit)

        self._pipes[number] = pipe
        self._heard_s.pop(number, None)
        pipe.answer = answer
        pipe.on_load = lambda messages: self._on_load(number, messages)

    def leave(self, number: int) -> None:
        """It has ended, however it did: nothing of it is in flight any more."""
        del self._pipes[number]
        self._heard_s.pop(number, None)
        self._ended = keep(self._ended, self._last.pop(number, ()))
        name = self._names.pop(number, None)
        if name is not None:
            self._pass_on(number, [encode_message(Left(WIRE_VERSION, name))])

    def silent(self, for_s: float) -> list[int]:
        """Workers that have given signs of life, and none for so long."""
        before_s = asyncio.get_running_loop().time() - for_s
        return [number for number, at_s in self._heard_s.items() if at_s < before_s]

    async def run(self) -> None:
        """Keep other balancers in touch, until cancelled."""
        if self._channel is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send(self._channel))
            group.create_task(self._receive(self._channel))

    async def figures(self, first: int | None = None) -> list[Family]:
        """Of all workers, living and ended, and of the parent; gauges as worker `first` sees them."""
        answers = await self._ask_all(FIGURES, 0)
        for number, payload in answers.items():
            self._last[number] = decode_figures(payload)
        numbers = sorted(self._last, key=lambda number: (number != first, number))
        living = [self._last[number] for number in numbers]
        return merge([*living, self._own_figures()], self._ended)

    async def _answer(self, number: int, what: str, limit: int) -> bytes:
        if what == FIGURES:
            return msgspec.msgpack.encode(await self.figures(number))
        answers = await self._ask_all(what, limit)
        recent: list[TimedDecision] = []
        for payload in answers.values():
            recent += decode_recent(payload)
        return msgspec.msgpack.encode(recent)

    async def _ask_all(self, what: str, limit: int) -> Mapping[int, bytes]:
        answers: dict[int, bytes] = {}

        async def ask(number: int, pipe: Pipe) -> None:
            try:
                async with asyncio.timeout(ANSWER_S):
                    payload = await pipe.ask(what, limit)
            except (TimeoutError, PipeClosedError):
                return
            if payload and self._pipes.get(number) is pipe:
                answers[number] = payload

        async with asyncio.TaskGroup() as group:
            for number, pipe in self._pipes.items():
                group.create_task(ask(number, pipe))
        return answers

    def _on_load(self, number: int, messages: Sequence[bytes]) -> None:
        self._heard_s[number] = asyncio.get_running_loop().time()
        if number not in self._names:
            self._learn_name(number, messages)
        self._pass_on(number, messages)

    def _pass_on(self, sender: int | None, messages: Sequence[bytes]) -> None:
        frame = Load(list(messages))
        for number, pipe in self._pipes.items():
            if number != sender:
                pipe.send(frame)
        if sender is None or self._channel is None:
            return
        self._waiting += messages
        if len(self._waiting) > MOST_WAITING:
            self._waiting.clear()
        self._wake.set()

    def _learn_name(self, number: int, messages: Sequence[bytes]) -> None:
        for each in messages:
            try:
                message = decode_message(each)
            except PeerMessageError:
                continue
            if isinstance(message, Batch):
                self._names[number] = message.peer
                return

    async def _send(self, channel: Channel) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            try:
                await channel.send(waiting)
            except ChannelError as error:
                self._note(error)
            else:
                self._tells_fault = True

    async def _receive(self, channel: Channel) -> None:
        while True:
            try:
                await channel.receive(lambda message: self._pass_on(None, [message]))
            except ChannelError as error:
                self._note(error)
            except Exception:
                _logger.exception("load_sharing_failed")
            await asyncio.sleep(RETRY_S)

    def _note(self, error: ChannelError) -> None:
        if self._tells_fault:  # once per outage
            _logger.warning("load_not_shared", error=str(error))
        self._tells_fault = False
