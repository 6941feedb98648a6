"""Writes every message of a rank's event socket, and what its replay socket still has."""

import asyncio
from dataclasses import dataclass, field

from indexer.config import RankSource
from indexer.core.frames import FrameError, parse_live, parse_replay
from indexer.sockets import Frames, ReplaySocket, SocketError, ZmqContext
from kvlb.record.stations import Station
from kvlb.record.writer import CaptureWriter

REPLAY_SILENCE_S = 5.0


@dataclass(slots=True)
class StreamRecorder:
    """One rank's messages on their way into the file."""

    station: Station
    writer: CaptureWriter
    messages: int = 0
    has_gap: bool = False
    """A number was left out: the replay at the end has it, perhaps."""
    problem: str | None = None
    _last_seq: int | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def source(self) -> RankSource:
        return self.station.source

    def on_frames(self, frames: Frames) -> None:
        seq = parse_live(frames).seq
        self.has_gap |= self._last_seq is not None and seq != self._last_seq + 1
        self._last_seq = seq
        self.messages += 1
        self.writer.message(self.station.label, frames)
        self._changed.set()

    def on_connected(self) -> None:
        """Nothing to write."""

    def on_problem(self, problem: str) -> None:
        self.problem = problem
        self._changed.set()

    async def brings(self, messages: int, patience_s: float) -> bool:
        """Wait for so many messages in all; False if they don't come in time."""
        try:
            async with asyncio.timeout(patience_s):
                while self.messages < messages and self.problem is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return self.problem is None


async def record_replay(
    station: Station, writer: CaptureWriter, context: ZmqContext, label: str
) -> None:
    """Ask for everything the engine still buffers, and write it as it comes."""
    endpoint = station.source.replay
    if endpoint is None:
        return
    frames: list[list[str]] = []
    has_ended = False
    began_s = writer.clock()
    try:
        with ReplaySocket(endpoint, high_water=0, context=context) as socket:
            socket.ask(0)
            while not has_ended and (taken := await socket.take_messages(REPLAY_SILENCE_S)):
                for message in taken:
                    has_ended = has_ended or parse_replay(message) is None
                    if not has_ended:
                        frames.append([frame.hex() for frame in message])
    except (SocketError, FrameError) as error:
        writer.note("replay_failed", src=station.label, label=label, error=str(error))
        return
    writer.replayed += len(frames)
    writer.note(
        "replay",
        t1=writer.clock(),
        label=label,
        src=station.label,
        start_seq=0,
        end_marker=has_ended,
        n=len(frames),
        frames=frames,
        asked_s=began_s,
    )
