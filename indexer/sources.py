"""Finds each rank's event stream: asks the engine, and lets configuration overrule it.

Rules:

1. `/v1/models` names the base model; `/kv_event_sources` (vLLM 0.31 and later) the ranks and
   their endpoints. Older engines answer 404 and need `events` in the configuration.
2. An engine that publishes no events is no fault: it has no ranks, and says why.
3. An engine that isn't up yet raises `InstanceUnreachableError`: ask again later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx
import msgspec

from indexer.config import IndexerConfig, InstanceSource, RankSource
from indexer.core.endpoints import EndpointError, bindable, dialable, engine_binds, offset_port
from indexer.core.model_cards import parse_model_list
from indexer.core.types import RankId


class SourceError(Exception):
    """An engine's streams could not be found. `reason` is constant, fit for a metric label."""

    reason = "source_error"


class InstanceUnreachableError(SourceError):
    """No answer: it isn't up yet, or not any more."""

    reason = "unreachable"


class InstanceRefusedError(SourceError):
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
    source: InstanceSource, *, config: IndexerConfig, http: httpx.AsyncClient
) -> FoundSources:
    """Resolve the streams of one instance, or raise SourceError."""
    if source.events is None and source.topic is not None and config.shared_bind is not None:
        source = msgspec.structs.replace(source, events=config.shared_bind, direction="bind")
    model = source.model or await _ask_model(source, config, http)
    published = await _ask_published(source, config, http)
    try:
        ranks = _resolve(source, model, published)
    except EndpointError as error:
        raise InstanceRefusedError(f"{source.instance}: {error}") from error
    reason = "events_off" if published is not None else "no_events_endpoint"
    return FoundSources(model=model, ranks=ranks, reason="following" if ranks else reason)


def _resolve(
    source: InstanceSource, model: str, published: Mapping[int, _Published] | None
) -> tuple[RankSource, ...]:
    found: list[RankSource] = []
    for rank in _rank_numbers(source, published or {}):
        entry = (published or {}).get(rank)
        direction, topic = source.direction, source.topic
        if source.events is not None:
            endpoint = offset_port(source.events, rank)
        elif entry is not None:
            endpoint, topic = entry.endpoint, topic or entry.topic
            direction = "connect" if engine_binds(endpoint) else "bind"
        else:
            continue
        replay = offset_port(source.replay, rank) if source.replay else entry and entry.replay
        is_ours = direction == "bind"
        found.append(
            RankSource(
                rank=RankId(source.instance, rank),
                alias=source.name,
                model=model,
                events=bindable(endpoint) if is_ours else dialable(endpoint, source.url),
                replay=dialable(replay, source.url) if replay else None,
                direction=direction,
                topic=topic if is_ours else None,
            )
        )
    return tuple(found)


def _rank_numbers(source: InstanceSource, published: Mapping[int, _Published]) -> list[int]:
    if published and (source.ranks is None or source.events is None):
        return sorted(published)
    return [source.rank_base + local for local in range(source.ranks or 1)]


async def _ask_model(source: InstanceSource, config: IndexerConfig, http: httpx.AsyncClient) -> str:
    answer = await _get(source, "/v1/models", config, http)
    if answer.status_code != HTTPStatus.OK:
        raise InstanceRefusedError(f"{source.instance}: /v1/models answered {answer.status_code}")
    try:
        return parse_model_list(answer.json()).base
    except (ValueError, RecursionError) as error:
        raise InstanceRefusedError(f"{source.instance}: {error}") from error


async def _ask_published(
    source: InstanceSource, config: IndexerConfig, http: httpx.AsyncClient
) -> Mapping[int, _Published] | None:
    """What `/kv_event_sources` says by rank; None if the engine doesn't have it."""
    is_answer_needed = source.events is None or source.ranks is None
    if not is_answer_needed:
        return None
    try:
        answer = await _get(source, "/kv_event_sources", config, http)
    except InstanceUnreachableError:
        if source.events is None:
            raise
        return None
    if answer.status_code != HTTPStatus.OK:
        return None
    try:
        return _parse_published(answer.json())
    except (ValueError, TypeError, RecursionError) as error:
        raise InstanceRefusedError(f"{source.instance}: /kv_event_sources: {error}") from error


async def _get(
    source: InstanceSource, path: str, config: IndexerConfig, http: httpx.AsyncClient
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {source.api_key}"} if source.api_key else {}
    try:
        return await http.get(
            source.instance + path, headers=headers, timeout=config.http_timeout_s
        )
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        # Its type alone: the text of some holds the headers, and so the key.
        raise InstanceUnreachableError(f"{source.instance}: {type(error).__name__}") from error


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
