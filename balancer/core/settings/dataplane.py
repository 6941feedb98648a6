"""What an operator can set of the data plane. Times are limits, 0 or less is refused."""

from typing import Annotated, Literal

import msgspec

from indexer.core.limits import NonNegativeInt, PositiveFloat, PositiveInt

Origin = Annotated[str, msgspec.Meta(pattern=r"^(\*|https?://[A-Za-z0-9.\-:\[\]]+)$")]


class DataPlaneSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of proxied requests.

    There is no limit on the whole of an answer, on purpose: agent turns may take an hour.
    """

    connect_timeout_s: PositiveFloat = 5.0
    """For the connection to an engine."""
    first_byte_timeout_s: PositiveFloat = 600.0
    """From the request to the first byte of its answer; queue and prefill are in it."""
    idle_timeout_s: PositiveFloat = 120.0
    """Longest silence between two pieces of an answer."""
    keep_alive_s: PositiveFloat = 4.0
    """Idle connections to engines are dropped after this; keep it below the engines' own (vLLM: 5
    s)."""
    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    """A larger request body is refused with 413."""
    max_head_bytes: PositiveInt = 64 * 1024
    """A larger request head, or trailers, are refused with 431, a longer target with 414."""
    head_timeout_s: PositiveFloat = 30.0
    """For a connection's first byte, and from a head's first byte to its last: then 408."""
    body_idle_timeout_s: PositiveFloat = 60.0
    """Longest silence within a request's body: then 408. Of a server that stops at most 5 s."""
    usage_inject: bool = True
    """Ask engines for the usage of streams, so that delivered cached tokens are known."""
    usage_of_prefill: bool = True
    """After a prefill leg `usage.prompt_tokens_details` is what that leg's engine said. `false`: as the
    decode engine says it, which counts all that it was handed as cached."""
    headers: Literal["full", "id", "off"] = "full"
    """`x-kvlb-*` headers on answers: all of them, the request id only, or none. With `full` a request that
    has a header `x-kvlb-explain` is also told every candidate's terms, and why one of them won."""
    retries: NonNegativeInt = 2
    """Further instances tried while no byte has gone to the client. Each may be the next victim of a
    request that kills engines; as many again in place of ones that weren't reached, which saw nothing."""
    remembered_responses: NonNegativeInt = 50_000
    """Responses (`/v1/responses`) of which it is remembered which instance keeps them. Of others the
    instances are asked."""
    max_sessions: NonNegativeInt = 1000
    """WebSocket sessions (`/v1/realtime`) at once; one more is refused with 503."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins whose pages may call the proxied paths and `/v1/models`, like `https://app.example.org`; `*`
    for any. Without any, what engines say of origins passes."""
