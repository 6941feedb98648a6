"""Each router and policy that is measured, and how it is started.

Routers that follow events are asked with token ids, as events name blocks. Those that go by text are asked
with text that makes the same blocks: a byte is a token of a simulated engine. Sessions are sent in
`X-Session-ID`, which consistent_hash goes by.
"""

from collections.abc import Sequence

from benchmarks.overhead import peers
from benchmarks.overhead.proxies import (
    Proxy,
    kvlb,
    needs_peer,
    sglang_router,
    vllm_router,
)

OURS = "kvlb"
SESSION_HEADER = "X-Session-ID"
TUNED = (
    *("--cache-threshold", "0.1"),
    *("--balance-abs-threshold", "8", "--balance-rel-threshold", "1.2"),
)
"""For fleets with tens of requests per engine in flight: the default spreads load from 64 more than
the least loaded on, which such engines never reach."""


def routers(model: str, block_size: int) -> Sequence[Proxy]:
    """All of them, for engines that serve `model` in such blocks."""
    vllm, sglang = (f"{name} {peers.VERSIONS[name]}" for name in ("vllm-router", "sglang-router"))

    def of_vllm(name: str, policy: str, *options: str) -> Proxy:
        return Proxy(
            name=f"{vllm}, {name}",
            takes_ids=policy != "cache_aware",
            command=vllm_router(policy, *options, model=model, block_size=block_size),
            missing=needs_peer("vllm-router"),
        )

    return (
        Proxy(name=OURS, command=kvlb("kvlb"), ready="/ready"),
        of_vllm("kv_aware", "kv_aware"),
        of_vllm("cache_aware", "cache_aware"),
        of_vllm("cache_aware tuned", "cache_aware", *TUNED),
        of_vllm("consistent_hash", "consistent_hash"),
        Proxy(
            name=f"{sglang}, cache_aware",
            command=sglang_router("cache_aware"),
            takes_ids=False,
            ready="/readiness",
            missing=needs_peer("sglang-router"),
        ),
        of_vllm("round_robin", "round_robin"),
    )
