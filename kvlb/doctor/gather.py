"""Gathers the facts of a fleet: asks every engine, listens to every stream, sends small requests.

Engines are asked side by side; the requests to one of them follow each other.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import httpx
import zmq

from balancer.core.fleet.snapshot import Role
from balancer.fleet.engine_sockets import tls_context
from indexer.config import RankSource
from indexer.core.events import BlockStored
from indexer.core.types import RankId
from indexer.sockets import ZmqContext
from indexer.sources import FoundSources, SourceError, find_sources
from kvlb.doctor.core.facts import (
    FleetFacts,
    InstanceFacts,
    Probed,
    Stream,
    Told,
)
from kvlb.doctor.engine import (
    EngineFaultError,
    ask_health,
    ask_metrics,
    ask_models,
    ask_sources,
    ask_version,
    idle_closed_after_s,
)
from kvlb.doctor.parity import OwnTokenizers
from kvlb.doctor.probes import complete, hand_over, make_prompt, probe
from kvlb.doctor.streams import HeardStream, answers_replay, listening
from kvlb.engine_http import EngineHttp
from kvlb.settings import InstanceEntry, KvlbSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for what may never come."""

    http_s: float = 10.0
    connect_s: float = 3.0
    event_s: float = 3.0
    replay_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patient:
    """One engine that is being looked at."""

    entry: InstanceEntry
    engine: EngineHttp
    facts: InstanceFacts
    sources: Sequence[RankSource] = ()


async def gather_facts(
    settings: KvlbSettings,
    *,
    nonce: str,
    sends_requests: bool = True,
    patience: Patience = Patience(),
) -> FleetFacts:
    """Look at every enabled instance of `settings`."""
    async with httpx.AsyncClient(
        trust_env=False,
        verify=tls_context(),
        timeout=patience.http_s,
        limits=httpx.Limits(keepalive_expiry=2),
    ) as http:
        context = zmq.Context()
        try:
            examiner = _Examiner(settings, http, context, nonce, patience)
            instances = await examiner.run(sends_requests=sends_requests)
        finally:
            context.destroy(linger=0)
    return FleetFacts(
        instances=instances,
        keep_alive_s=settings.dataplane.keep_alive_s,
        is_probed=sends_requests,
    )


class _Examiner:
    def __init__(
        self,
        settings: KvlbSettings,
        http: httpx.AsyncClient,
        context: ZmqContext,
        nonce: str,
        patience: Patience,
    ) -> None:
        self._settings = settings
        self._http = http
        self._context = context
        self._nonce = nonce
        self._patience = patience
        self._tokenizers = OwnTokenizers(settings.tokens)

    async def run(self, *, sends_requests: bool) -> Sequence[InstanceFacts]:
        entries = [each for each in self._settings.instances if each.enabled]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask(entry)) for entry in entries]
        patients = [task.result() for task in asked]
        sources = [source for patient in patients for source in patient.sources]
        async with listening(sources, self._context) as heard, asyncio.TaskGroup() as group:
            looking = [
                group.create_task(self._watch(patient, heard, sends_requests=sends_requests))
                for patient in patients
            ]
        patients = [
            replace(patient, facts=task.result())
            for patient, task in zip(patients, looking, strict=True)
        ]
        if sends_requests:
            patients = [await self._transfer(patient, patients) for patient in patients]
        return [patient.facts for patient in patients]

    async def _ask(self, entry: InstanceEntry) -> _Patient:
        key = self._settings.engine_keys().get(entry.id)
        engine = EngineHttp(entry.id, self._http, key)
        facts = InstanceFacts(told=_told(entry))
        try:
            status = await ask_health(engine)
            facts = replace(facts, health_status=status)
            facts = replace(facts, models=await ask_models(engine))
        except EngineFaultError as error:
            fault = replace(facts, fault=error.fault, detail=error.detail)
            return _Patient(entry=entry, engine=engine, facts=fault)
        idle_s = self._settings.dataplane.keep_alive_s
        async with asyncio.TaskGroup() as group:
            idle = group.create_task(idle_closed_after_s(entry.id, idle_s))
            version = await ask_version(engine)
            declared = await ask_sources(engine)
            metrics = await ask_metrics(engine)
            found = await self._find_sources(entry)
            tokenized = await self._tokenizers.compare(engine, facts.model or "")
        facts = replace(
            facts,
            version=version,
            declared=declared,
            metrics=metrics,
            tokenized=tokenized,
            idle_closed_s=idle.result(),
        )
        return _Patient(entry=entry, engine=engine, facts=facts, sources=found)

    async def _find_sources(self, entry: InstanceEntry) -> Sequence[RankSource]:
        """The streams as the indexer finds them; none if it doesn't."""
        if entry.role is Role.ENCODE:
            return ()
        (source,) = (each for each in self._settings.engine_sources() if each.instance == entry.id)
        try:
            found: FoundSources = await find_sources(
                source, config=self._settings.indexer, http=self._http
            )
        except SourceError:
            return ()
        return found.ranks

    async def _watch(
        self, patient: _Patient, heard: Mapping[RankId, HeardStream], *, sends_requests: bool
    ) -> InstanceFacts:
        """Send what has to be sent, and see what comes of it on each rank's stream."""
        facts = patient.facts
        streams = [heard[source.rank] for source in patient.sources]
        for stream in streams:
            await stream.connects(self._patience.connect_s)
        seen: list[Stream] = []
        prompt = await self._prompt(patient, "") if sends_requests else None
        for stream in streams:
            probed = None
            if prompt is not None and facts.model is not None:
                probed = await self._probe(patient, stream, prompt)
            replayed = await answers_replay(stream.source, self._context, self._patience.replay_s)
            seen.append(_stream(stream, probed, prompt or (), answers_replay=replayed))
        if not streams and prompt is not None and facts.model is not None:
            # Without a stream there is still the answer's usage to look at.
            probed = await probe(patient.engine, facts.model, prompt, None)
            facts = replace(facts, probed=probed)
        return replace(facts, streams=seen)

    async def _prompt(self, patient: _Patient, suffix: str) -> Sequence[int] | None:
        models = patient.facts.models
        if models is None or patient.facts.told.role is Role.ENCODE:
            return None
        size = patient.facts.metrics.block_size
        return await make_prompt(patient.engine, models, size, self._nonce + suffix)

    async def _probe(self, patient: _Patient, stream: HeardStream, prompt: Sequence[int]) -> Probed:
        model = patient.facts.model or ""
        header = None
        if len(patient.sources) > 1:
            first = min(source.rank.rank for source in patient.sources)
            header = str(stream.source.rank.rank - first)
        before = len(stream.batches)
        probed = await probe(patient.engine, model, prompt, header)
        is_deaf = not stream.is_connected and stream.source.direction == "connect"
        if probed.problem is not None or stream.problem is not None or is_deaf:
            return probed
        if await stream.grows_beyond(before, self._patience.event_s):
            return probed
        # A subscription that came late loses the first event; by now it has arrived.
        other = await self._prompt(patient, "-again")
        if other is not None:
            await complete(patient.engine, model, other, header)
            await stream.grows_beyond(before, self._patience.event_s)
        return probed

    async def _transfer(self, patient: _Patient, patients: Sequence[_Patient]) -> _Patient:
        facts = patient.facts
        if facts.told.role is not Role.PREFILL or facts.model is None:
            return patient
        prompt = await self._prompt(patient, "-transfer")
        if prompt is None:
            return patient
        partners = (
            (each.facts.told, each.engine)
            for each in patients
            if each.facts.told.role is Role.DECODE
            and each.facts.told.connector == facts.told.connector
            and each.facts.model == facts.model
        )
        transfer = await hand_over(
            (facts.told, patient.engine), next(partners, None), facts.model, prompt
        )
        return replace(patient, facts=replace(facts, transfer=transfer))


def _told(entry: InstanceEntry) -> Told:
    instance = entry.instance()
    return Told(
        name=entry.name,
        url=entry.id,
        role=entry.role,
        connector=instance.connector,
        transfer=instance.transfer,
        ec_zmq_addrs=instance.ec_zmq_addrs,
        events=entry.events,
        replay=entry.replay,
        binds=entry.direction == "bind",
        topic=entry.topic,
        model=entry.model,
        ranks=entry.ranks,
        rank_base=entry.rank_base,
    )


def _stream(
    heard: HeardStream,
    probed: Probed | None,
    prompt: Sequence[int],
    *,
    answers_replay: bool | None,
) -> Stream:
    stored = heard.stored()
    first = _first_block(stored, prompt)
    sizes = [event.block_size for event in stored if event.block_size]
    ranks = {batch.rank for batch in heard.batches if batch.rank is not None}
    return Stream(
        rank=heard.source.rank.rank,
        endpoint=heard.source.events,
        binds=heard.source.direction == "bind",
        problem=heard.problem,
        is_connected=heard.is_connected,
        answers_replay=answers_replay,
        probed=probed,
        batches=len(heard.batches),
        named_ranks=frozenset(ranks),
        block_size=first.block_size if first is not None else next(iter(sizes), None),
        first_hash=None if first is None else first.hashes[0],
        tiers=frozenset(event.tier.value for event in stored),
    )


def _first_block(stored: Sequence[BlockStored], prompt: Sequence[int]) -> BlockStored | None:
    """The announcement of the probe prompt's first block."""
    for event in stored:
        size = event.block_size
        is_first = event.parent is None and event.hashes and 0 < size <= len(prompt)
        if is_first and event.token_ids[:size] == list(prompt[:size]):
            return event
    return None
