"""Looks names up again and again: finds instances, and notices engines that moved.

One task for all names of a process. Two things come of it: what `discovery` names stand for now goes
to `Members`, and instances whose own host name, or whose events' host name, has come to stand for
other addresses are told to whoever has connections to them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

import structlog

from balancer.config import BalancerConfig
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import ConfigError
from balancer.fleet.members import Members
from indexer.core.types import InstanceId
from kvlb.names.places import NamedPlaces
from kvlb.names.resolver import LookupFailedError, NameUnknownError, Resolve
from kvlb.settings import KvlbSettings

MAX_AT_ONCE = 8
IDLE_S = 1.0
"""Pause while there is no name to look up."""

_logger = structlog.get_logger(__name__)


class NameWatch:
    """One per process."""

    def __init__(
        self,
        members: Members[BalancerConfig] | Members[KvlbSettings],
        *,
        resolve: Resolve,
        on_moved: Callable[[Sequence[InstanceId]], Awaitable[None]],
    ) -> None:
        """`on_moved` is called with the instances whose name stands for other addresses now."""
        self._members = members
        self._resolve = resolve
        self._on_moved = on_moved
        self._places: dict[str, NamedPlaces] = {}
        self._complaints: dict[str, str] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            settings = self._settings()
            pause_s = settings.resolve_interval_s if settings else 0.0
            try:
                if settings and pause_s:
                    await self.look(settings)
            except Exception:
                _logger.exception("name_watch_failed")
            await asyncio.sleep(pause_s or IDLE_S)

    async def look(self, settings: KvlbSettings) -> None:
        """Look every name up once, and tell what is different."""
        hosts = dict(_hosts(settings.instances))
        named = {each.dns for each in settings.discovery}
        wanted = named | {host for names in hosts.values() for host in names}
        self._places = {name: self._places.get(name, NamedPlaces()) for name in sorted(wanted)}
        moved = await self._look_up(list(self._places))
        if gone := [each for each, names in hosts.items() if names & moved]:
            _logger.info("instances_moved", instances=len(gone), names=sorted(moved))
            await self._on_moved(gone)
        self._members.set_discovered(self._discovered(settings))

    def _settings(self) -> KvlbSettings | None:
        config = self._members.present.config
        return config if isinstance(config, KvlbSettings) else None

    def _discovered(self, settings: KvlbSettings) -> Sequence[InstanceSettings]:
        found: list[InstanceSettings] = []
        for each in settings.discovery:
            addresses = self._places[each.dns].addresses
            if len(addresses) > each.max_instances:
                self._complain(f"{each.dns}:{each.port}", f"{len(addresses)} addresses")
            try:
                found += each.entries(addresses, settings.entry_type())
            except ConfigError as error:
                self._complain(f"{each.dns}:{each.port}", str(error))
        return found

    async def _look_up(self, names: Sequence[str]) -> set[str]:
        """Names that have moved."""
        at_once = asyncio.Semaphore(MAX_AT_ONCE)
        moved: set[str] = set()

        async def look_up(name: str) -> None:
            async with at_once:
                if await self._has_moved(name):
                    moved.add(name)

        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(look_up(name))
        return moved

    async def _has_moved(self, name: str) -> bool:
        places = self._places[name]
        try:
            found = await self._resolve(name)
        except NameUnknownError:
            places.unknown()
            self._complain(name, "nobody knows it")
            return False
        except LookupFailedError as error:
            self._complain(name, str(error))
            return False
        self._complaints.pop(name, None)
        return places.found(found)

    def _complain(self, name: str, why: str) -> None:
        """Once, until it is well again or something else is wrong."""
        if self._complaints.get(name) != why:
            self._complaints[name] = why
            _logger.warning("name_lookup", name=name, problem=why)


def _hosts(
    instances: Sequence[InstanceSettings],
) -> Iterator[tuple[InstanceId, frozenset[str]]]:
    """Host names, not addresses, behind which an instance is reached."""
    for each in instances:
        endpoints = (getattr(each, name, None) for name in ("events", "replay"))
        urls = (each.id, *(endpoint for endpoint in endpoints if endpoint is not None))
        names = frozenset(host for url in urls if (host := _name_in(url)) is not None)
        if names:
            yield each.id, names


def _name_in(url: str) -> str | None:
    host = urlsplit(url).hostname
    if not host or host in {"*", "localhost"} or not url.startswith(("http", "tcp")):
        return None
    try:
        ip_address(host)
    except ValueError:
        return host
    return None
