"""What is recorded: one station per rank, with its engine's address, its stream and its part in P/D."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from balancer.core.fleet.snapshot import Instance, Role
from indexer.config import RankSource
from indexer.sources import SourceError, find_sources
from kvlb.engine_http import EngineHttp
from kvlb.errors import PeerError
from kvlb.settings import InstanceEntry, KvlbSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """One rank of one engine."""

    instance: Instance
    source: RankSource
    engine: EngineHttp
    headers: Mapping[str, str]
    """Pin a request to this rank."""

    @property
    def name(self) -> str:
        """`src` of its requests."""
        return self.instance.alias

    @property
    def label(self) -> str:
        """`src` of its events."""
        return f"{self.name}.{self.source.rank.rank}" if self.headers else self.name

    @property
    def model(self) -> str:
        return self.source.model


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEngine:
    """One engine, and what it says of itself."""

    stations: Sequence[Station]
    models: Any
    """Its answers as they are: `/v1/models`, `/version`, `/kv_event_sources`."""
    version: Any
    sources: Any

    @property
    def name(self) -> str:
        return self.stations[0].name

    @property
    def role(self) -> Role:
        return self.stations[0].instance.role


async def find_engines(settings: KvlbSettings, http: httpx.AsyncClient) -> list[RecordedEngine]:
    """Ask every enabled engine for its streams, in the order of their names. Raises PeerError."""
    entries = [each for each in settings.instances if each.enabled and each.role is not Role.ENCODE]
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(_find(entry, settings, http)) for entry in entries]
    found = sorted((task.result() for task in asked), key=lambda each: each.name)
    models = sorted({engine.stations[0].model for engine in found})
    if len(models) > 1:
        raise PeerError(
            f"a capture is of one model, these engines serve {', '.join(models)}: record them apart"
        )
    return found


async def _find(
    entry: InstanceEntry, settings: KvlbSettings, http: httpx.AsyncClient
) -> RecordedEngine:
    (source,) = (each for each in settings.engine_sources() if each.instance == entry.id)
    try:
        found = await find_sources(source, config=settings.indexer, http=http)
    except SourceError as error:
        raise PeerError(f"{entry.name}: {error}; `kvlb doctor` says more") from error
    if not found.ranks:
        raise PeerError(f"{entry.name} has no events to record; `kvlb doctor` says why")
    engine = EngineHttp(entry.id, http, settings.engine_keys().get(entry.id))
    first = min(rank.rank.rank for rank in found.ranks)
    stations = [
        Station(
            instance=entry.instance(),
            source=rank,
            engine=engine,
            headers={"X-data-parallel-rank": str(rank.rank.rank - first)}
            if len(found.ranks) > 1
            else {},
        )
        for rank in found.ranks
    ]
    return RecordedEngine(
        stations=stations,
        models=await engine.read("/v1/models"),
        version=await engine.read("/version"),
        sources=await engine.read("/kv_event_sources"),
    )
