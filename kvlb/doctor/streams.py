"""Listens to the event streams of a fleet while requests are sent, and tries the replay sockets."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from indexer.config import RankSource
from indexer.core.events import BlockStored, EventBatch, UndecodableBatchError, decode_batch
from indexer.core.frames import FrameError, parse_replay
from indexer.core.types import RankId
from indexer.sockets import Frames, ReplaySocket, SocketError, ZmqContext
from kvlb.event_taps import tapped

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

    def on_frames(self, frames: Frames) -> None:
        try:
            batch = decode_batch(frames[-1])
        except UndecodableBatchError:
            return
        if len(self.batches) < MOST_BATCHES:
            self.batches.append(batch)
        self.changed.set()

    def on_connected(self) -> None:
        self.is_connected = True
        self.changed.set()

    def on_problem(self, problem: str) -> None:
        self.problem = problem
        self.changed.set()

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
    sources: Sequence[RankSource], context: ZmqContext
) -> AsyncIterator[dict[RankId, HeardStream]]:
    """Follow every stream until the block ends."""
    heard = {source.rank: HeardStream(source) for source in sources}
    async with tapped(heard.values(), context):
        yield heard


async def answers_replay(source: RankSource, context: ZmqContext, patience_s: float) -> bool | None:
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
