"""Reads the size of an engine's KV cache out of its metrics.

Rules:

1. `vllm:cache_config_info` has every setting as a label; `num_gpu_blocks` is the sum over the
   engine's data-parallel ranks. Anything missing or not a number: the size isn't known.
2. For hybrid models blocks times block size is only about the tokens that fit.

Cost: one search through the text.
"""

import re

_LINE = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="(\d+)"')


def parse_cache_tokens(metrics: str) -> int | None:
    """Tokens that fit the KV caches of all ranks together; None: the engine doesn't say."""
    line = _LINE.search(metrics)
    if line is None:
        return None
    labels = dict(_LABEL.findall(line[1]))
    tokens = int(labels.get("num_gpu_blocks", 0)) * int(labels.get("block_size", 0))
    return tokens or None
