"""Listens to the event streams of a fleet while requests are sent, and tries the replay sockets."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import zmq.asyncio

from indexer.config import RankSource
from indexer.core.events import BlockStored, EventBatch, UndecodableBatchError, decode_batch
from indexer.core.frames import FrameError, parse_live, parse_replay
from indexer.core.types import RankId
from indexer.sockets import LiveSocket, ReplaySocket, SocketError

FAR_SEQ = 2**62
"""No engine has come so far: the answer to a replay from here is the end marker alone."""
MOST_BATCHES = 10_000


@dataclass(slots=True)
class HeardStream:
    """What came on one rank's stream so far."""

    source: RankSource
    problem: str | None = None
    is_connected: bool = False
    batches: list[EventBatch] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def stored(self) -> Sequence[BlockStored]:
        """Every announcement, in order."""
        return [
            event
            for batch in self.batches
            for event in batch.events
            if isinstance(event, BlockStored)
        ]

    async def grows_beyond(self, batches: int, patience_s: float) -> bool:
        """Wait for more than so many batches; False if none came in time."""
        try:
            async with asyncio.timeout(patience_s):
                while len(self.batches) <= batches:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return True

    async def connects(self, patience_s: float) -> None:
        """Wait for the connection, but not for ever."""
        try:
            async with asyncio.timeout(patience_s):
                while not self.is_connected and self.problem is None:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return


@asynccontextmanager
async def listening(
    sources: Sequence[RankSource], context: zmq.asyncio.Context
) -> AsyncIterator[dict[RankId, HeardStream]]:
    """Follow every stream until the block ends. A port that several ranks dial is opened once."""
    heard = {source.rank: HeardStream(source) for source in sources}
    by_endpoint: dict[str, list[HeardStream]] = {}
    for stream in heard.values():
        by_endpoint.setdefault(stream.source.events, []).append(stream)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_listen(endpoint, streams, context))
            for endpoint, streams in by_endpoint.items()
        ]
        yield heard
        for task in tasks:
            task.cancel()


async def _listen(
    endpoint: str, streams: Sequence[HeardStream], context: zmq.asyncio.Context
) -> None:
    direction = streams[0].source.direction
    try:
        socket = LiveSocket(endpoint, direction=direction, high_water=0, context=context)
    except SocketError as error:
        for stream in streams:
            stream.problem = str(error)
            stream.changed.set()
        return
    with socket:
        while True:
            await socket.wait()
            for frames in socket.take_messages():
                _hear(frames, streams)
            for is_up in socket.take_connections():
                for stream in streams:
                    stream.is_connected = stream.is_connected or is_up
                    stream.changed.set()


def _hear(frames: Sequence[bytes], streams: Sequence[HeardStream]) -> None:
    try:
        message = parse_live(frames)
        batch = decode_batch(message.payload)
    except (FrameError, UndecodableBatchError):
        return
    topic = message.topic.decode(errors="replace")
    for stream in streams:
        is_its = len(streams) == 1 or stream.source.topic in {None, topic}
        if is_its and len(stream.batches) < MOST_BATCHES:
            stream.batches.append(batch)
            stream.changed.set()


async def answers_replay(
    source: RankSource, context: zmq.asyncio.Context, patience_s: float
) -> bool | None:
    """Whether the replay socket answers; None if there is none."""
    if source.replay is None:
        return None
    try:
        with ReplaySocket(source.replay, high_water=0, context=context) as socket:
            socket.ask(FAR_SEQ)
            async with asyncio.timeout(patience_s):
                while True:
                    for frames in await socket.take_messages(patience_s):
                        if parse_replay(frames) is None:
                            return True
    except (SocketError, FrameError, TimeoutError):
        return False
