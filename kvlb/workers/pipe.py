"""Frames between the parent and one worker, over a pair of sockets.

Rules:

1. Load is passed on at once and never waited for; where the other side doesn't read any more it is
   dropped, and asked for later by whom it misses.
2. A question gets an answer, an empty one if there is none, or `PipeClosedError` when the other side has
   ended.
3. The pipe ends with either process: that is how each knows of the other's end.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, assert_never

import msgspec
import structlog

from kvlb.settings import Overrides

MOST_WAITING_BYTES = 16 * 1024 * 1024
LENGTH_BYTES = 4

_logger = structlog.get_logger(__name__)


class PipeClosedError(Exception):
    """The other side has ended."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The parent's first frame: what to run."""

    number: int
    overrides: Overrides
    config: str | None
    balancer_id: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker accepts connections."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The worker is to finish what runs, and to end.

    No signal: supervisors that signal all processes of a service would make it the second one.
    """


class Load(msgspec.Struct, frozen=True, tag="load"):
    """What peers tell each other (`balancer.core.load.peer_messages`)."""

    messages: list[bytes]


class Question(msgspec.Struct, frozen=True, tag="question"):
    """To be answered under its number."""

    number: int
    what: str
    limit: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """To the question of that number."""

    number: int
    payload: bytes


Frame = Start | Ready | Stop | Load | Question | Answer

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


class Pipe:
    """One end. Make one with `Pipe.open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._number = 0
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self.on_load: Callable[[Sequence[bytes]], None] = lambda _: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None
        self.answer: Callable[[str, int], Awaitable[bytes]] = _nothing

    @classmethod
    async def open(cls, end: socket.socket) -> Self:
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, frame: Frame) -> None:
        """Soon; nothing happens if the other side has ended."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if isinstance(frame, Load) and transport.get_write_buffer_size() > MOST_WAITING_BYTES:
            return
        packed = _encoder.encode(frame)
        self._writer.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)

    async def ask(self, what: str, limit: int = 0) -> bytes:
        """Raises PipeClosedError; set a deadline."""
        if self._writer.transport.is_closing():
            raise PipeClosedError
        self._number += 1
        number = self._number
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(Question(number, what, limit))
            payload: bytes = await answer
        finally:
            del self._asked[number]
        return payload

    async def read(self) -> Frame | None:
        """The next frame; None: the other side has ended."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            frame: Frame = _decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return frame

    async def run(self) -> None:
        """Take in what comes, until the other side ends."""
        try:
            async with asyncio.TaskGroup() as group:
                answering: set[asyncio.Task[None]] = set()
                while (frame := await self.read()) is not None:
                    if isinstance(frame, Question):
                        task = group.create_task(self._reply(frame))
                        answering.add(task)
                        task.add_done_callback(answering.discard)
                    else:
                        self._take(frame)
                for task in answering:
                    task.cancel()
        finally:
            self.close()

    def close(self) -> None:
        """Both sides know from now on."""
        self._writer.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(PipeClosedError())

    def _take(self, frame: Load | Answer | Ready | Stop | Start) -> None:
        match frame:
            case Load():
                self.on_load(frame.messages)
            case Answer():
                waiting = self._asked.get(frame.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame.payload)
            case Ready():
                self.on_ready()
            case Stop():
                self.on_stop()
            case Start():
                return
            case never:
                assert_never(never)

    async def _reply(self, question: Question) -> None:
        payload = b""
        try:
            payload = await self.answer(question.what, question.limit)
        except Exception:  # a collector's bug must not end a process
            _logger.exception("question_failed", what=question.what)
        self.send(Answer(question.number, payload))


async def _nothing(_what: str, _limit: int) -> bytes:
    return b""
