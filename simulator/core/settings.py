"""What a simulated engine is started with: the counterpart of `vllm serve` flags.

`version` decides everything that changed between releases: event encoding, replay framing, the
fields of `kv_transfer_params`, the hash seed, which metrics and endpoints exist.
"""

import re
from typing import Literal

import msgspec

from simulator.core.errors import SettingsError

ConnectorName = Literal[
    "example", "lmcache", "mooncake", "moriio", "nixl", "nixl_push", "offloading", "p2p_nccl"
]

EncoderConnectorName = Literal["example", "cpu", "mooncake"]

Version = tuple[int, int, int]
"""A release as (major, minor, patch); compares as releases do."""

_LARGEST_DEFAULT_CONTEXT_TOKENS = 32_768


def parse_version(text: str) -> Version:
    """Read `0.33` or `0.10.2` or `0.32.0+cpu`."""
    match = re.match(r"^(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise SettingsError(f"version: {text!r} is not a release like 0.33 or 0.10.2")
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one simulated engine behaves; every rank of it has its own `num_blocks`."""

    model: str = "sim"
    adapters: tuple[str, ...] = ()
    version: str = "0.33.0"
    block_size: int = 16
    num_blocks: int = 4096
    max_model_len: int | None = None
    """Tokens of prompt and answer; None is what the cache holds, at most 32,768."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_queued_requests: int | None = None
    """Requests in the engine, waiting or running, over all ranks; more are refused with 503."""
    prefill_tokens_per_s: float = 20_000.0
    inter_token_ms: float = 10.0
    """Length of a step that computes no prompt; also the fixed cost of one that does."""
    transfer_tokens_per_s: float = 200_000.0
    transfer_latency_ms: float = 2.0
    kv_lease_s: float = 30.0
    kv_connector: ConnectorName | None = None
    """Without one, `kv_transfer_params` are ignored."""
    bidirectional: bool = False
    """NIXL: a decode engine keeps its blocks for the next turn's prefill."""
    decoder_kv_blocks_ttl_s: float = 480.0
    transfer_abort_s: float = 480.0
    """How long one side waits for the other where they find each other by name."""
    reads: bool = False
    """MoRI-IO's `read_mode`."""
    randomizes_ids: bool = True
    """False is `VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1`."""
    multimodal: bool = False
    """It takes images, audio and video. So does an engine with an encoder connector."""
    ec_connector: EncoderConnectorName | None = None
    """Without one, `ec_transfer_params` are ignored."""
    encode_ms: float = 20.0
    """One item in the encoder; the next waits."""
    encoder_cache_items: int = 256
    ec_cpu_items: int = 1024
    """What an encode engine keeps for others."""
    ec_push_wait_s: float = 60.0
    """Mooncake: how long a consumer waits for what is pushed to it."""
    dp_size: int = 1
    api_key: str | None = None
    hash_seed: str | None = None
    """Fixes the block hashes; None is fixed from 0.29 on and random per process before."""
    int_hashes: bool = True
    events: bool = True
    replay: bool = True
    topic: str = "kv-events"
    buffer_steps: int = 10_000
    prefix_caching: bool = True
    """Without it nothing is looked up, and there is nothing to publish."""
    prompt_tokens_details: bool = True
    """`--enable-prompt-tokens-details`: answers say how many tokens were cached."""
    force_include_usage: bool = False
    """`--enable-force-include-usage`: every event of a stream tells usage, and so does one at its end."""
    hash_algorithm: Literal["sha256", "xxhash"] = "sha256"
    """Only its name and its seed: xxhash is random per process in every release unless fixed."""
    kv_offloading: bool = False
    """Says that it has an offload tier; nothing is offloaded."""
    events_host: str = "*"
    """Host of the configured event endpoint. Another one than `*` makes the publisher connect."""
    replay_distance: int | None = None
    """Replay port minus event port; None: far away. With ranks it can be too small: the rank that
    finds its port taken publishes nothing (vLLM would not start)."""
    side_channel_host: str | None = None
    """`VLLM_NIXL_SIDE_CHANNEL_HOST`; another one than its own makes it unreachable for others."""
    responses_store: bool = False
    """`VLLM_ENABLE_RESPONSES_API_STORE=1`: answers of the Responses API are kept."""
    scale_out: bool = False
    """`--enable-scale-out`: it renders, and takes token ids."""
    tokenizer_info: bool = False
    """`--enable-tokenizer-info-endpoint`."""
    serves: Literal["generate", "pooling", "transcription"] = "generate"
    """What kind of model it is, which decides about its paths."""
    hides_errors: bool = False
    """What a request is refused with comes inside a 200, as from wrappers around engines."""
    keep_alive_s: int = 5
    """`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`."""

    def __post_init__(self) -> None:
        parse_version(self.version)
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name}: must be greater than 0, is {getattr(self, name)}")
        for name in ("inter_token_ms", "transfer_latency_ms", "encode_ms"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name}: must not be negative, is {getattr(self, name)}")
        if self.num_blocks < 2:
            raise SettingsError("num_blocks: one block is always set aside, so at least 2")
        if self.max_model_len is not None and not 0 < self.max_model_len <= self.cache_tokens:
            raise SettingsError(
                f"max_model_len: {self.max_model_len} doesn't fit the cache, "
                f"which holds {self.cache_tokens} tokens"
            )

    @property
    def release(self) -> Version:
        return parse_version(self.version)

    def of_encoder(self) -> "EngineSettings":
        """Of an encode engine beside such ones: no KV cache worth the name, and one rank."""
        return msgspec.structs.replace(
            self,
            kv_connector=None,
            events=False,
            prefix_caching=False,
            dp_size=1,
            ec_connector=self.ec_connector or "example",
        )

    @property
    def takes_media(self) -> bool:
        return self.multimodal or self.ec_connector is not None

    @property
    def cache_tokens(self) -> int:
        """Tokens that fit the cache of one rank; block 0 is a placeholder, as in vLLM."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def context_tokens(self) -> int:
        """The longest prompt plus answer."""
        if self.max_model_len is not None:
            return self.max_model_len
        return min(self.cache_tokens, _LARGEST_DEFAULT_CONTEXT_TOKENS)


_POSITIVE = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_tokens_per_s",
    "transfer_tokens_per_s",
    "kv_lease_s",
    "decoder_kv_blocks_ttl_s",
    "transfer_abort_s",
    "encoder_cache_items",
    "ec_cpu_items",
    "ec_push_wait_s",
    "dp_size",
    "buffer_steps",
    "keep_alive_s",
)
