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
    block_ids: tuple[int, ...]
    prefill_cached_tokens: int | None


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
