"""What a block can be, from encoded events over ZMQ to the routing decision: copies, tenants, tiers, images."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from indexer.core.types import InstanceId, RankId, Tier, Trust

Benching = Callable[..., AbstractAsyncContextManager[Any]]
Event = Callable[..., dict[str, Any]]
Tokens = Callable[..., list[int]]

SIZE = 16
E0, E1 = "http://e0:8000", "http://e1:8000"
R0, R1 = RankId(InstanceId(E0), 0), RankId(InstanceId(E1), 0)


async def test_clear_empties_one_instance(
    benching: Benching, tokens: Tokens, stored: Event
) -> None:
    """F03: E0's rows are gone, E1 keeps what it holds of the same blocks."""
    async with benching() as bench:
        for number in (0, 1):
            await bench.publish(stored(*range(1, 11)), on=number)
        assert await bench.overlap(tokens(200)) == 160

        await bench.publish({"type": "AllBlocksCleared"})
        assert await bench.overlap(tokens(200)) == 0
        assert await bench.overlap(tokens(200), R1) == 160


async def test_copies_are_counted(
    benching: Benching, tokens: Tokens, stored: Event, removed: Event
) -> None:
    """F04: held, then gone, then a no-op; a clear resets the count."""
    async with benching() as bench:
        await bench.publish(stored(1), stored(1), removed(1))
        assert await bench.overlap(tokens(20)) == 16

        await bench.publish(removed(1))
        assert await bench.overlap(tokens(20)) == 0

        await bench.publish(removed(1), stored(1), {"type": "AllBlocksCleared"}, stored(1))
        await bench.publish(removed(1))
        assert await bench.overlap(tokens(20)) == 0


async def test_overlap_is_the_unbroken_run(
    benching: Benching, tokens: Tokens, stored: Event, removed: Event
) -> None:
    """F18: blocks 0, 2, 3 of four are an overlap of one; 1 to 3 of none."""
    async with benching() as bench:
        for number, hole in ((0, 2), (1, 1)):
            await bench.publish(stored(1, 2, 3, 4), on=number)
            await bench.publish(removed(hole), on=number)

        assert await bench.overlap(tokens(65)) == 16
        assert await bench.overlap(tokens(65), R1) == 0


async def test_salts_are_tenants(benching: Benching, tokens: Tokens, stored: Event) -> None:
    """F08: only the salt that stored it is credited."""
    async with benching() as bench:
        await bench.publish(stored(1, 2, extra_keys=[["a"], None]))

        assert await bench.overlap(tokens(40), salt="a") == 32
        assert await bench.overlap(tokens(40), salt="b") == 0
        assert await bench.overlap(tokens(40)) == 0


async def test_adapters_are_apart(benching: Benching, tokens: Tokens, stored: Event) -> None:
    """F09: the name in the extra keys is the adapter; a salt behind it still counts."""
    async with benching() as bench:
        adapter: dict[str, Any] = {"lora_name": "ad1", "lora_id": 1}
        await bench.publish(
            stored(1, 2, extra_keys=[["ad1"], ["ad1"]], **adapter),
            stored(3, extra_keys=[["ad1", "s"]], **adapter),
        )

        assert await bench.overlap(tokens(40), lora="ad1") == 32
        assert await bench.overlap(tokens(40), lora="ad1", salt="s") == 16
        assert await bench.overlap(tokens(40), lora="ad2") == 0
        assert await bench.overlap(tokens(40)) == 0


async def test_reloaded_adapter_inherits_nothing(
    benching: Benching, tokens: Tokens, stored: Event
) -> None:
    """F10: rows of id 1 give no credit once id 2 has been seen, and leave the index."""
    async with benching() as bench:
        await bench.publish(stored(1, 2, lora_name="ad1", lora_id=1))
        assert await bench.overlap(tokens(40), lora="ad1") == 32

        await bench.publish(stored(9, first=50, lora_name="ad1", lora_id=2))
        await bench.service.measure()

        assert await bench.overlap(tokens(40), lora="ad1") == 0
        assert bench.service.index_size.entries == 1
        assert bench.trust() is Trust.EXACT


async def test_offloaded_copy_keeps_the_block_and_costs_its_loading(
    benching: Benching, tokens: Tokens, stored: Event, copied: Event, removed: Event
) -> None:
    """F17: h1 on GPU and CPU; h9 counted and ignored; unknown mediums are accepted."""
    async with benching() as bench:
        await bench.publish(stored(1, 2), copied(1, medium="CPU"), copied(9, medium="CPU_PINNED"))
        await bench.publish(copied(2, medium="HOLOGRAM"), removed(2), removed(1))

        _, candidates = await bench.ask(tokens(40))
        assert candidates[R0].tokens_by_tier == {Tier.CPU: 16, Tier.STORAGE: 16}
        assert candidates[R0].loading_tokens == pytest.approx(16 * 0.1 + 16 * 0.4)
        assert bench.trust() is Trust.EXACT


async def test_gpu_beats_cpu_and_cpu_beats_nothing(
    benching: Benching, tokens: Tokens, stored: Event, copied: Event, removed: Event
) -> None:
    """Loading is cheaper than computing, and dearer than having."""
    async with benching() as bench:
        await bench.publish(stored(*range(1, 65)), copied(*range(1, 65), medium="CPU"))
        await bench.publish(removed(*range(64, 0, -1)))
        prompt = tokens(65 * SIZE)
        assert (await bench.ask(prompt))[0] == R0

        await bench.publish(stored(*range(1, 65)), on=1)
        assert (await bench.ask(prompt))[0] == R1


async def test_chunks_of_lmcache_stand_beside_the_gpus_blocks(
    benching: Benching, tokens: Tokens, stored: Event
) -> None:
    """Other hashes, other lengths: a tier of the same prompt, not another group."""
    async with benching() as bench:
        await bench.publish(stored(1, 2), stored(901, 902, size=256, medium="cpu"))
        await bench.publish(stored(903, parent=902, first=2, size=256, medium="cpu"))

        _, candidates = await bench.ask(tokens(1000))
        assert candidates[R0].tokens_by_tier == {Tier.GPU: 32, Tier.CPU: 736}
        assert candidates[R0].block_size == SIZE
        assert bench.trust() is Trust.EXACT


async def test_copies_in_mooncake_leave_by_age(
    benching: Benching, tokens: Tokens, stored: Event, copied: Event, removed: Event
) -> None:
    """The engine's hashes, no tokens, and never a removal."""
    async with benching(store_only_ttl_s=60.0) as bench:
        await bench.publish(stored(1, 2), copied(1, 2, medium="cpu"))
        await bench.publish(removed(2), removed(1))
        assert await bench.overlap(tokens(40)) == 32

        bench.engines[0].ts += 61.0
        await bench.publish(stored(9, first=50))

        assert await bench.overlap(tokens(40)) == 0


async def test_image_ends_the_credit(benching: Benching, tokens: Tokens, stored: Event) -> None:
    """F11: whatever the picture, its placeholders are the same tokens; only text before it counts."""
    async with benching() as bench:
        await bench.publish(
            stored(1, 2, 3, 4, extra_keys=[None, None, [["img1", 5]], [["img1", -11]]])
        )

        assert await bench.overlap(tokens(64), creditable_tokens=37) == 32
        assert await bench.overlap(tokens(64)) == 32


async def test_prompt_embeds_match_no_text(
    benching: Benching, tokens: Tokens, stored: Event
) -> None:
    """The digest of the embeddings belongs to its block."""
    async with benching() as bench:
        await bench.publish(stored(1, 2, extra_keys=[None, [b"\x01" * 32]]))

        assert await bench.overlap(tokens(40)) == 16


@pytest.mark.parametrize(
    ("announced", "taken_back"),
    [
        pytest.param(-1, 2**64 - 1, id="signed-then-unsigned"),
        pytest.param(2**64 - 1, -1, id="unsigned-then-signed"),
        pytest.param(b"\x07" * 24 + b"\xff" * 8, -1, id="bytes-then-signed"),
        pytest.param(5, b"\x07" * 24 + b"\x00" * 7 + b"\x05", id="unsigned-then-bytes"),
    ],
)
async def test_hash_forms_meet(
    benching: Benching,
    announced: Any,
    taken_back: Any,
    tokens: Tokens,
    stored: Event,
    removed: Event,
) -> None:
    """F07: stored in one form, removed in another."""
    async with benching() as bench:
        await bench.publish(stored(announced))
        assert await bench.overlap(tokens(40)) == 16

        await bench.publish(removed(taken_back))
        assert await bench.overlap(tokens(40)) == 0
