"""Values that go into and come out of the engine core."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

TokenArray: TypeAlias = "array[int]"
"""Token ids, four bytes each."""

FinishReason = Literal["stop", "length", "error"]


class Sampler(Protocol):
    """What a request generates, decided without a model."""

    def token_at(self, index: int, *, may_end: bool) -> int:
        """Return the `index`-th generated token; `may_end` allows the end-of-text token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefill:
    """Where the blocks of a prompt wait: what `kv_transfer_params` said."""

    engine_id: str
    request_id: str | None
    """Or whatever else names the blocks there: a transfer, an id without its random end."""
    block_ids: tuple[int, ...]
    prefill_cached_tokens: int | None
    num_tokens: int | None = None
    """Leading prompt tokens that are to be had; None: all."""
    waits_s: float | None = None
    """The blocks may be still to come, for so long; None: they are there or will never be."""
    probes: bool = False
    """What the other engine happens to have cached, as far as it has it."""
    is_shared: bool = False
    """They lie in a storage that both engines use."""
    is_foreign: bool = False
    """They were computed for another adapter or tenant, which their name doesn't tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What becomes of a finished request's blocks."""

    key: str | None = None
    """What the other side asks for; None: the request's id."""
    reasons: frozenset[str] = frozenset({"stop", "length"})
    """How the request has to end."""
    lease_s: float | None = None
    """None: the engine's usual one."""
    tells: Literal["pull", "push", "decode", "read"] | None = "pull"
    """What the answer's parameters say; None: there are none."""
    copies: bool = False
    """The blocks are copied out of the cache instead of being held in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to compute."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampler: Sampler
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    lora_name: str | None = None
    lora_id: int | None = None
    lora_hashed: str | None = None
    """What of the adapter, beside its name, goes into block hashes and into no event."""
    cache_salt: str | None = None
    session_id: str | None = None
    reads_cache: bool = True
    """False for requests that need every position computed, as `prompt_logprobs` does."""
    reports_full: bool = False
    """`kv_cache_report_mode` full: announce the reused prefix again."""
    keeps_blocks: bool = False
    """`do_remote_decode`: keep the blocks for a decode engine to read."""
    keep: Keep | None = None
    """The same where it isn't NIXL's pull."""
    remote: RemotePrefill | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """What one step brought for one request."""

    request_id: str
    token_id: int | None
    cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    transfer_params: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Physical blocks were filled; `parent` is None where the first is block 0."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: list[int]
    block_size: int
    extra_keys: tuple[tuple[str, ...] | None, ...]
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One physical block was taken for something else."""

    hash: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was forgotten."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step: everything in it becomes true `duration_s` after its start."""

    duration_s: float
    outputs: list[TokenOutput]
    events: list[KvEvent]
    scheduled_tokens: int
    wake_s: float | None
    """When nothing could be scheduled: the time before which another step brings nothing new."""
