"""Tracing by OpenTelemetry. Needs the extra `kvlb[otel]`, and is imported only when it is on.

Spans: `kvlb.request` (server) with `kvlb.match`, `kvlb.plan` and `kvlb.leg.<kind>` (client) under it.
The current span is a context variable, so a leg in a task of its own finds its request.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from balancer.core.errors import BalancerError
from balancer.core.http.headers import Headers
from balancer.core.record import LegRecord, RequestRecord
from balancer.tracing import Fact, Step

TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})


class _HeaderGetter(Getter[Headers]):
    def get(self, carrier: Headers, key: str) -> list[str] | None:
        wanted = key.lower().encode()
        found = [value.decode("latin-1") for name, value in carrier if name == wanted]
        return found or None

    def keys(self, carrier: Headers) -> list[str]:
        return [name.decode("latin-1") for name, _ in carrier]


class _OtelStep:
    def __init__(self, span: Span) -> None:
        self._span = span

    def note(self, name: str, value: Fact) -> None:
        self._span.set_attribute(name, value)


class OtelTracing:
    """Makes the spans of every request of this process."""

    is_on = True

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()
        self._getter = _HeaderGetter()

    @contextmanager
    def request(self, record: RequestRecord, headers: Headers) -> Iterator[Step]:
        parent = self._propagator.extract(headers, getter=self._getter)
        with (
            self._span("kvlb.request", SpanKind.SERVER, parent) as span,
            _told(span, lambda: _request_facts(record)) as step,
        ):
            yield step

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        with self._span(f"kvlb.{name}", SpanKind.INTERNAL) as span, _told(span, dict) as step:
            yield step

    @contextmanager
    def leg(self, leg: LegRecord) -> Iterator[Step]:
        with (
            self._span(f"kvlb.leg.{leg.kind}", SpanKind.CLIENT) as span,
            _told(span, lambda: _leg_facts(leg)) as step,
        ):
            yield step

    def pass_on(self, headers: Headers) -> Headers:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        kept = tuple(pair for pair in headers if pair[0] not in TRACE_HEADERS)
        ours = ((name.encode(), value.encode("latin-1")) for name, value in carrier.items())
        return (*kept, *ours)

    def _span(
        self, name: str, kind: SpanKind, parent: Context | None = None
    ) -> AbstractContextManager[Span]:
        # Exceptions are noted by code: their messages may quote what a client sent.
        return self._tracer.start_as_current_span(
            name, context=parent, kind=kind, record_exception=False, set_status_on_exception=False
        )


@contextmanager
def _told(span: Span, facts: Callable[[], Mapping[str, Fact | None]]) -> Iterator[Step]:
    """Note `facts` when the block ends, and how it failed if it did."""
    try:
        yield _OtelStep(span)
    except BalancerError as error:
        _fail(span, error.code or error.type)
        span.set_attribute("http.response.status_code", error.status)
        raise
    except asyncio.CancelledError:
        _fail(span, "cancelled")
        raise
    except Exception as error:
        _fail(span, type(error).__name__)
        raise
    finally:
        for name, value in facts().items():
            if value is not None:
                span.set_attribute(name, value)


def _fail(span: Span, code: str) -> None:
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, code))


def _request_facts(record: RequestRecord) -> Mapping[str, Fact | None]:
    return {
        "url.path": record.path,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.base_model,
        "kvlb.request_id": record.request_id,
        "kvlb.reason": record.plan.reason.value if record.plan else None,
        "kvlb.stream": record.stream,
        "kvlb.prompt_tokens": record.prompt_tokens,
        "kvlb.prompt_source": record.prompt_source,
        "kvlb.overlap_tokens": record.chosen_tokens,
        "kvlb.cached_tokens": record.cached_tokens,
    }


def _leg_facts(leg: LegRecord) -> Mapping[str, Fact | None]:
    waited_s = None if leg.first_byte_s is None else leg.first_byte_s - leg.started_s
    return {
        "kvlb.instance": leg.alias,
        "http.response.status_code": leg.status,
        "kvlb.overlap_tokens": leg.overlap_tokens,
        "kvlb.cached_tokens": leg.cached_tokens,
        "kvlb.completion_tokens": leg.completion_tokens,
        "kvlb.first_byte_s": waited_s,
    }
