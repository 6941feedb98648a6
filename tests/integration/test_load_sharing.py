"""Load between processes: over a real Redis, and over pipes through a hub."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from balancer.core.decision_log import DecisionLog
from balancer.core.load.ledger import LegWork
from balancer.core.load.shared_ledger import SharedLedger
from balancer.core.record import RequestRecord
from balancer.sharing import LEASE_S, Channel, LoadSharing, PeerReports
from balancer.siblings import Alone, Siblings, Views, read_figures
from indexer.core.types import BlockKey, InstanceId, RankId
from kvlb.load_stream import open_channel
from kvlb.workers.hub import Hub
from kvlb.workers.pipe import Pipe, PipeClosedError, Ready
from kvlb.workers.seat import PipeChannel, PipeSiblings, Seat

RANK = RankId(InstanceId("http://e:8000"), 0)
KEYS = [BlockKey(number) for number in range(300)]
WORK = LegWork(
    rank=RANK,
    kind="whole",
    prompt_tokens=4800,
    uncached_tokens=4800,
    work_s=0.5,
    keys=KEYS,
    block_size=16,
)


async def until(is_so: Callable[[], Any], deadline_s: float = 10) -> None:
    async with asyncio.timeout(deadline_s):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.002)


class Shared:
    """One process's ledger, kept in touch."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.outcomes: list[tuple[str, bool, str | None]] = []
        news = PeerReports(
            lambda _: None, lambda *told: self.outcomes.append((told[0], told[1], told[2]))
        )
        self.ledger = SharedLedger(time.monotonic, me=name, lease_s=LEASE_S, news=news)
        self.sharing = LoadSharing(self.ledger, channel, clock=time.monotonic)

    @property
    def requests(self) -> int:
        return self.ledger.load(RANK).requests


@asynccontextmanager
async def running(*shared: Shared) -> AsyncIterator[None]:
    """They know each other, and share while the block runs."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each.sharing.run()) for each in shared]
        await until(lambda: all(x.ledger.peers.count == len(shared) - 1 for x in shared))
        yield
        for task in tasks:
            task.cancel()


async def test_key_of_another_type_is_removed(redis_server: Any) -> None:
    """Load is shared again by itself, also with who waits for what comes."""
    settings = redis_server.settings()
    name = f"{settings.prefix}:1:load"
    async with open_channel(settings) as first, open_channel(settings) as second:
        assert first is not None
        assert second is not None
        here, there = Shared("here", first), Shared("there", second)
        async with running(here), running_second(there, here):
            redis_server.command("DEL", name)
            redis_server.command("LPUSH", name, "x")
            await until(lambda: redis_server.command("TYPE", name).strip() == "stream")
            there.ledger.hold(WORK)
            await until(lambda: here.requests == 1)


async def test_balancers_share_load_through_redis(redis_server: Any) -> None:
    """A booking is known to the other; who leaves takes its load along."""
    settings = redis_server.settings()
    async with open_channel(settings) as first, open_channel(settings) as second:
        assert first is not None
        assert second is not None
        here, there = Shared("here", first), Shared("there", second)
        async with running(here):
            async with running_second(there, here):
                there.ledger.hold(WORK)
                await until(lambda: here.requests == 1)
                predicted = here.ledger.predicted_blocks(RANK, KEYS, 0)
                there.ledger.tell_outcome(RANK.instance, ok=False, reason="broken")
                await until(lambda: here.outcomes)
            await until(lambda: here.requests == 0)

    assert predicted == len(KEYS)
    assert here.outcomes == [(RANK.instance, False, "broken")]
    assert here.ledger.peers.expired == 0


@asynccontextmanager
async def running_second(newcomer: Shared, old: Shared) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(newcomer.sharing.run())
        await until(lambda: newcomer.ledger.peers.count == old.ledger.peers.count == 1)
        yield
        task.cancel()


async def test_who_has_joined_is_known_and_knows_what_runs(redis_server: Any) -> None:
    """Siblings that come to two processes from then on land together."""
    settings = redis_server.settings()
    async with open_channel(settings) as first, open_channel(settings) as second:
        assert first is not None
        assert second is not None
        here, there = Shared("here", first), Shared("there", second)
        async with running(here), asyncio.TaskGroup() as group:
            here.ledger.hold(WORK)
            task = group.create_task(there.sharing.run())
            async with asyncio.timeout(10):
                await there.sharing.joined()

            assert (here.ledger.peers.count, there.ledger.peers.count) == (1, 1)
            assert there.requests == 1
            task.cancel()


async def test_load_is_shared_again_after_redis_was_gone(own_redis: Callable[..., Any]) -> None:
    """What happened meanwhile is asked for; nothing is counted twice."""
    redis = own_redis()
    redis.start()
    settings = redis.settings()
    async with open_channel(settings) as first, open_channel(settings) as second:
        assert first is not None
        assert second is not None
        here, there = Shared("here", first), Shared("there", second)
        async with running(here, there):
            guard = there.ledger.hold(WORK)
            await until(lambda: here.requests == 1)
            redis.stop()
            there.ledger.hold(WORK)
            guard.__exit__(None, None, None)
            there.ledger.hold(WORK)
            await until(lambda: there.sharing.unsent > 0)
            redis.start()

            await until(lambda: here.requests == there.requests == 2, deadline_s=30)


async def test_strangers_in_the_stream_harm_nobody(redis_server: Any) -> None:
    """Another version, or another program, on the same key."""
    settings = redis_server.settings()
    async with open_channel(settings) as first, open_channel(settings) as second:
        assert first is not None
        assert second is not None
        here, there = Shared("here", first), Shared("there", second)
        async with running(here, there):
            await second.send([b"nonsense"])
            await second._writes.ask("XADD", second._key, "*", "x", "y")  # type: ignore[attr-defined]
            there.ledger.hold(WORK)
            await until(lambda: here.requests == 1)

    assert here.ledger.refused == 1


class Tree:
    """A hub, and workers around it in one process."""

    def __init__(self, exits: AsyncExitStack, group: asyncio.TaskGroup) -> None:
        self._exits = exits
        self._group = group
        self.registry = CollectorRegistry()
        self.restarts = Counter("restarts", "of workers", registry=self.registry)
        self.hub = Hub(lambda: read_figures(self.registry), None)
        self.ends: dict[int, Pipe] = {}

    async def worker(self, number: int) -> Pipe:
        ours, theirs = socket.socketpair()
        parent, worker = await Pipe.open(ours), await Pipe.open(theirs)
        self.hub.join(number, parent)
        self._group.create_task(self._serve(number, parent))
        self._group.create_task(worker.run())
        self.ends[number] = worker
        return worker

    async def views(self, number: int, **counted: float) -> Views:
        """What a worker of this number shows of itself and the others."""
        pipe = await self.worker(number)
        seat = Seat(number, socket.socket(), pipe)
        seat.listener.close()
        views = shown(PipeSiblings(pipe), **counted)
        seat.attach(views)
        return views

    async def _serve(self, number: int, parent: Pipe) -> None:
        await parent.run()
        self.hub.leave(number)


@asynccontextmanager
async def a_tree() -> AsyncIterator[Tree]:
    async with AsyncExitStack() as exits, asyncio.TaskGroup() as group:
        tree = Tree(exits, group)
        hub = group.create_task(tree.hub.run())
        yield tree
        for each in tree.ends.values():
            each.close()
        hub.cancel()


async def test_workers_share_load_through_their_parent() -> None:
    """And one that ends is gone at once, not after its lease."""
    async with a_tree() as tree:
        pipes = [await tree.worker(number) for number in range(2)]
        here, there = (
            Shared(f"worker {number}", PipeChannel(pipe)) for number, pipe in enumerate(pipes)
        )
        async with running(here, there):
            there.ledger.hold(WORK)
            await until(lambda: here.requests == 1)
            pipes[1].close()
            await until(lambda: here.requests == 0)

    assert here.ledger.peers.expired == 0


def shown(siblings: Siblings, **counted: float) -> Views:
    registry = CollectorRegistry()
    for name, value in counted.items():
        Counter(name, "counted", registry=registry).inc(value)
    Gauge("kvlb_workers", "processes", registry=registry).set(1)
    return Views(registry, DecisionLog(limit=9), siblings)


def record(number: int) -> RequestRecord:
    return RequestRecord(request_id=str(number), path="/x", arrived_s=number, ended_s=number)


def values(exposition: bytes) -> dict[str, float]:
    lines = [line for line in exposition.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.split() for line in lines)}


async def test_any_worker_shows_all_figures_and_decisions() -> None:
    """Living and ended ones, and the parent's."""
    async with a_tree() as tree:
        views = [await tree.views(number, legs=number + 1) for number in range(3)]
        for number, each in enumerate(views):
            each._decisions.add(record(number))
        tree.restarts.inc()
        at_first = values(await views[0].exposition())
        recent = [each["request_id"] for each in await views[1].recent(2)]
        tree.ends[2].close()
        await until(lambda: len(tree.hub._pipes) == 2)
        then = values(await views[1].exposition())

    assert at_first["legs_total"] == then["legs_total"] == 6
    assert at_first["kvlb_workers"] == 3
    assert then["kvlb_workers"] == 2
    assert at_first["restarts_total"] == 1
    assert recent == ["2", "1"]


async def test_a_stuck_worker_is_shown_as_read_last() -> None:
    """A scrape doesn't wait for it."""
    async with a_tree() as tree:
        views = [await tree.views(number, legs=1) for number in range(2)]
        before = values(await views[0].exposition())
        never = asyncio.Event()

        async def stuck(_what: str, _limit: int) -> bytes:
            await never.wait()
            return b""

        tree.ends[1].answer = stuck
        after = values(await views[0].exposition())

    assert before["legs_total"] == after["legs_total"] == 2


async def test_a_collectors_bug_costs_only_its_own_figures() -> None:
    """The others are shown, and no process ends."""
    async with a_tree() as tree:
        views = [await tree.views(number, legs=1) for number in range(2)]

        async def broken(_what: str, _limit: int) -> bytes:
            raise RuntimeError

        tree.ends[1].answer = broken
        with structlog.testing.capture_logs() as logs:
            seen = values(await views[0].exposition())
        tree.hub._pipes[0].answer = broken
        alone = values(await views[0].exposition())

    assert seen["legs_total"] == alone["legs_total"] == 1
    assert "restarts_total" not in alone
    assert [each["event"] for each in logs] == ["question_failed"]


async def test_a_worker_without_its_parent_shows_itself() -> None:
    """It finishes what runs, and may be asked meanwhile."""
    ours, theirs = socket.socketpair()
    pipe = await Pipe.open(theirs)
    ours.close()
    await pipe.run()
    views = shown(PipeSiblings(pipe), legs=4)
    views._decisions.add(record(1))

    assert values(await views.exposition())["legs_total"] == 4
    assert len(await views.recent(5)) == 1
    pipe.send(Ready())


async def test_alone_is_alone() -> None:
    """One process's own figures and decisions."""
    views = shown(Alone(), legs=3)
    views._decisions.add(record(1))

    assert values(await views.exposition())["legs_total"] == 3
    assert [each["request_id"] for each in await views.recent(5)] == ["1"]


async def test_a_question_to_who_ends_fails_at_once() -> None:
    """Nobody waits for an answer that can't come."""
    ours, theirs = socket.socketpair()
    asking, other = await Pipe.open(ours), await Pipe.open(theirs)
    async with asyncio.TaskGroup() as group:
        group.create_task(asking.run())
        asked = group.create_task(fails(asking.ask("figures")))
        other_runs = group.create_task(other.run())
        other.answer = never_answers
        await asyncio.sleep(0)
        other.close()
        assert await asked
        await other_runs


async def fails(asked: Awaitable[bytes]) -> bool:
    try:
        await asked
    except PipeClosedError:
        return True
    return False


async def never_answers(_what: str, _limit: int) -> bytes:
    await asyncio.Event().wait()
    return b""
