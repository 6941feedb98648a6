"""One request inside the engine: its tokens, its blocks, how far it has been computed.

Invariants: `computed` tokens have KV; of `blocks` the first `registered` are full and announced;
`hashes` covers the full blocks of `tokens` as far as anybody asked. The token sampled last has no
KV yet, so `computed < len(tokens)` holds between steps.
"""

import hashlib
import math
from array import array

from simulator.core.types import EngineRequest


class LiveRequest:
    """The changing state of an `EngineRequest`."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "computed",
        "external_tokens",
        "hashes",
        "heartbeat_due_s",
        "is_corrupt",
        "is_loaded",
        "is_recomputing",
        "load_until_s",
        "loaded_tokens",
        "preemptions",
        "prompt_tokens",
        "registered",
        "remote",
        "request",
        "tokens",
        "waits_until_s",
    )

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.tokens = array("I", request.prompt_token_ids)
        self.prompt_tokens = len(self.tokens)
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.registered = 0
        self.computed = 0
        self.cached_tokens: int | None = None
        self.external_tokens = 0
        self.preemptions = 0
        self.remote = request.remote
        self.load_until_s = math.inf
        self.loaded_tokens = 0
        self.waits_until_s: float | None = None
        self.heartbeat_due_s = math.inf
        self.is_loaded = False
        self.is_recomputing = False
        self.is_corrupt = False

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def next_token(self) -> int:
        """Return what the request generates next."""
        request = self.request
        index = self.generated_tokens
        if self.is_corrupt:
            return ord("#")
        may_end = not request.ignore_eos and index >= request.min_tokens
        return request.sampler.token_at(index, may_end=may_end)

    def extra_keys(self, block_index: int) -> tuple[str, ...] | None:
        """What beside tokens makes a block's content: the adapter, on block 0 also the salt."""
        request = self.request
        keys = () if request.lora_name is None else (request.lora_name,)
        if block_index == 0 and request.cache_salt is not None:
            keys = (*keys, request.cache_salt)
        return keys or None

    def extend_hashes(self, full_blocks: int, block_size: int, none_hash: bytes) -> None:
        """Hash blocks until `full_blocks` of them have a hash."""
        parent = self.hashes[-1] if self.hashes else none_hash
        for index in range(len(self.hashes), full_blocks):
            start = index * block_size
            digest = hashlib.blake2b(parent, digest_size=32)
            digest.update(self.tokens[start : start + block_size].tobytes())
            keys = self.extra_keys(index)
            if keys is not None:
                # The length keeps a salt from passing for tokens, or two keys for one.
                digest.update(repr((keys, self.request.lora_hashed)).encode())
            parent = digest.digest()
            self.hashes.append(parent)
