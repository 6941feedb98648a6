"""Event sockets of many ranks, opened once each, every message handed on as it came.

For tools that look at engines without an index: `kvlb doctor`, `kvlb record`. A port that several
ranks dial is bound once; there the topic says whose message it is.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from indexer.config import RankSource
from indexer.core.frames import FrameError, parse_live
from indexer.sockets import Frames, LiveSocket, SocketError, ZmqContext


class Listener(Protocol):
    """What becomes of the messages of one rank."""

    @property
    def source(self) -> RankSource: ...
    def on_frames(self, frames: Frames) -> None:
        """Three frames: topic, number, payload."""
        ...

    def on_connected(self) -> None: ...
    def on_problem(self, problem: str) -> None:
        """The socket can't be opened; nothing will come."""
        ...


@asynccontextmanager
async def tapped(listeners: Iterable[Listener], context: ZmqContext) -> AsyncIterator[None]:
    """Listen until the block ends."""
    by_endpoint: dict[str, list[Listener]] = {}
    for listener in listeners:
        by_endpoint.setdefault(listener.source.events, []).append(listener)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_listen(endpoint, several, context))
            for endpoint, several in by_endpoint.items()
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _listen(endpoint: str, listeners: Sequence[Listener], context: ZmqContext) -> None:
    direction = listeners[0].source.direction
    try:
        socket = LiveSocket(endpoint, direction=direction, high_water=0, context=context)
    except SocketError as error:
        for listener in listeners:
            listener.on_problem(str(error))
        return
    with socket:
        while True:
            await socket.wait()
            for frames in socket.take_messages():
                _hand_on(frames, listeners)
            for is_up in socket.take_connections():
                for listener in listeners if is_up else ():
                    listener.on_connected()


def _hand_on(frames: Frames, listeners: Sequence[Listener]) -> None:
    try:
        topic = parse_live(frames).topic.decode(errors="replace")
    except FrameError:
        return
    for listener in listeners:
        if len(listeners) == 1 or listener.source.topic in {None, topic}:
            listener.on_frames(frames)
