"""Sends traces to an OpenTelemetry collector, if one is configured. Needs the extra `kvlb[otel]`."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import structlog

from balancer.core.settings.tracing import TracingSettings
from balancer.tracing import NoTracing, Tracing
from kvlb.errors import MissingExtraError

EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 6.0

_logger = structlog.get_logger(__name__)


@asynccontextmanager
async def open_tracing(settings: TracingSettings) -> AsyncIterator[Tracing]:
    """Trace while the block runs; what is still queued at its end is sent, if that is quick."""
    if settings.traces_url is None:
        yield NoTracing()
        return
    provider, tracing = _start(settings, settings.traces_url)
    try:
        yield tracing
    finally:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.to_thread(provider.shutdown)
        except TimeoutError:
            _logger.warning("traces_lost_at_exit", endpoint=settings.traces_url)


def _start(settings: TracingSettings, url: str) -> tuple[Any, Tracing]:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased  # noqa: PLC0415

        from balancer.otel_tracing import OtelTracing  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("`tracing.endpoint` needs: pip install 'kvlb[otel]'") from error
    _log_through_structlog(logging.getLogger("opentelemetry"))
    provider = TracerProvider(
        resource=Resource.create(
            {"service.name": settings.service_name, "service.version": version("kvlb")}
        ),
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
    # A thread of its own with a bounded queue: a collector that is gone costs spans, not requests.
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, OtelTracing(provider.get_tracer("kvlb"))


class _ToStructlog(logging.Handler):
    """What the exporter complains about, as events of our log."""

    def emit(self, record: logging.LogRecord) -> None:
        _logger.warning("trace_export_failed", problem=record.getMessage())


def _log_through_structlog(logger: logging.Logger) -> None:
    if not any(isinstance(each, _ToStructlog) for each in logger.handlers):
        logger.addHandler(_ToStructlog(logging.WARNING))
        logger.propagate = False
