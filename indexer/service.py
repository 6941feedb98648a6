"""Runs the write path: finds engines' streams, follows each rank, keeps the index in step.

Every task has an owner: the service owns instances and bound ports, an instance owns its ranks. What
goes wrong with one instance or rank is logged, counted and tried again; the others don't notice.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import httpx
import structlog
import zmq

from indexer.config import IndexerConfig, InstanceSource
from indexer.core.block_tree import BlockTree
from indexer.core.epochs import Epochs
from indexer.core.index import BlockIndex, IndexSize, IndexUnavailableError
from indexer.core.journal import RankJournal
from indexer.core.rank_status import InstanceStatus, PortStatus, RankStatus
from indexer.core.reports import ReportSource
from indexer.core.types import InstanceId, RankId
from indexer.followed_rank import FollowedRank
from indexer.ports import Ports
from indexer.rank_writer import WritingMeans
from indexer.report_desk import ReportDesk
from indexer.sockets import ZmqContext
from indexer.sources import FoundSources, SourceError, find_sources
from indexer.turns import TURN_S, WRITING_TURN_S, Turns

_logger = structlog.get_logger(__name__)

_RESTART_S = 1.0
"""Pause before something that failed by a bug is started anew."""


def unix_time_s() -> float:
    """Wall clock, to compare with the engines' timestamps."""
    return datetime.now(UTC).timestamp()


class _Bell:
    """Wakes everyone who waits, once."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future


@dataclass(slots=True, kw_only=True, eq=False)
class _Instance:
    """An instance of the fleet, found or not, with the ranks that are followed."""

    source: InstanceSource
    state: str = "searching"
    problem: str | None = None
    task: asyncio.Task[None] | None = None
    ranks: dict[RankId, tuple[FollowedRank, asyncio.Task[None]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """What exists only while the service runs."""

    group: asyncio.TaskGroup
    context: ZmqContext
    ports: Ports


class IndexerService:
    """Follows a fleet that may change while it runs."""

    def __init__(  # noqa: PLR0913 - built in one place, which hands everything down
        self,
        *,
        config: IndexerConfig,
        sources: Iterable[InstanceSource],
        index: BlockIndex,
        http: httpx.AsyncClient,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = unix_time_s,
        journal: RankJournal | None = None,
        reports: ReportSource | None = None,
    ) -> None:
        """`journal` is the index too, if what it has outlives this process.

        `reports` is where balancers tell what their legs found.
        """
        self.index_size = IndexSize()
        """As measured last."""
        self._size_problem: str | None = None
        self._config = config
        self._wanted = {source.instance: source for source in sources}
        self._index = index
        self._http = http
        self._clock = clock
        self._progress = _Bell()
        self._means = WritingMeans(
            index=index,
            # By the clock, so that after a lost index too a new life looks like one.
            epochs=Epochs(1 if journal is None else int(wall_clock() * 1000)),
            config=config,
            clock=clock,
            wall_clock=wall_clock,
            on_progress=self._progress.ring,
            journal=journal,
            turns=Turns(TURN_S if journal is None else WRITING_TURN_S),
            tree=BlockTree(is_read=getattr(index, "reads_tables", False)),
        )
        self._desk = ReportDesk(reports, self._followed)
        self._instances: dict[InstanceId, _Instance] = {}
        self._ports: Ports | None = None
        self._moved: set[InstanceId] = set()
        """To be followed anew."""
        self._fleet_changed = asyncio.Event()
        self._fleet_changed.set()

    async def run(self) -> None:
        """Follow the fleet until cancelled."""
        with zmq.Context() as context:
            async with asyncio.TaskGroup() as group:
                ports = Ports(config=self._config, context=context, clock=self._clock, group=group)
                self._ports = ports
                running = _Running(group=group, context=context, ports=ports)
                group.create_task(self._run_measuring())
                group.create_task(self._desk.run())
                while True:
                    await self._fleet_changed.wait()
                    self._fleet_changed.clear()
                    try:
                        await self._change_fleet(running)
                    except Exception:
                        _logger.exception("fleet_not_changed")
                        self._fleet_changed.set()
                        await asyncio.sleep(_RESTART_S)

    def set_sources(self, sources: Iterable[InstanceSource]) -> None:
        """Follow this fleet from now on: instances that left are forgotten, others go on."""
        self._wanted = {source.instance: source for source in sources}
        self._fleet_changed.set()

    def follow_anew(self, instances: Iterable[InstanceId]) -> None:
        """These are another process now, somewhere else: forget what is known, connect anew."""
        self._moved.update(instances)
        self._fleet_changed.set()

    async def drop_credit(self, instances: Iterable[InstanceId]) -> None:
        """Somebody has just had these engines drop their caches: don't wait for events to say so."""
        for instance in instances:
            entry = self._instances.get(instance)
            for followed, _ in list(entry.ranks.values()) if entry else ():
                await followed.drop_credit()

    async def measure(self) -> None:
        """Bring `index_size` up to date."""
        try:
            self.index_size = await self._index.size()
            self._size_problem = None
        except IndexUnavailableError as error:
            self.index_size = IndexSize()
            self._size_problem = str(error)

    # What can be seen.

    @property
    def is_ready(self) -> bool:
        """Every instance has been asked for its streams, whatever it answered."""
        is_running = self._ports is not None
        return is_running and all(each.state != "searching" for each in self._instances.values())

    @property
    def dropped_reports(self) -> Mapping[str, int]:
        """Reports of balancers, or attempts to take some, that came to nothing, by reason."""
        return self._desk.dropped

    def status(self) -> Sequence[RankStatus]:
        """Every rank that is followed."""
        return [followed.status() for followed in self._followed()]

    @property
    def index_problem(self) -> str | None:
        """Why the index can't be read or written now, and what to change."""
        problems = (followed.index_problem for followed in self._followed())
        return next(filter(None, problems), self._size_problem)

    def rank_status(self, rank: RankId) -> RankStatus | None:
        """One rank; None while it isn't followed."""
        entry = self._instances.get(rank.instance)
        found = entry.ranks.get(rank) if entry else None
        return found[0].status() if found else None

    def instances(self) -> Sequence[InstanceStatus]:
        """Every instance of the fleet."""
        return [
            InstanceStatus(
                instance=instance,
                alias=entry.source.name,
                state=entry.state,
                problem=entry.problem,
                ranks=len(entry.ranks),
            )
            for instance, entry in self._instances.items()
        ]

    def ports(self) -> Sequence[PortStatus]:
        """Ports that engines connect to."""
        return self._ports.status() if self._ports else []

    async def until(self, rank: RankId, is_so: Callable[[RankStatus], bool]) -> RankStatus:
        """Wait until `is_so` of the rank's status. Give it a deadline."""
        while True:
            status = self.rank_status(rank)
            if status is not None and is_so(status):
                return status
            await self._progress.wait()

    async def caught_up(self, rank: RankId, seq: int) -> RankStatus:
        """Wait until batch `seq`, or a later one, of the present epoch is in the index."""
        return await self.until(rank, lambda now: now.last_seq is not None and now.last_seq >= seq)

    # What runs.

    def _followed(self) -> list[FollowedRank]:
        entries = self._instances.values()
        return [followed for entry in entries for followed, _ in entry.ranks.values()]

    async def _run_measuring(self) -> None:
        while True:
            await self.measure()
            await asyncio.sleep(self._config.size_interval_s)

    async def _change_fleet(self, running: _Running) -> None:
        for instance, entry in list(self._instances.items()):
            wanted = self._wanted.get(instance)
            stays = instance not in self._moved
            if stays and wanted is not None and wanted.has_streams_of(entry.source):
                entry.source = wanted  # asked with the new key from now on
                _rename_ranks(entry)
            else:
                await _stop(entry.task)
                for rank in list(entry.ranks):
                    await self._forget(entry, rank)
                del self._instances[instance]
                self._moved.discard(instance)
        self._moved &= self._wanted.keys() & self._instances.keys()
        for instance, source in self._wanted.items():
            if instance not in self._instances:
                entry = self._instances[instance] = _Instance(source=source)
                entry.task = running.group.create_task(self._run_instance(entry, running))
        self._progress.ring()

    async def _run_instance(self, entry: _Instance, running: _Running) -> None:
        """Keep one instance's ranks followed, whatever becomes of it."""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    await self._run_discovery(entry, running, group)
            except Exception:
                _logger.exception("instance_failed", instance=entry.source.name)
                entry.state, entry.problem = "failed", "a bug: see the log"
                await asyncio.sleep(_RESTART_S)

    async def _run_discovery(
        self, entry: _Instance, running: _Running, group: asyncio.TaskGroup
    ) -> None:
        for rank in list(entry.ranks):  # of a run that failed: their tasks are gone
            await self._forget(entry, rank)
        retry_s = self._config.discovery_retry_s
        while True:
            found = await self._find(entry)
            if found is None:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, self._config.discovery_interval_s)
                continue
            retry_s = self._config.discovery_retry_s
            await self._change_ranks(entry, found, running, group)
            await asyncio.sleep(self._config.discovery_interval_s)

    async def _find(self, entry: _Instance) -> FoundSources | None:
        before = entry.state
        try:
            found = await find_sources(entry.source, config=self._config, http=self._http)
        except SourceError as error:
            # Ranks that are followed stay: their sockets notice by themselves when it is back.
            entry.state, entry.problem = error.reason, str(error)
            if before != entry.state:
                _logger.warning("instance_not_found", instance=entry.source.name, error=str(error))
            return None
        entry.state, entry.problem = found.reason, None
        if before != entry.state:
            facts = {"model": found.model, "ranks": len(found.ranks), "state": found.reason}
            _logger.info("instance_found", instance=entry.source.name, **facts)
        return found

    async def _change_ranks(
        self,
        entry: _Instance,
        found: FoundSources,
        running: _Running,
        group: asyncio.TaskGroup,
    ) -> None:
        wanted = {source.rank: source for source in found.ranks}
        for rank, (followed, task) in list(entry.ranks.items()):
            if wanted.get(rank) != followed.source:
                await _stop(task)
                await self._forget(entry, rank)
        for rank, source in wanted.items():
            if rank not in entry.ranks:
                followed = FollowedRank(
                    source, means=self._means, context=running.context, ports=running.ports
                )
                entry.ranks[rank] = followed, group.create_task(followed.run())
        _rename_ranks(entry)  # the name may have changed while the engine was asked
        self._progress.ring()

    async def _forget(self, entry: _Instance, rank: RankId) -> None:
        # In this order: a failure leaves it to be forgotten by the next attempt.
        try:
            await self._index.retire(rank)
        except IndexUnavailableError as error:
            # Nobody renews its lease any more, so its entries leave by themselves.
            _logger.warning("rank_not_retired", instance=entry.source.name, error=str(error))
        del entry.ranks[rank]


def _rename_ranks(entry: _Instance) -> None:
    for followed, _ in entry.ranks.values():
        followed.rename(entry.source.name)


async def _stop(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait((task,))
