"""`RequestRecord`: what was predicted, chosen and delivered for one request.

Written by the data plane from arrival to last byte, read by the metrics, the decision log and the
log line of the request. Times are seconds of the process's monotonic clock.
"""

import msgspec

from balancer.core.reliability.standings import Attempt
from balancer.core.routing.plan import RoutePlan


class LegRecord(msgspec.Struct, kw_only=True):
    """One attempt at one leg."""

    kind: str
    """`prefill`, `decode` (also where one rank does both), `forward` (handed whole to one) or `encode`."""
    alias: str
    overlap_tokens: int | None
    """Predicted at routing time; None if the prompt could not be scored."""
    started_s: float
    first_byte_s: float | None = None
    first_token_s: float | None = None
    """Of a stream that passed us: later than its first byte if that was an empty opening."""
    ended_s: float | None = None
    status: int | None = None
    """Of its answer; of a stream not before its first bytes."""
    error: str | None = None
    """Code of the error that ended it."""
    rank: int | None = None
    held_tokens: int | None = None
    """What of the overlap events vouch for; the rest is believed to be on its way."""
    block_size: int | None = None
    trust: str | None = None
    """Of the rank's entries in the index, at routing time."""
    trust_reason: str | None = None
    """Why it isn't exact, where that isn't the stream's doing."""
    outcome: str | None = None
    """How the engine's figure compares with the index's: `exact`, `over`, `under`, or why it can't
    be compared; None if nobody compared."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """As the engine reported it; None: unknown, which is not 0."""
    completion_tokens: int | None = None
    prompt_details: bytes | None = None
    """Of a prefill leg: `usage.prompt_tokens_details` as JSON; None if there was no usage."""
    reason: str | None = None
    """Why this instance, of an encode leg: `affinity`, `least_loaded`, `only_one`."""
    attempt: Attempt | None = None
    """What it counts for in its instance's standing."""

    @property
    def computed_s(self) -> float | None:
        """When its prompt was computed, as far as a stream or a prefill leg shows."""
        return self.first_byte_s if self.first_token_s is None else self.first_token_s

    @property
    def inter_token_s(self) -> float | None:
        """Mean pause between two of its tokens, if it streamed two and ended well."""
        tokens, computed_s = self.completion_tokens or 0, self.computed_s
        if tokens < 2 or self.error is not None or computed_s is None or self.ended_s is None:
            return None
        return (self.ended_s - computed_s) / (tokens - 1)


class EncodeRecord(msgspec.Struct, kw_only=True):
    """What became of the images, audio and video of one request."""

    items: int
    encoded: int = 0
    """By legs of this request, each item once however often it stands there."""
    reused: int = 0
    """Encoded for an earlier request and counted on."""
    local: int = 0
    """Left to the engine that computes the prompt, because no encode instance could."""
    instances: list[str] = msgspec.field(default_factory=list)
    """Aliases of those that have what this request needs."""
    problem: str = "encode_failed"
    """Why some are local, if they are; `no_encode_instance`: none was available, `no_address`: the
    decode instance that computes the prompt is none that others push to."""

    @property
    def reason(self) -> str:
        """A header value."""
        if self.local:
            return self.problem
        return "encoded" if self.encoded else "reused"


class RequestRecord(msgspec.Struct, kw_only=True):
    """One client request. `cached_tokens` is None if no engine reported it."""

    request_id: str
    path: str
    arrived_s: float
    model: str = ""
    base_model: str | None = None
    stream: bool = False
    prompt_tokens: int | None = None
    prompt_source: str = "none"
    unscorable: str | None = None
    available_tokens: int | None = None
    """Largest overlap that any candidate had."""
    chosen_tokens: int | None = None
    """Overlap of the rank that prefilled (the prefill leg's, or the decode leg's if skipped)."""
    plan: RoutePlan | None = None
    encode: EncodeRecord | None = None
    """None: it has nothing to encode, or the fleet has no encode instance of its model."""
    legs: list[LegRecord] = msgspec.field(default_factory=list)
    status: int | None = None
    error: str | None = None
    first_byte_s: float | None = None
    ended_s: float | None = None
    waited_s: float | None = None
    """In the line for room on any rank; None: it was decided at once."""
    retries: int = 0
    """Further attempts that were made for it."""
    is_trying_again: bool = False
    """The next leg is one."""
    retries_refused: int = 0
    """Others that the budget of retries didn't allow."""

    @property
    def prefill_leg(self) -> LegRecord | None:
        """The prefill leg that succeeded, if one ran."""
        for leg in reversed(self.legs):
            if leg.kind == "prefill" and leg.error is None:
                return leg
        return None

    @property
    def counted_otherwise(self) -> bool:
        """An engine has counted other prompt tokens than were found for it."""
        told = {leg.prompt_tokens for leg in self.legs} - {None}
        return self.prompt_tokens is not None and bool(told - {self.prompt_tokens})

    @property
    def cached_tokens(self) -> int | None:
        """What the cache really saved: the prefill leg's figure, else the decode leg's.

        With a transfer the decode engine counts what it was sent as cached (field report F35).
        """
        legs = self.legs
        if len(legs) == 1:
            return legs[0].cached_tokens
        leg = self.prefill_leg or (legs[-1] if legs else None)
        return leg.cached_tokens if leg else None
