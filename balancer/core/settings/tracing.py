"""Where traces go. Off without an endpoint."""

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from indexer.core.addresses import split_address

TRACES_PATH = "/v1/traces"
"""Where an OTLP collector takes traces over HTTP."""

Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry.

    Off without an endpoint: then a client's `traceparent` and `tracestate` pass to both legs as they
    are. On, every request is a span with match, plan and legs under it, and each engine is told its
    leg's span as parent. Needs `pip install 'kvlb[otel]'`. Spans hold no prompts, keys or addresses.
    Headers for the collector go into the variable `OTEL_EXPORTER_OTLP_HEADERS`.
    """

    endpoint: str | None = None
    """OTLP collector over HTTP: `http://collector:4318`; without a path `/v1/traces` is added."""
    service_name: Annotated[str, msgspec.Meta(min_length=1)] = "kvlb"
    """`service.name` of the spans."""
    sample_ratio: Ratio = 1.0
    """Share of requests traced among those without a `traceparent`; one that comes with the
    request decides by itself."""

    def __post_init__(self) -> None:
        """Raise ValueError for an endpoint that can't be used."""
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)

    @property
    def traces_url(self) -> str | None:
        """The whole address; None if tracing is off."""
        if self.endpoint is None:
            return None
        has_path = urlsplit(self.endpoint).path not in {"", "/"}
        return self.endpoint if has_path else self.endpoint.rstrip("/") + TRACES_PATH


def _check_endpoint(endpoint: str) -> None:
    if "@" in endpoint:
        raise ValueError(
            "endpoint: an address holds no credentials; put them into OTEL_EXPORTER_OTLP_HEADERS"
        )
    try:
        parts = split_address(endpoint)
    except ValueError as error:
        raise ValueError(f"endpoint: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"endpoint: {endpoint!r} is no http:// or https:// address")
    if parts.query or parts.fragment:
        raise ValueError(f"endpoint: {endpoint!r}: write `http://collector:4318`, without a query")
