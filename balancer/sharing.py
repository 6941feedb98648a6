"""Keeps a `SharedLedger` in touch with other processes: sends what happened here, takes in what comes.

A booking leaves as soon as the event loop turns, so that siblings of a prompt that other processes read
in the same moment already find it. What happens while a send is under way goes with the next one.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from balancer.core.load.ledger import LoadLedger
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.load.peers import PeerNews
from balancer.core.load.shared_ledger import SharedLedger
from balancer.siblings import Alone, Siblings
from balancer.surroundings import TimeAndChance
from indexer.core.throttle import Throttle
from indexer.core.types import InstanceId, RankId

BEAT_S = 0.1
"""A gap shows within that time, and a snapshot is here soon after: 250 ms at the most."""
LEASE_S = 3.0
"""Who is silent for longer has nothing in flight any more."""
JOIN_BEATS = 2
"""Others have told of themselves by then, and answered what they were asked."""
SETTLE_S = 1.0
"""A process that can't reach others goes on alone after that time."""
LEAVE_S = 0.5
RETRY_S = 0.5
LOG_S = 30.0

_logger = structlog.stdlib.get_logger(__name__)


class ChannelError(Exception):
    """Messages could not be sent, or none can be received. The message says why."""


class Channel(Protocol):
    """Carries messages to all other processes, in order; may lose some."""

    async def send(self, messages: Sequence[bytes]) -> None:
        """Raises ChannelError if they may not have got through."""
        ...

    async def receive(self, on_message: Callable[[bytes], None]) -> None:
        """Hand on what others send, until cancelled. Raises ChannelError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """The other processes of one process."""

    channel: Channel | None = None
    """To every process that sends legs to the same engines; None: load is this process's own."""
    siblings: Siblings = field(default_factory=Alone)
    """Who answers on the same port."""
    balancer_id: str = ""
    """What all processes on that port are known by; empty: there is only this one."""
    settle_s: float = 0.0
    """How long to look at the fleet before the first connection is accepted: others answer
    meanwhile."""


class PeerReports:
    """What peers did that isn't the ledger's: whose turn it is, and how instances answered."""

    def __init__(
        self,
        chosen: Callable[[RankId], None],
        report: Callable[[InstanceId, bool, str | None], object],
    ) -> None:
        self._chosen = chosen
        self._report = report

    def on_booked(self, rank: RankId) -> None:
        self._chosen(rank)

    def on_outcome(self, instance: InstanceId, ok: bool, reason: str | None) -> None:
        self._report(instance, ok, reason)


class LoadSharing:
    """One per process that has peers."""

    def __init__(
        self, ledger: SharedLedger, channel: Channel, *, clock: Callable[[], float]
    ) -> None:
        self.ledger = ledger
        self._channel = channel
        self._clock = clock
        self._wake = asyncio.Event()
        self._is_heard = asyncio.Event()
        self._failures = Throttle(LOG_S)
        self.unsent = 0
        """Messages that peers have to ask for."""
        ledger.on_waiting = self._wake.set

    async def run(self) -> None:
        """Share until cancelled; then say that we leave."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive())
                group.create_task(self._send())
                group.create_task(self._beat())
        finally:
            with suppress(ChannelError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._channel.send([self.ledger.leave()])

    async def joined(self) -> None:
        """Others know of this process by then, and it of them and of what they have in flight."""
        await self._is_heard.wait()
        await asyncio.sleep(JOIN_BEATS * BEAT_S)

    async def _receive(self) -> None:
        while True:
            try:
                await self._channel.receive(self.ledger.on_message)
            except ChannelError as error:
                self._note(error)
            except Exception:
                _logger.exception("load_sharing_failed")
            await asyncio.sleep(RETRY_S)

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._pass_on(self.ledger.outgoing())

    async def _beat(self) -> None:
        while True:
            messages, silent = self.ledger.beat()
            for peer in silent:
                _logger.warning("peer_silent", peer=peer, lease_s=LEASE_S)
            await self._pass_on(messages)
            await asyncio.sleep(BEAT_S)

    async def _pass_on(self, messages: Sequence[bytes]) -> None:
        try:
            await self._channel.send(messages)
            self._is_heard.set()
        except ChannelError as error:
            self.unsent += len(messages)
            self._note(error)

    def _note(self, error: ChannelError) -> None:
        if self._failures.admits((str(error),), self._clock()):
            _logger.warning("load_not_shared", error=str(error))


class SharingCollector(Collector):
    """Metrics of the processes around this one, read when scraped."""

    def __init__(self, sharing: LoadSharing | None) -> None:
        self._sharing = sharing

    def describe(self) -> list[Metric]:
        """Name them without a scrape."""
        return []

    def collect(self) -> list[Metric]:
        """Read everything."""
        sharing = self._sharing
        peers = sharing.ledger.peers if sharing else None
        return [
            GaugeMetricFamily("kvlb_workers", "Processes that answer on this port.", 1),
            CounterMetricFamily(
                "kvlb_worker_restarts_total", "Workers that ended and were started again.", 0
            ),
            GaugeMetricFamily(
                "kvlb_peers",
                "Other processes whose load is counted here: workers, balancers on this Redis.",
                peers.count if peers else 0,
            ),
            CounterMetricFamily(
                "kvlb_peer_gaps_total",
                "Times that something of a peer was missed, and asked for.",
                peers.gaps if peers else 0,
            ),
            CounterMetricFamily(
                "kvlb_peers_lost_total",
                "Peers that fell silent without a word: killed, stuck or cut off.",
                peers.expired if peers else 0,
            ),
            CounterMetricFamily(
                "kvlb_peer_messages_unsent_total",
                "Messages to peers that could not be sent.",
                sharing.unsent if sharing else 0,
            ),
        ]


def open_ledger(
    company: Company, surroundings: TimeAndChance, *, news: PeerNews, max_predicted_blocks: int
) -> tuple[LoadLedger, LoadSharing | None]:
    """The ledger of a process, and what keeps it in touch with others, if there are any."""
    clock = surroundings.clock
    if company.channel is None:
        return LocalLedger(clock=clock, max_predicted_blocks=max_predicted_blocks), None
    ledger = SharedLedger(
        clock,
        me=surroundings.new_id(),
        lease_s=LEASE_S,
        news=news,
        max_predicted_blocks=max_predicted_blocks,
    )
    return ledger, LoadSharing(ledger, company.channel, clock=clock)
