"""Asks one engine what it says of itself, over HTTP. Every failure becomes a fact."""

import asyncio
import re
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from balancer.fleet.engine_sockets import tls_context
from indexer.core.endpoints import EndpointError, check_endpoint
from indexer.core.model_cards import ServedModels, parse_model_list
from kvlb.doctor.core.exposition import EngineMetrics, read_metrics
from kvlb.doctor.core.facts import Declared, Version
from kvlb.engine_http import CallFailedError, EngineHttp

_VERSION = re.compile(r"(\d+)\.(\d+)")
_REFUSED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_READ_BYTES = 65_536
_PATIENCE_S = 0.2
"""Past our own keep-alive, so that an engine with the same one is caught."""


class EngineFaultError(Exception):
    """The engine can't be asked at all; `fault` is a key of `engine_checks.FAULTS`."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault
        self.detail = detail


async def ask_health(engine: EngineHttp) -> int:
    """Status of `/health`. Raises EngineFaultError if nobody answers."""
    try:
        return (await engine.get("/health")).status
    except CallFailedError as error:
        raise EngineFaultError("unreachable", f"{engine.url}: {error}") from error


async def ask_models(engine: EngineHttp) -> ServedModels:
    """Raises EngineFaultError."""
    try:
        answer = await engine.get("/v1/models")
    except CallFailedError as error:
        raise EngineFaultError("unreachable", f"{engine.url}/v1/models: {error}") from error
    if answer.is_balancers:
        raise EngineFaultError("not_vllm", "a kvlb balancer answers: name the engines behind it")
    if answer.status in _REFUSED:
        raise EngineFaultError("unauthorized", f"/v1/models answered {answer.status}")
    if answer.status != HTTPStatus.OK:
        raise EngineFaultError("not_vllm", f"/v1/models answered {answer.status}")
    try:
        return parse_model_list(answer.body)
    except ValueError as error:
        raise EngineFaultError("not_vllm", str(error)) from error


async def ask_version(engine: EngineHttp) -> Version | None:
    """None if it doesn't say, or is built from a tree without tags (`0.1.dev…`)."""
    body = await engine.read("/version")
    text = body.get("version") if isinstance(body, Mapping) else None
    found = _VERSION.match(text) if isinstance(text, str) else None
    if found is None or str(text).startswith("0.1.dev"):
        return None
    return int(found[1]), int(found[2])


async def ask_sources(engine: EngineHttp) -> Mapping[int, Declared] | None:
    """Ranks that publish, as `/kv_event_sources` lists them; None if the engine doesn't have it."""
    body = await engine.read("/kv_event_sources")
    if not isinstance(body, Mapping):
        return None
    found: dict[int, Declared] = {}
    for rank, entry in body.items():
        declared = _read_source(entry)
        if declared is not None and str(rank).isdecimal():
            found[int(rank)] = declared
    return found


def _read_source(entry: object) -> Declared | None:
    if not isinstance(entry, Mapping):
        return None
    if entry.get("enable_kv_cache_events") is False or entry.get("publisher") == "null":
        return None
    endpoint, replay = _endpoint(entry, "endpoint"), _endpoint(entry, "replay_endpoint")
    topic = entry.get("topic")
    if endpoint is None:
        return None
    return Declared(
        endpoint=endpoint, replay=replay, topic=topic if isinstance(topic, str) else None
    )


def _endpoint(entry: Mapping[str, Any], key: str) -> str | None:
    value = entry.get(key)
    try:
        return check_endpoint(value) if isinstance(value, str) else None
    except EndpointError:
        return None


async def ask_metrics(engine: EngineHttp) -> EngineMetrics:
    """Everything unknown if there is no such page."""
    try:
        return read_metrics((await engine.get("/metrics")).text)
    except CallFailedError:
        return EngineMetrics()


async def idle_closed_after_s(url: str, keep_alive_s: float) -> float | None:
    """Leave a connection idle for as long as our pool would, and time the engine's close."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    context = tls_context() if parts.scheme == "https" else None
    try:
        async with asyncio.timeout(keep_alive_s + 5):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
    except (OSError, TimeoutError):
        return None
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        async with asyncio.timeout(5):
            await reader.readuntil(b"\r\n\r\n")
        return await _closed_after_s(reader, keep_alive_s + _PATIENCE_S)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
        return None
    finally:
        writer.close()


async def _closed_after_s(reader: asyncio.StreamReader, patience_s: float) -> float | None:
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(patience_s):
            # Whatever is left of the answer comes first.
            while await reader.read(_READ_BYTES):
                pass
    except TimeoutError:
        return None
    return time.monotonic() - began_s
