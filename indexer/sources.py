"""Finds each rank's event stream: asks the engine, and lets configuration overrule it.

Rules:

1. `/v1/models` names the base model; `/kv_event_sources` (vLLM 0.31 and later) the ranks and
   their endpoints. Older engines answer 404 and need `events` in the configuration.
2. An engine that publishes no events is no fault: it has no ranks, and says why.
3. An engine that isn't up yet raises `EngineUnreachableError`: ask again later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx
import msgspec

from indexer.config import EngineSource, IndexerConfig, RankSource
from indexer.core.endpoints import EndpointError, bindable, dialable, engine_binds, offset_port
from indexer.core.model_cards import parse_model_list
from indexer.core.types import RankId


class SourceError(Exception):
    """An engine's streams could not be found. `reason` is constant, fit for a metric label."""

    reason = "source_error"


class EngineUnreachableError(SourceError):
    """No answer: it isn't up yet, or not any more."""

    reason = "unreachable"


class EngineRefusedError(SourceError):
    """It answered, and not as a vLLM engine does: wrong address, wrong key, other version."""

    reason = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSources:
    """What one engine offers."""

    model: str
    ranks: tuple[RankSource, ...]
    reason: str
    """`following`, or why there is nothing to follow: `events_off`, `no_events_endpoint`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """One rank's entry in `/kv_event_sources`."""

    endpoint: str
    replay: str | None
    topic: str | None


async def find_sources(
    engine: EngineSource, *, config: IndexerConfig, http: httpx.AsyncClient
) -> FoundSources:
    """Resolve the streams of one engine, or raise SourceError."""
    if engine.events is None and engine.topic is not None and config.shared_bind is not None:
        engine = msgspec.structs.replace(engine, events=config.shared_bind, direction="bind")
    model = engine.model or await _ask_model(engine, config, http)
    published = await _ask_published(engine, config, http)
    try:
        ranks = _resolve(engine, model, published)
    except EndpointError as error:
        raise EngineRefusedError(f"{engine.instance}: {error}") from error
    reason = "events_off" if published is not None else "no_events_endpoint"
    return FoundSources(model=model, ranks=ranks, reason="following" if ranks else reason)


def _resolve(
    engine: EngineSource, model: str, published: Mapping[int, _Published] | None
) -> tuple[RankSource, ...]:
    found: list[RankSource] = []
    for rank in _rank_numbers(engine, published or {}):
        entry = (published or {}).get(rank)
        direction, topic = engine.direction, engine.topic
        if engine.events is not None:
            endpoint = offset_port(engine.events, rank)
        elif entry is not None:
            endpoint, topic = entry.endpoint, topic or entry.topic
            direction = "connect" if engine_binds(endpoint) else "bind"
        else:
            continue
        replay = offset_port(engine.replay, rank) if engine.replay else entry and entry.replay
        is_ours = direction == "bind"
        found.append(
            RankSource(
                rank=RankId(engine.instance, rank),
                alias=engine.name,
                model=model,
                events=bindable(endpoint) if is_ours else dialable(endpoint, engine.url),
                replay=dialable(replay, engine.url) if replay else None,
                direction=direction,
                topic=topic if is_ours else None,
            )
        )
    return tuple(found)


def _rank_numbers(engine: EngineSource, published: Mapping[int, _Published]) -> list[int]:
    if published and (engine.ranks is None or engine.events is None):
        return sorted(published)
    return [engine.rank_base + local for local in range(engine.ranks or 1)]


async def _ask_model(engine: EngineSource, config: IndexerConfig, http: httpx.AsyncClient) -> str:
    answer = await _get(engine, "/v1/models", config, http)
    if answer.status_code != HTTPStatus.OK:
        raise EngineRefusedError(f"{engine.instance}: /v1/models answered {answer.status_code}")
    try:
        return parse_model_list(answer.json()).base
    except ValueError as error:
        raise EngineRefusedError(f"{engine.instance}: {error}") from error


async def _ask_published(
    engine: EngineSource, config: IndexerConfig, http: httpx.AsyncClient
) -> Mapping[int, _Published] | None:
    """What `/kv_event_sources` says by rank; None if the engine doesn't have it."""
    is_answer_needed = engine.events is None or engine.ranks is None
    if not is_answer_needed:
        return None
    try:
        answer = await _get(engine, "/kv_event_sources", config, http)
    except EngineUnreachableError:
        if engine.events is None:
            raise
        return None
    if answer.status_code != HTTPStatus.OK:
        return None
    try:
        return _parse_published(answer.json())
    except (ValueError, TypeError) as error:
        raise EngineRefusedError(f"{engine.instance}: /kv_event_sources: {error}") from error


async def _get(
    engine: EngineSource, path: str, config: IndexerConfig, http: httpx.AsyncClient
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}
    try:
        return await http.get(
            engine.instance + path, headers=headers, timeout=config.http_timeout_s
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineUnreachableError(f"{engine.instance}: {error!r}") from error


def _parse_published(body: object) -> Mapping[int, _Published]:
    if not isinstance(body, Mapping):
        raise TypeError("not an object")
    published: dict[int, _Published] = {}
    for rank, entry in body.items():
        if not isinstance(entry, Mapping):
            raise TypeError("an entry is not an object")
        if entry.get("enable_kv_cache_events") is False or entry.get("publisher") == "null":
            continue
        endpoint = _text(entry, "endpoint")
        if endpoint is None:
            raise ValueError("an entry has no endpoint")
        published[int(rank)] = _Published(
            endpoint=endpoint,
            replay=_text(entry, "replay_endpoint"),
            topic=_text(entry, "topic"),
        )
    return published


def _text(entry: Mapping[str, Any], key: str) -> str | None:
    value = entry.get(key)
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{key} is not a string")
