"""Event streams of simulated engines over real ZMQ sockets: live, replayed, restarted."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet

END = b"\xff" * 8


class Sockets:
    """Opens sockets that are closed with the test."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._opened: list[zmq.asyncio.Socket] = []

    def connect(self, kind: int, endpoint: str | None) -> zmq.asyncio.Socket:
        assert endpoint is not None
        socket = self._context.socket(kind)
        self._opened.append(socket)
        socket.connect(endpoint)
        return socket

    def close(self) -> None:
        for socket in self._opened:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


@asynccontextmanager
async def fleet_of_one(**settings: Any) -> AsyncIterator[tuple[RunningFleet, RunningEngine]]:
    fast = {"prefill_tokens_per_s": 1e6, "inter_token_ms": 0.5, "num_blocks": 64}
    engine = EngineSettings(**(fast | settings))
    async with running_fleet(FleetSpec.parse("1"), engine=engine) as fleet:
        yield fleet, fleet.engines[0]


class Subscriber:
    """A live subscription that is known to work."""

    def __init__(self, sockets: Sockets, endpoint: str) -> None:
        self.socket = sockets.connect(zmq.SUB, endpoint)
        self.socket.set(zmq.SUBSCRIBE, b"")

    async def receive(self) -> tuple[int, Any]:
        """Return the next batch and its number."""
        async with asyncio.timeout(20):
            _topic, seq, payload = await self.socket.recv_multipart()
        return int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)


async def ask(engine: RunningEngine, prompt: str, **headers: str) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"prompt": prompt, "max_tokens": 1}
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{engine.url}/v1/completions", json=body, headers=named)
    assert response.status_code == 200


async def subscribe(sockets: Sockets, engine: RunningEngine) -> Subscriber:
    """Subscribe and wait until batches come through: PUB tells nobody when a subscriber is in."""
    subscriber = Subscriber(sockets, engine.events_endpoint)
    async with asyncio.timeout(20):
        for number in range(1000):
            await ask(engine, f"{number:04d}" + " warm" * 20)
            if await subscriber.socket.poll(20):
                last = engine.engine.ranks[0].publisher.last_seq
                while (await subscriber.receive())[0] != last:  # of the earlier ones, too
                    pass
                return subscriber
    raise AssertionError("no batch came through")


async def drain(subscriber: Subscriber) -> None:
    while await subscriber.socket.poll(20):
        await subscriber.receive()


async def replay(sockets: Sockets, endpoint: str | None, first_seq: int) -> list[list[bytes]]:
    """Ask for a replay and return every message as it came, the end included."""
    socket = sockets.connect(zmq.DEALER, endpoint)
    await socket.send_multipart([b"", first_seq.to_bytes(8, "big")])
    messages: list[list[bytes]] = []
    async with asyncio.timeout(20):
        while not messages or END not in messages[-1]:
            messages.append(await socket.recv_multipart())
    return messages


async def test_prompt_is_announced_as_a_numbered_batch(sockets: Sockets) -> None:
    """A new prompt is one batch with one store, in the map form of new releases."""
    async with fleet_of_one() as (_fleet, engine):
        subscriber = await subscribe(sockets, engine)
        last = engine.engine.ranks[0].publisher.last_seq
        await ask(engine, "another" + " prompt" * 20)
        seq, (unix_s, events, rank) = await subscriber.receive()

    assert (seq, rank) == (last + 1, 0)
    assert unix_s > 1e9
    assert events[-1]["type"] == "BlockStored"
    assert len(events[-1]["block_hashes"]) * 16 == len(events[-1]["token_ids"])


async def test_old_release_publishes_arrays(sockets: Sockets) -> None:
    """Up to 0.23 an event is a tagged array."""
    async with fleet_of_one(version="0.16.0") as (_fleet, engine):
        subscriber = await subscribe(sockets, engine)
        await ask(engine, "another" + " prompt" * 20)
        _seq, (_unix_s, events, _rank) = await subscriber.receive()

    assert events[-1][0] == "BlockStored"
    assert len(events[-1]) == 8


@pytest.mark.parametrize(
    ("version", "frames"),
    [pytest.param("0.25.0", 3, id="without-topic"), pytest.param("0.26.0", 4, id="with-topic")],
)
async def test_replay_is_framed_as_the_release_does(
    sockets: Sockets, version: str, frames: int
) -> None:
    """Batches from the wanted number on, then the end marker (F01)."""
    async with fleet_of_one(version=version) as (_fleet, engine):
        for number in range(3):
            await ask(engine, f"{number}" + " prompt" * 20)
        *batches, end = await replay(sockets, engine.replay_endpoint, 1)

    assert [int.from_bytes(message[-2], "big") for message in batches] == [1, 2]
    assert {len(message) for message in [*batches, end]} == {frames}
    assert end[-2:] == [END, b""]
    assert end[0] == b""
    if frames == 4:
        assert batches[0][1] == b"kv-events"


async def test_replay_begins_with_the_oldest_kept(sockets: Sockets) -> None:
    """What fell out of the ring is missing without a word; the future is just the end."""
    async with fleet_of_one(buffer_steps=2) as (_fleet, engine):
        for number in range(5):
            await ask(engine, f"{number}" + " prompt" * 20)
        *batches, _end = await replay(sockets, engine.replay_endpoint, 0)
        future = await replay(sockets, engine.replay_endpoint, 99)

    assert [int.from_bytes(message[-2], "big") for message in batches] == [3, 4]
    assert len(future) == 1


async def test_malformed_replay_request_is_ignored(sockets: Sockets) -> None:
    """A request with too few frames gets no answer and does no harm."""
    async with fleet_of_one() as (_fleet, engine):
        socket = sockets.connect(zmq.DEALER, engine.replay_endpoint)
        await socket.send_multipart([b"\x00" * 8])
        await socket.send_multipart([b"", b"\x00" * 8])
        async with asyncio.timeout(20):
            answer = await socket.recv_multipart()

    assert answer[-2] == END


async def test_dropped_batches_are_missing_live_and_present_in_replay(
    sockets: Sockets,
) -> None:
    """The fault switch makes gaps that a replay can fill."""
    async with fleet_of_one() as (_fleet, engine):
        subscriber = await subscribe(sockets, engine)
        first = engine.engine.ranks[0].publisher.last_seq + 1
        engine.drop_live_batches(2)
        for number in range(4):
            await ask(engine, f"{number}" + " other" * 20)
        live = [(await subscriber.receive())[0] for _ in range(2)]
        *batches, _end = await replay(sockets, engine.replay_endpoint, first)
        engine.drop_live_batches(None)

    replayed = [int.from_bytes(message[-2], "big") for message in batches]
    assert replayed == list(range(first, first + 4))
    assert [seq for seq in replayed if seq not in live] == [
        seq for seq in replayed if (seq + 1) % 2 == 0
    ]


async def test_restarted_engine_counts_from_zero_on_the_same_ports(
    sockets: Sockets,
) -> None:
    """The address stays; cache, ring and numbers begin anew."""
    async with fleet_of_one() as (fleet, engine):
        subscriber = await subscribe(sockets, engine)
        url, before = engine.url, engine.engine.ranks[0].publisher.last_seq
        await fleet.restart(engine)
        await drain(subscriber)
        empty = await replay(sockets, engine.replay_endpoint, 0)
        received: list[int] = []
        async with asyncio.timeout(20):
            while not received:
                await ask(engine, f"{engine.engine.random_hex(8)}" + " prompt" * 20)
                if await subscriber.socket.poll(20):
                    received.append((await subscriber.receive())[0])
        *batches, _end = await replay(sockets, engine.replay_endpoint, 0)

    assert before >= 0
    assert engine.url == url
    assert len(empty) == 1
    numbers = [int.from_bytes(message[-2], "big") for message in batches]
    assert numbers == list(range(len(numbers)))
    assert received[0] in numbers


async def test_stopped_engine_refuses_connections() -> None:
    """A stopped engine is a closed port; started again it answers."""
    async with fleet_of_one() as (fleet, engine), httpx.AsyncClient() as client:
        await fleet.stop(engine)
        assert not engine.is_running
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{engine.url}/health")
        with pytest.raises(RuntimeError):
            engine.drop_live_batches(2)
        await fleet.stop(engine)
        await fleet.start(engine)
        answer = await client.get(f"{engine.url}/health")

    assert answer.status_code == 200


async def test_stopping_cuts_running_answers() -> None:
    """A client in the middle of a stream sees the connection break, not an end."""
    async with fleet_of_one(inter_token_ms=5) as (fleet, engine), httpx.AsyncClient() as client:
        body = {"prompt": "a", "max_tokens": 800, "stream": True, "ignore_eos": True}
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the stream breaks inside
            async with client.stream("POST", f"{engine.url}/v1/completions", json=body) as response:
                async for _chunk in response.aiter_raw():
                    if engine.is_running:
                        await fleet.stop(engine)


async def test_reset_is_published_with_the_next_request(sockets: Sockets) -> None:
    """While the engine idles nothing is published; the clear comes first in the next batch."""
    async with fleet_of_one() as (_fleet, engine), httpx.AsyncClient() as client:
        subscriber = await subscribe(sockets, engine)
        await client.post(f"{engine.url}/reset_prefix_cache")
        assert not await subscriber.socket.poll(50)
        await ask(engine, "after" + " reset" * 20)
        _seq, (_unix_s, events, _rank) = await subscriber.receive()

    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


async def test_sources_name_the_sockets_as_vllm_does() -> None:
    """Bound sockets are reported with wildcards; their ports are those to connect to."""
    async with (
        fleet_of_one(topic="t", buffer_steps=7) as (_fleet, engine),
        httpx.AsyncClient() as client,
    ):
        sources = (await client.get(f"{engine.url}/kv_event_sources")).json()

    events_port = engine.events_endpoint.rpartition(":")[2]
    replay_port = str(engine.replay_endpoint).rpartition(":")[2]
    assert sources["0"]["endpoint"] == f"tcp://*:{events_port}"
    assert sources["0"]["replay_endpoint"] == f"tcp://*:{replay_port}"
    assert (sources["0"]["topic"], sources["0"]["buffer_steps"]) == ("t", 7)


async def test_engine_without_events_has_no_sources() -> None:
    """With events off the object is empty and nothing is published."""
    async with fleet_of_one(events=False) as (_fleet, engine), httpx.AsyncClient() as client:
        sources = await client.get(f"{engine.url}/kv_event_sources")
        await ask(engine, "word " * 20)
        last_seq = engine.engine.ranks[0].publisher.last_seq

    assert sources.json() == {}
    assert last_seq == -1


async def test_engine_may_have_no_replay() -> None:
    """Replay is off unless configured, as in vLLM."""
    async with fleet_of_one(replay=False) as (_fleet, engine), httpx.AsyncClient() as client:
        sources = (await client.get(f"{engine.url}/kv_event_sources")).json()

    assert engine.replay_endpoint is None
    assert sources["0"]["replay_endpoint"] is None


async def test_ranks_have_their_own_caches_ports_and_streams(
    sockets: Sockets,
) -> None:
    """A pinned request is cached on its rank and announced on its stream."""
    async with fleet_of_one(dp_size=2) as (_fleet, engine), httpx.AsyncClient() as client:
        for rank in ("1", "1", "0"):
            await ask(engine, "word " * 20, X_data_parallel_rank=rank)
        sources = (await client.get(f"{engine.url}/kv_event_sources")).json()
        metrics = (await client.get(f"{engine.url}/metrics")).text
        ports = [int(sources[rank]["replay_endpoint"].rpartition(":")[2]) for rank in "01"]
        streams = [await replay(sockets, f"tcp://127.0.0.1:{port}", 0) for port in ports]
        out_of_range = await client.post(
            f"{engine.url}/v1/completions",
            json={"prompt": "a"},
            headers={"X-data-parallel-rank": "7"},
        )
        not_a_number = await client.post(
            f"{engine.url}/v1/completions",
            json={"prompt": "a", "max_tokens": 1},
            headers={"X-data-parallel-rank": "x"},
        )

    assert ports[1] == ports[0] + 1
    ranks = [msgspec.msgpack.decode(stream[0][-1])[2] for stream in streams]
    assert ranks == [0, 1]
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="sim"} 0.0' in metrics
    assert 'vllm:prefix_cache_hits_total{engine="1",model_name="sim"} 96.0' in metrics
    assert out_of_range.status_code == 400
    assert "data_parallel_rank 7 is out of range [0, 2)." in out_of_range.text
    assert not_a_number.status_code == 200


@pytest.mark.parametrize(
    ("version", "seed", "equal"),
    [
        pytest.param("0.28.0", None, False, id="random-up-to-0.28"),
        pytest.param("0.29.0", None, True, id="fixed-since-0.29"),
        pytest.param("0.28.0", "7", True, id="fixed-by-seed"),
    ],
)
async def test_hashes_of_two_engines(
    sockets: Sockets, version: str, seed: str | None, equal: bool
) -> None:
    """Whether two engines hash alike depends on the release and the seed."""
    settings = EngineSettings(
        version=version, hash_seed=seed, num_blocks=64, prefill_tokens_per_s=1e6, inter_token_ms=0.5
    )
    hashes = []
    async with running_fleet(FleetSpec.parse("2"), engine=settings) as fleet:
        for engine in fleet.engines:
            await ask(engine, "word " * 20)
            batch = (await replay(sockets, engine.replay_endpoint, 0))[0]
            hashes.append(msgspec.msgpack.decode(batch[-1])[1][0]["block_hashes"])

    assert (hashes[0] == hashes[1]) == equal
