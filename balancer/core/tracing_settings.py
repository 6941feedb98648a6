"""Where traces go. Off without an endpoint."""

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

TRACES_PATH = "/v1/traces"
"""Where an OTLP collector takes traces over HTTP."""

Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry over OTLP/HTTP."""

    endpoint: str | None = None
    """`http://collector:4318`; without a path `/v1/traces` is added."""
    service_name: Annotated[str, msgspec.Meta(min_length=1)] = "kvlb"
    sample_ratio: Ratio = 1.0
    """Share of the requests traced among those that don't come with a `traceparent`: where the
    client has decided, its decision holds."""

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            split = urlsplit(self.endpoint)
            if split.scheme not in {"http", "https"} or not split.hostname:
                raise ValueError(f"{self.endpoint!r} is no http:// or https:// address")

    @property
    def traces_url(self) -> str | None:
        """The whole address; None if tracing is off."""
        if self.endpoint is None:
            return None
        has_path = urlsplit(self.endpoint).path not in {"", "/"}
        return self.endpoint if has_path else self.endpoint.rstrip("/") + TRACES_PATH
