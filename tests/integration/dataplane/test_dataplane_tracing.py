"""Traces: what each engine is told, and the spans of a request."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.routing import PdSettings
from balancer.otel_tracing import OtelTracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}
LONG = {"model": "m", "prompt": list(range(1000))}


async def prefill_ok(received: Any, wire: Any) -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [1, 2]}
    await wire.json({"choices": [{"finish_reason": "length"}], "kv_transfer_params": params})


async def answer_ok(received: Any, wire: Any) -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 992}}
    usage = {"prompt_tokens": 1000, "completion_tokens": 1, **details}
    await wire.json({"choices": [{"text": "a"}], "usage": usage})


async def refuse(received: Any, wire: Any) -> None:
    await wire.json({"error": {"message": "a secret prompt"}}, 500)


@pytest.fixture
def exported() -> InMemorySpanExporter:
    """Where the spans of a test end."""
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exported: InMemorySpanExporter) -> Iterator[OtelTracing]:
    """Tracing that exports each span as it ends."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    yield OtelTracing(provider.get_tracer("test"))
    provider.shutdown()


@pytest.fixture
async def asked_pair(engine: Any, instance: Any, balancer: Any, client: Any) -> Any:
    """Sends one long prompt through a prefill and a decode engine; returns what they received."""

    async def ask(tracing: Any, headers: Mapping[str, str] | None = None) -> tuple[Any, Any]:
        async with engine(prefill_ok) as source, engine(answer_ok) as target:
            instances = (
                instance(source, "p0", role=Role.PREFILL, connector="nixl"),
                instance(target, "d0", role=Role.DECODE, connector="nixl"),
            )
            async with balancer(*instances, tracing=tracing) as started:
                answer = await client.post(
                    f"{started.url}/v1/completions", json=LONG, headers=headers or {}
                )
                await started.wait_for_records(1)
            assert answer.status_code == 200
            return source.received[0], target.received[0]

    return ask


def by_name(exported: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exported.get_finished_spans()}


def traceparent(span: ReadableSpan) -> str:
    context = span.context
    assert context is not None
    ids = f"{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}"
    return f"00-{ids}-{context.trace_flags:02x}"


async def test_clients_context_passes_to_both_legs_as_it_is(asked_pair: Any) -> None:
    """With tracing off we are no part of the trace: engines hang below the client's own span."""
    received = await asked_pair(None, CLIENT)

    for each in received:
        assert each.header("traceparent") == CLIENT["traceparent"]
        assert each.header("tracestate") == CLIENT["tracestate"]


async def test_nothing_is_made_up_while_tracing_is_off(asked_pair: Any) -> None:
    """No header of ours where the client sent none."""
    received = await asked_pair(None)

    assert [each.header("traceparent") for each in received] == [None, None]


async def test_each_leg_hangs_below_its_own_span(
    asked_pair: Any, tracing: OtelTracing, exported: InMemorySpanExporter
) -> None:
    """Same trace as the client's; each engine's parent is the leg that called it."""
    prefill, decode = await asked_pair(tracing, CLIENT)

    spans = by_name(exported)
    assert prefill.header("traceparent") == traceparent(spans["kvlb.leg.prefill"])
    assert decode.header("traceparent") == traceparent(spans["kvlb.leg.decode"])
    assert prefill.header("traceparent") != decode.header("traceparent")
    assert TRACE in decode.header("traceparent")
    assert {prefill.header("tracestate"), decode.header("tracestate")} == {"vendor=value"}


async def test_spans_of_a_request_are_match_plan_and_legs(
    asked_pair: Any, tracing: OtelTracing, exported: InMemorySpanExporter
) -> None:
    """All of them directly below the request, which is below the client's span."""
    await asked_pair(tracing, CLIENT)

    spans = by_name(exported)
    request = spans.pop("kvlb.request")
    assert request.parent is not None
    assert format_span_id(request.parent.span_id) == PARENT
    assert request.kind is SpanKind.SERVER
    assert set(spans) == {"kvlb.match", "kvlb.plan", "kvlb.leg.prefill", "kvlb.leg.decode"}
    assert request.context is not None
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id


async def test_spans_say_what_was_decided_and_delivered(
    asked_pair: Any, tracing: OtelTracing, exported: InMemorySpanExporter
) -> None:
    """Reason, tokens, statuses; aliases instead of addresses."""
    await asked_pair(tracing)

    spans = by_name(exported)
    told = {name: dict(span.attributes or {}) for name, span in spans.items()}
    assert told["kvlb.request"]["kvlb.reason"] == "remote_prefill"
    assert told["kvlb.request"]["http.response.status_code"] == 200
    assert told["kvlb.request"]["kvlb.prompt_tokens"] == 1000
    assert told["kvlb.match"] == {"kvlb.lookup": "ok"}
    assert told["kvlb.plan"] == {"kvlb.reason": "remote_prefill"}
    assert told["kvlb.leg.prefill"]["kvlb.instance"] == "p0"
    assert told["kvlb.leg.decode"]["kvlb.cached_tokens"] == 992
    assert "127.0.0.1" not in str(told)


async def test_trace_is_made_up_where_the_client_has_none(
    asked_pair: Any, tracing: OtelTracing, exported: InMemorySpanExporter
) -> None:
    """One new trace for the whole request."""
    received = await asked_pair(tracing)

    traces = {each.header("traceparent").split("-")[1] for each in received}
    request = by_name(exported)["kvlb.request"]
    assert request.parent is None
    assert request.context is not None
    assert traces == {format_trace_id(request.context.trace_id)}


async def test_broken_context_is_replaced(
    asked_pair: Any, tracing: OtelTracing, exported: InMemorySpanExporter
) -> None:
    """What can't be a trace id is not passed on as one."""
    received = await asked_pair(tracing, {"traceparent": "00-xyz", "tracestate": "vendor=value"})

    assert by_name(exported)["kvlb.request"].parent is None
    assert "xyz" not in str([each.header("traceparent") for each in received])
    assert [each.header("tracestate") for each in received] == [None, None]


async def test_trace_that_is_not_sampled_passes_on_and_exports_nothing(
    asked_pair: Any, exported: InMemorySpanExporter
) -> None:
    """Engines learn that nobody records this one."""
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(exported))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    received = await asked_pair(OtelTracing(provider.get_tracer("test")), headers)
    provider.shutdown()

    assert {each.header("traceparent")[-2:] for each in received} == {"00"}
    assert {each.header("traceparent")[3:35] for each in received} == {TRACE}
    assert exported.get_finished_spans() == ()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_failed_leg_is_an_error_without_the_engines_words(
    engine: Any,
    instance: Any,
    balancer: Any,
    client: Any,
    path: str,
    tracing: OtelTracing,
    exported: InMemorySpanExporter,
) -> None:
    """An engine's message may quote the prompt: spans have the code only."""
    async with engine(refuse) as target, balancer(instance(target), tracing=tracing) as started:
        await client.post(f"{started.url}{path}", json={"model": "m", "prompt": [1]})
        await started.wait_for_records(1)

    spans = by_name(exported)
    leg = spans["kvlb.leg.forward" if "embeddings" in path else "kvlb.leg.decode"]
    told = str([(span.attributes, span.events, span.status.description) for span in spans.values()])
    assert "secret" not in told
    assert dict(leg.attributes or {})["http.response.status_code"] == 500
    if "completions" in path:
        assert leg.status.status_code is StatusCode.ERROR


async def test_repeated_prefill_leg_is_a_span_of_its_own(
    engine: Any,
    instance: Any,
    balancer: Any,
    client: Any,
    tracing: OtelTracing,
    exported: InMemorySpanExporter,
) -> None:
    """Every attempt shows, and the engine of each gets its own parent."""
    async with engine(refuse) as first, engine(prefill_ok) as second, engine(answer_ok) as target:
        instances = (
            instance(first, "p0", role=Role.PREFILL, connector="nixl"),
            instance(second, "p1", role=Role.PREFILL, connector="nixl"),
            instance(target, "d0", role=Role.DECODE, connector="nixl"),
        )
        options = {"tracing": tracing, "pd": PdSettings(prefill_attempts=2)}
        async with balancer(*instances, **options) as started:
            for first_id in (0, 5000):  # in turn: one of them meets p0 first
                prompt = list(range(first_id, first_id + 1000))
                await client.post(
                    f"{started.url}/v1/completions", json={"model": "m", "prompt": prompt}
                )
            await started.wait_for_records(2)
        received = [*first.received, *second.received]

    attempts = [span for span in exported.get_finished_spans() if span.name == "kvlb.leg.prefill"]
    assert len(attempts) > 2
    assert {each.header("traceparent") for each in received} == set(map(traceparent, attempts))


async def test_client_that_leaves_cancels_its_leg(
    engine: Any,
    instance: Any,
    balancer: Any,
    raw_client: Any,
    tracing: OtelTracing,
    exported: InMemorySpanExporter,
) -> None:
    """The leg says so; the request did nothing wrong on our side."""

    async def stay_silent(received: Any, wire: Any) -> None:
        await received.gone.wait()

    async with (
        engine(stay_silent) as target,
        balancer(instance(target), tracing=tracing) as started,
    ):
        async with raw_client(started) as client:
            await client.post("/v1/completions", {"model": "m", "prompt": [1]})
            await target.wait_for_requests(1)
            client.leave()
        await started.wait_for_records(1)

    spans = by_name(exported)
    assert dict(spans["kvlb.leg.decode"].attributes or {})["error.type"] == "cancelled"


def test_bug_is_named_by_its_class(tracing: OtelTracing, exported: InMemorySpanExporter) -> None:
    """Its message may hold anything."""
    with pytest.raises(RuntimeError), tracing.step("match"):
        raise RuntimeError("a secret prompt")

    (span,) = exported.get_finished_spans()
    assert span.status.description == "RuntimeError"
    assert span.events == ()
