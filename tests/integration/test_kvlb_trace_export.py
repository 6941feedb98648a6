"""Traces on their way to a collector: sent, lost without harm, refused with a sentence."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from structlog.testing import capture_logs

from balancer.core.record import RequestRecord
from balancer.core.settings.tracing import TracingSettings
from balancer.server import EmbeddedServer
from balancer.tracing import NoTracing, Tracing
from kvlb.errors import MissingExtraError
from kvlb.trace_export import open_tracing


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.received: list[ExportTraceServiceRequest] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding") == b"gzip":
            import gzip  # noqa: PLC0415

            body = gzip.decompress(body)
        self.paths.append(scope["path"])
        self.received.append(ExportTraceServiceRequest.FromString(body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(self, lifespan="off", log_config=None)
            server = EmbeddedServer(config)
            async with asyncio.TaskGroup() as group:
                group.create_task(server.serve(sockets=[listener]))
                await server.accepts.wait()
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
                server.should_exit = True


def trace_one(tracing: Tracing) -> None:
    record = RequestRecord(request_id="r", path="/v1/completions", arrived_s=0.0)
    with tracing.request(record, ()), tracing.step("match") as step:
        step.note("kvlb.lookup", "ok")


async def test_spans_arrive_with_the_names_of_this_service() -> None:
    """What is queued when the process ends is still sent."""
    collector = Collector()
    async with collector.running() as url:
        settings = TracingSettings(endpoint=url, service_name="kvlb-here")
        async with open_tracing(settings) as tracing:
            trace_one(tracing)

    (request,) = collector.received
    (spans,) = request.resource_spans
    resource = {each.key: each.value.string_value for each in spans.resource.attributes}
    assert collector.paths == ["/v1/traces"]
    assert resource["service.name"] == "kvlb-here"
    assert resource["service.version"]
    assert {each.name for each in spans.scope_spans[0].spans} == {"kvlb.request", "kvlb.match"}


async def test_nothing_is_sampled_at_ratio_zero() -> None:
    """Of what has no trace of its own."""
    collector = Collector()
    async with collector.running() as url:
        settings = TracingSettings(endpoint=url, sample_ratio=0)
        async with open_tracing(settings) as tracing:
            trace_one(tracing)

    assert collector.received == []


@pytest.mark.timeout(30)
async def test_collector_that_is_gone_costs_spans_only() -> None:
    """The end of the process is late by seconds at most, and the log says why."""
    settings = TracingSettings(endpoint="http://127.0.0.1:9")
    with capture_logs() as log:
        async with asyncio.timeout(20):
            async with open_tracing(settings) as tracing:
                trace_one(tracing)

    assert {each["event"] for each in log} <= {"trace_export_failed", "traces_lost_at_exit"}
    assert log


async def test_off_means_off() -> None:
    """Without an endpoint nothing is imported or made."""
    async with open_tracing(TracingSettings()) as tracing:
        trace_one(tracing)
        headers = ((b"traceparent", b"as it is"),)

        assert isinstance(tracing, NoTracing)
        assert tracing.pass_on(headers) is headers


async def test_missing_extra_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'kvlb\[otel\]'"):
        async with open_tracing(TracingSettings(endpoint="http://c:4318")):
            pass
