"""A rank with much to tell leaves the event loop to others: requests are routed on the same one."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
import zmq

from indexer.config import IndexerConfig, InstanceSource
from indexer.core.types import InstanceId, RankId
from indexer.ports import LivePort
from indexer.sockets import LiveSocket

BATCHES = 640


class Ticker:
    """Somebody else on the same event loop."""

    def __init__(self) -> None:
        self.turns = 0

    async def run(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


class Listening:
    """A `ports.Listener` that is always ready for more, and looks at the ticker."""

    def __init__(self, ticker: Ticker) -> None:
        self.turns: list[int] = []
        self.done = asyncio.Event()
        self._ticker = ticker

    async def on_live(self, seq: int, payload: bytes) -> None:  # noqa: ARG002 - the protocol's
        self.turns.append(self._ticker.turns)
        if seq == BATCHES - 1:
            self.done.set()

    async def on_some_connection(self, *, is_up: bool) -> None:
        pass

    async def on_connection(self, *, is_up: bool) -> None:
        pass

    def on_rejected(self, reason: str) -> None:
        pass


def sizes_of(messages: Sequence[Sequence[bytes]]) -> list[int]:
    return [len(frames[-1]) for frames in messages]


@pytest.mark.parametrize(
    ("payload_bytes", "taken"), [(100, 64), (1 << 19, 2)], ids=["many-small", "few-large"]
)
async def test_burst_is_bounded_by_number_and_by_bytes(payload_bytes: int, taken: int) -> None:
    """What takes long to copy is left for the next turn."""
    # Within one context messages are there as soon as they are sent.
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.bind("inproc://events")
        with LiveSocket(
            "inproc://events", direction="connect", high_water=0, context=context
        ) as socket:
            assert publisher.recv() == b"\x01"
            for _ in range(70):
                publisher.send_multipart([b"", bytes(8), bytes(payload_bytes)])

            assert sizes_of(socket.take_messages()) == [payload_bytes] * taken


async def test_port_with_a_backlog_gives_way_after_each_burst(
    publishing: Any, eventually: Any
) -> None:
    """What is there already must not be taken in one go."""
    ticker = Ticker()
    listening = Listening(ticker)
    async with publishing() as engine:
        with zmq.Context() as context:
            port = LivePort(
                engine.events,
                direction="connect",
                config=IndexerConfig(),
                context=context,
                clock=time.monotonic,
            )
            await port.add(None, listening)
            async with asyncio.TaskGroup() as group:
                running = group.create_task(port.run())
                await engine.subscribed()
                for _ in range(BATCHES):
                    engine.publish()
                ticking = group.create_task(ticker.run())
                await listening.done.wait()
                ticking.cancel()
                running.cancel()

    bursts = len(set(listening.turns))
    assert bursts >= BATCHES // 64


async def test_quiet_rank_is_served_while_another_is_flooded(
    publishing: Any, indexing: Any
) -> None:
    """The flood isn't finished when the quiet rank's one batch is in the index."""
    first, second = InstanceId("http://e0:8000"), InstanceId("http://e1:8000")
    async with publishing() as flooded, publishing() as quiet:
        sources = [
            InstanceSource(url=url, events=each.events, model="tiny", ranks=1)
            for url, each in ((first, flooded), (second, quiet))
        ]
        event = {
            "type": "BlockStored",
            "block_hashes": [1],
            "parent_block_hash": None,
            "token_ids": [0] * 4,
            "block_size": 4,
        }
        async with indexing(*sources) as (service, _):
            await flooded.subscribed()
            await quiet.subscribed()
            for _ in range(5_000):
                flooded.publish(event)
            quiet.publish(event)
            await service.caught_up(RankId(second, 0), 0)
            status = service.rank_status(RankId(first, 0))

            assert (status.last_seq or 0) < 4_999
            await service.caught_up(RankId(first, 0), 4_999)
