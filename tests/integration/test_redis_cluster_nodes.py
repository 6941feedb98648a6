"""The index on a real cluster of three nodes: models are spread, the ranks of one model are not."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from indexer.core.hashing import Namespace
from indexer.core.index import (
    BlocksHeld,
    GroupKind,
    GroupSpec,
    IndexUnavailableError,
    Prompt,
    RankUpdate,
)
from indexer.core.types import InstanceId, RankId, Tier
from indexer.redis_index.cluster import slot_of
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.keys import model_keys
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex

SIZE = 4
MODELS = [f"model-{number}" for number in range(12)]
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)
RANGES = ((0, 5460), (5461, 10922), (10923, 16383))


def prompt(model: str) -> Prompt:
    return Prompt(Namespace(model=model), range(10 * SIZE + 1))


def ranks(model: str) -> list[RankId]:
    """Of one instance that serves it."""
    return [RankId(InstanceId(f"http://{model}:8000"), number) for number in range(3)]


def update(model: str, rank: RankId, blocks: int, seq: int = 0) -> RankUpdate:
    held = BlocksHeld(0, Tier.GPU, prompt(model).keys(SIZE)[:blocks])
    return RankUpdate(rank=rank, model=model, epoch=1, seq=seq, changes=[FULL, held])


@dataclass(frozen=True, slots=True)
class Cluster:
    """Three primaries, each with a third of the slots."""

    nodes: Sequence[Any]
    ports: Sequence[int]

    def settings(self, **more: Any) -> Any:
        return self.nodes[0].settings(
            url=f"redis://127.0.0.1:{self.ports[0]}", prefix="kvlb", **more
        )

    def keys(self, node: int) -> set[str]:
        found: str = self.nodes[node].command("--scan")
        return set(found.split())

    def node_of(self, slot: int) -> int:
        return next(at for at, (first, last) in enumerate(RANGES) if first <= slot <= last)


@pytest.fixture
async def cluster(own_redis: Callable[..., Any], reserved: Any) -> Cluster:
    """With all slots served."""
    ports = [reserved.port() for _ in range(6)]
    nodes = [own_redis() for _ in range(3)]
    for node, port, bus, (first, last) in zip(nodes, ports[:3], ports[3:], RANGES, strict=True):
        own = ("--port", str(port), "--bind", "127.0.0.1", "--cluster-port", str(bus))
        node.start("--cluster-enabled", "yes", "--cluster-node-timeout", "5000", *own)
        node.command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
        nodes[0].command("CLUSTER", "MEET", "127.0.0.1", str(port), str(bus))
    async with asyncio.timeout(30):
        while True:
            states = [node.command("CLUSTER", "INFO") for node in nodes]
            if all("cluster_state:ok" in each and "known_nodes:3" in each for each in states):
                return Cluster(nodes, ports[:3])
            await asyncio.sleep(0.05)


@pytest.fixture
async def connection(cluster: Cluster) -> AsyncIterator[RedisConnection]:
    """Knows the address of one node."""
    connection = RedisConnection(cluster.settings())
    yield connection
    await connection.aclose()


async def test_models_are_spread_and_each_is_answered_in_one_place(
    cluster: Cluster, connection: RedisConnection
) -> None:
    """Written, looked up, renewed, read back and retired on whichever node has the model."""
    index, reader = RedisIndex(connection), RedisIndexReader(connection)
    for model in MODELS:
        for blocks, rank in enumerate(ranks(model), start=1):
            await index.apply(update(model, rank, blocks))
    answers = [await reader.match(prompt(model)) for model in MODELS]
    size = await index.size()
    keys = [cluster.keys(node) for node in range(3)]
    record = await index.restore(ranks(MODELS[-1])[1], MODELS[-1])

    for model, answer in zip(MODELS, answers, strict=True):
        expected = {rank: blocks * SIZE for blocks, rank in enumerate(ranks(model), start=1)}
        assert {rank: match.tokens for rank, match in answer.items()} == expected
    assert all(keys)
    for model in MODELS:
        tag = model_keys("kvlb", model).tag
        (home,) = (at for at in range(3) if any(key.startswith(tag) for key in keys[at]))
        assert home == cluster.node_of(slot_of(tag))
    assert size.entries > 0
    assert record is not None


async def test_model_whose_slot_moves_is_followed(
    cluster: Cluster, connection: RedisConnection
) -> None:
    """While its keys are on the way lookups may fail; afterwards they don't."""
    index, reader = RedisIndex(connection), RedisIndexReader(connection)
    model = next(each for each in MODELS if slot_of(model_keys("kvlb", each).tag) <= RANGES[0][1])
    slot = str(slot_of(model_keys("kvlb", model).tag))
    rank = ranks(model)[0]
    await index.apply(update(model, rank, 2))
    assert (await reader.match(prompt(model)))[rank].tokens == 2 * SIZE
    ids = [node.command("CLUSTER", "MYID") for node in cluster.nodes]
    cluster.nodes[1].command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    cluster.nodes[0].command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    first, *others = sorted(cluster.keys(0))
    move(cluster, first)
    with pytest.raises(IndexUnavailableError, match="on their way"):
        await reader.match(prompt(model))
    for key in others:
        move(cluster, key)
    during = (await reader.match(prompt(model)))[rank].tokens
    for node in cluster.nodes:
        node.command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
    after = (await reader.match(prompt(model)))[rank].tokens
    await index.apply(update(model, rank, 5, seq=1))

    assert (during, after) == (2 * SIZE, 2 * SIZE)
    assert (await reader.match(prompt(model)))[rank].tokens == 5 * SIZE
    assert cluster.keys(0) == set()


def move(cluster: Cluster, key: str) -> None:
    cluster.nodes[0].command("MIGRATE", "127.0.0.1", str(cluster.ports[1]), key, "0", "5000")


async def test_cluster_without_one_node_answers_for_the_others(
    cluster: Cluster, connection: RedisConnection
) -> None:
    """The node of the URL may be the one that is gone, once the others are known."""
    index = RedisIndex(connection)
    for model in MODELS:
        await index.apply(update(model, ranks(model)[0], 2))
    for node in cluster.nodes:
        node.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
    cluster.nodes[0].stop()
    answered, failed = 0, 0
    for model in MODELS:
        is_gone = slot_of(model_keys("kvlb", model).tag) <= RANGES[0][1]
        try:
            match = (await index.match(prompt(model)))[ranks(model)[0]]
        except IndexUnavailableError:
            failed += 1
            assert is_gone
        else:
            answered += 1
            assert match.tokens == 2 * SIZE

    assert answered
    assert failed
