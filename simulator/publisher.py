"""One rank's event stream: a PUB socket, a ring of what was sent, a ROUTER that replays it.

A batch is numbered, sent, and kept. Replies are framed as the release does it: with a topic frame
from 0.26 on, without before. A request that isn't exactly (identity, empty, number) gets no answer.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import structlog
import zmq
import zmq.asyncio

from simulator.core.event_faults import EventFaults, FaultyWire, affects
from simulator.core.settings import EngineSettings
from simulator.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from simulator.core.wire import EventEncoder, Oddities

_logger = structlog.get_logger(__name__)

_END_MARKER = b"\xff" * 8
_FIRST_RELEASE_WITH_TOPIC = (0, 26, 0)
_FIRST_RELEASE_WITH_LARGE_QUEUE = (0, 33, 0)
_OLD_QUEUE_MESSAGES = 1000
_LIVE_QUEUE_MESSAGES = 100_000
_BIND_S = 5.0
_BIND_PAUSE_S = 0.02


class EventPublisher:
    """Publishes the events of one rank; sequence numbers start at 0 with every new publisher."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        rank: int,
        context: zmq.asyncio.Context,
        wall_clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._wall_clock = wall_clock
        self._encoder = EventEncoder(settings.release, int_hashes=settings.int_hashes)
        self._topic = settings.topic.encode()
        self._next_seq = 0
        self._ring: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        # A plain socket: PUB never blocks, so sending needs no future. The context has to make it,
        # or it wouldn't know what to close.
        plain = cast("zmq.Context[zmq.Socket[bytes]]", context)
        self._live = plain.socket(zmq.PUB, socket_class=zmq.Socket)
        self._live.set(zmq.LINGER, 0)
        self._live.set(zmq.SNDHWM, _LIVE_QUEUE_MESSAGES)
        self._replay = context.socket(zmq.ROUTER)
        self._replay.set(zmq.LINGER, 0)
        large = settings.release >= _FIRST_RELEASE_WITH_LARGE_QUEUE
        queue = 2 * (settings.buffer_steps + 1) if large else _OLD_QUEUE_MESSAGES
        self._replay.set(zmq.SNDHWM, queue)
        self._wire = FaultyWire()

    @property
    def faults(self) -> EventFaults:
        """What goes wrong from the next batch on."""
        return self._wire.faults

    @faults.setter
    def faults(self, faults: EventFaults) -> None:
        self._wire.faults = faults

    @property
    def dropped_batches(self) -> int:
        """Batches withheld from live subscribers."""
        return self._wire.dropped_batches

    @property
    def last_seq(self) -> int:
        """The newest number used, -1 before the first."""
        return self._next_seq - 1

    async def listen(self, host: str, port: int) -> None:
        """Let subscribers connect; after a stop the system may need a moment to give ports back."""
        await _bind(self._live, f"tcp://{host}:{port}")

    def dial(self, host: str, port: int) -> None:
        """Connect to a subscriber, as vLLM does where its endpoint names no wildcard."""
        self._live.connect(f"tcp://{host}:{port}")

    async def offer_replay(self, host: str, port: int) -> None:
        """Listen for replay requests."""
        await _bind(self._replay, f"tcp://{host}:{port}")

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send one batch."""
        wire, faults, number = self._wire, self._wire.faults, self._next_seq
        for kind, is_hidden in (
            (AllBlocksCleared, faults.hides_clears),
            (BlockStored, faults.hides_stores),
            (BlockRemoved, faults.hides_removals),
        ):
            if is_hidden:
                events = [event for event in events if not isinstance(event, kind)]
        if faults.is_silent or not events:
            return
        payload = self._encoder.encode_batch(
            events,
            unix_s=self._wall_clock(),
            rank=self._rank,
            oddities=Oddities(
                has_bad_event=affects(faults.bad_event_every, number),
                has_contradictions=affects(faults.contradiction_every, number),
                mixes_hash_forms=faults.mixes_hash_forms,
                copies_medium=faults.copies_medium,
            ),
        )
        seq = number.to_bytes(8, "big")
        self._next_seq += 1
        for frames in wire.live(self._topic, seq, payload):
            self._live.send_multipart(frames, zmq.NOBLOCK)
        if wire.is_kept(seq):
            self._ring.append((seq, payload))

    async def run_replay(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or frames[1] != b"":
                _logger.warning("replay_request_ignored", frames=len(frames))
                continue
            identity, _empty, wanted = frames
            await self._answer(identity, int.from_bytes(wanted, "big"))

    async def _answer(self, identity: bytes, first_seq: int) -> None:
        has_topic = self._settings.release >= _FIRST_RELEASE_WITH_TOPIC
        await asyncio.sleep(self._wire.faults.replay_delay_s)
        wanted = [batch for batch in self._ring if int.from_bytes(batch[0], "big") >= first_seq]
        for batch in self._wire.replayed(wanted):
            topic = b"" if batch is None else self._topic
            head = [identity, b"", topic] if has_topic else [identity, b""]
            await self._replay.send_multipart([*head, *(batch or (_END_MARKER, b""))])
            # Send returns without waiting as long as the queue has room.
            await asyncio.sleep(0)

    def close(self) -> None:
        """Free the ports; what wasn't sent is lost, as with a killed process."""
        self._live.close(linger=0)
        self._replay.close(linger=0)


async def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str) -> None:
    """Bind as soon as the port is free; raises TimeoutError naming it if it doesn't get so."""
    try:
        async with asyncio.timeout(_BIND_S):
            while True:
                if _is_bound(socket, endpoint):
                    return
                await asyncio.sleep(_BIND_PAUSE_S)
    except TimeoutError as error:
        raise TimeoutError(f"{endpoint} is in use") from error


def _is_bound(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str) -> bool:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        return False
    return True
