"""Everything a block can be, from encoded events over ZMQ to the routing decision."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from time import monotonic
from typing import Any

import msgspec
import pytest

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.plan import Candidate
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import RoutingSettings
from balancer.routing.router import Router
from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId, Tier, Trust

SIZE = 16
E0, E1 = "http://e0:8000", "http://e1:8000"
R0, R1 = RankId(InstanceId(E0), 0), RankId(InstanceId(E1), 0)
MODELS = ServedModels(
    base="tiny", aliases=frozenset({"tiny"}), adapters=frozenset({"ad1", "ad2"}), cards=()
)
FULL: dict[str, Any] = {"kv_cache_spec_kind": "full_attention"}


class Bench:
    """Two engines, an indexer that follows them, and a router that reads what it wrote."""

    def __init__(self, engines: Sequence[Any], service: Any, index: Any, ranks: int) -> None:
        self.engines = engines
        self.service = service
        self._router = Router(
            index=index,
            ledger=LocalLedger(monotonic),
            policy=named_policy("kvlb"),
            settings=RoutingSettings(lookup_timeout_s=5.0),
            random=Random(1).random,  # noqa: S311 - a test's dice
            clock=monotonic,
        )
        self._fleet = Fleet(
            instances=tuple(
                Instance(
                    id=InstanceId(url),
                    alias=url[7:9],
                    models=MODELS,
                    ranks=tuple(range(4, 4 + ranks)) if ranks > 1 else (0,),
                    rank_base=4 if ranks > 1 else 0,
                    healthy=True,
                )
                for url in (E0, E1)
            )
        )

    async def publish(self, *events: Any, on: int = 0) -> None:
        """Let one engine publish a batch, and wait until the index has it."""
        seq = self.engines[on].publish(*events)
        await self.service.caught_up((R0, R1)[on], seq)

    def trust(self, on: int = 0) -> Trust:
        trust: Trust = self.service.rank_status((R0, R1)[on]).trust
        return trust

    async def ask(
        self,
        tokens: Sequence[int],
        *,
        lora: str | None = None,
        salt: str | None = None,
        creditable_tokens: int | None = None,
    ) -> tuple[RankId, Mapping[RankId, Candidate]]:
        """The rank a prompt would go to, and every candidate."""
        request = GenerateRequest(
            request_id="r",
            endpoint=Endpoint.COMPLETIONS,
            body={},
            raw_body=b"{}",
            headers=(),
            model=lora or "tiny",
            base_model="tiny",
            lora=lora,
        )
        namespace = Namespace(model="tiny", lora=lora, cache_salt=salt)
        prompt = Prompt(namespace, tokens, creditable_tokens=creditable_tokens)
        plan = await self._router.explain(
            self._fleet, request, PromptView(prompts=(prompt,), source="ids")
        )
        considered = {each.candidate.rank: each.candidate for each in plan.considered}
        return plan.decode.candidate.rank, considered

    async def overlap(self, tokens: Sequence[int], rank: RankId = R0, **more: Any) -> int:
        """Tokens that `rank` is credited with; whoever is credited with most is chosen."""
        chosen, candidates = await self.ask(tokens, **more)
        most = max(each.overlap_tokens for each in candidates.values())
        assert candidates[chosen].overlap_tokens == most
        return candidates[rank].overlap_tokens


Benching = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def benching(publishing: Any, indexing: Any) -> Benching:
    """Make a bench that works inside `async with`."""

    @asynccontextmanager
    async def run(**settings: Any) -> AsyncIterator[Bench]:
        async with publishing() as first, publishing() as second:
            sources = [
                InstanceSource(
                    url=url, events=each.events, replay=each.replay, model="tiny", ranks=1
                )
                for url, each in ((E0, first), (E1, second))
            ]
            async with indexing(*sources, **settings) as (service, index):
                for rank, each in ((R0, first), (R1, second)):
                    await each.subscribed()
                    await service.until(rank, lambda now: now.trust is Trust.EXACT)
                yield Bench((first, second), service, index, ranks=1)

    return run


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def stored(
    *hashes: int | bytes,
    parent: int | bytes | None = None,
    first: int = 0,
    size: int = SIZE,
    **more: Any,
) -> dict[str, Any]:
    """Blocks number `first` and on of the prompt 0, 1, 2, ..."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": tokens(len(hashes) * size, first * size),
        "block_size": size,
        "medium": "GPU",
        **more,
    }


def copied(*hashes: int, medium: str) -> dict[str, Any]:
    """A placeholder: a copy of known blocks, without tokens."""
    return stored(*hashes, token_ids=[], block_size=0, medium=medium)


def removed(*hashes: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


async def test_clear_empties_one_instance(benching: Benching) -> None:
    """F03: E0's rows are gone, E1 keeps what it holds of the same blocks."""
    async with benching() as bench:
        for number in (0, 1):
            await bench.publish(stored(*range(1, 11)), on=number)
        assert await bench.overlap(tokens(200)) == 160

        await bench.publish({"type": "AllBlocksCleared"})
        assert await bench.overlap(tokens(200)) == 0
        assert await bench.overlap(tokens(200), R1) == 160


async def test_copies_are_counted(benching: Benching) -> None:
    """F04: held, then gone, then a no-op; a clear resets the count."""
    async with benching() as bench:
        await bench.publish(stored(1), stored(1), removed(1))
        assert await bench.overlap(tokens(20)) == 16

        await bench.publish(removed(1))
        assert await bench.overlap(tokens(20)) == 0

        await bench.publish(removed(1), stored(1), {"type": "AllBlocksCleared"}, stored(1))
        await bench.publish(removed(1))
        assert await bench.overlap(tokens(20)) == 0


async def test_overlap_is_the_unbroken_run(benching: Benching) -> None:
    """F18: blocks 0, 2, 3 of four are an overlap of one; 1 to 3 of none."""
    async with benching() as bench:
        for number, hole in ((0, 2), (1, 1)):
            await bench.publish(stored(1, 2, 3, 4), on=number)
            await bench.publish(removed(hole), on=number)

        assert await bench.overlap(tokens(65)) == 16
        assert await bench.overlap(tokens(65), R1) == 0


async def test_salts_are_tenants(benching: Benching) -> None:
    """F08: only the salt that stored it is credited."""
    async with benching() as bench:
        await bench.publish(stored(1, 2, extra_keys=[["a"], None]))

        assert await bench.overlap(tokens(40), salt="a") == 32
        assert await bench.overlap(tokens(40), salt="b") == 0
        assert await bench.overlap(tokens(40)) == 0


async def test_adapters_are_apart(benching: Benching) -> None:
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


async def test_reloaded_adapter_inherits_nothing(benching: Benching) -> None:
    """F10: rows of id 1 give no credit once id 2 has been seen, and leave the index."""
    async with benching() as bench:
        await bench.publish(stored(1, 2, lora_name="ad1", lora_id=1))
        assert await bench.overlap(tokens(40), lora="ad1") == 32

        await bench.publish(stored(9, first=50, lora_name="ad1", lora_id=2))
        await bench.service.measure()

        assert await bench.overlap(tokens(40), lora="ad1") == 0
        assert bench.service.index_size.entries == 1
        assert bench.trust() is Trust.EXACT


async def test_offloaded_copy_keeps_the_block_and_costs_its_loading(benching: Benching) -> None:
    """F17: h1 on GPU and CPU; h9 counted and ignored; unknown mediums are accepted."""
    async with benching() as bench:
        await bench.publish(stored(1, 2), copied(1, medium="CPU"), copied(9, medium="CPU_PINNED"))
        await bench.publish(copied(2, medium="HOLOGRAM"), removed(2), removed(1))

        _, candidates = await bench.ask(tokens(40))
        assert candidates[R0].tokens_by_tier == {Tier.CPU: 16, Tier.STORAGE: 16}
        assert candidates[R0].loading_tokens == pytest.approx(16 * 0.1 + 16 * 0.4)
        assert bench.trust() is Trust.EXACT


async def test_gpu_beats_cpu_and_cpu_beats_nothing(benching: Benching) -> None:
    """Loading is cheaper than computing, and dearer than having."""
    async with benching() as bench:
        await bench.publish(stored(*range(1, 65)), copied(*range(1, 65), medium="CPU"))
        await bench.publish(removed(*range(64, 0, -1)))
        prompt = tokens(65 * SIZE)
        assert (await bench.ask(prompt))[0] == R0

        await bench.publish(stored(*range(1, 65)), on=1)
        assert (await bench.ask(prompt))[0] == R1


async def test_chunks_of_lmcache_stand_beside_the_gpus_blocks(benching: Benching) -> None:
    """Other hashes, other lengths: a tier of the same prompt, not another group."""
    async with benching() as bench:
        await bench.publish(stored(1, 2), stored(901, 902, size=256, medium="cpu"))
        await bench.publish(stored(903, parent=902, first=2, size=256, medium="cpu"))

        _, candidates = await bench.ask(tokens(1000))
        assert candidates[R0].tokens_by_tier == {Tier.GPU: 32, Tier.CPU: 736}
        assert candidates[R0].block_size == SIZE
        assert bench.trust() is Trust.EXACT


async def test_copies_in_mooncake_leave_by_age(benching: Benching) -> None:
    """The engine's hashes, no tokens, and never a removal."""
    async with benching(store_only_ttl_s=60.0) as bench:
        await bench.publish(stored(1, 2), copied(1, 2, medium="cpu"))
        await bench.publish(removed(2), removed(1))
        assert await bench.overlap(tokens(40)) == 32

        bench.engines[0].ts += 61.0
        await bench.publish(stored(9, first=50))

        assert await bench.overlap(tokens(40)) == 0


async def test_image_ends_the_credit(benching: Benching) -> None:
    """F11: whatever the picture, its placeholders are the same tokens; only text before it counts."""
    async with benching() as bench:
        await bench.publish(
            stored(1, 2, 3, 4, extra_keys=[None, None, [["img1", 5]], [["img1", -11]]])
        )

        assert await bench.overlap(tokens(64), creditable_tokens=37) == 32
        assert await bench.overlap(tokens(64)) == 32


async def test_prompt_embeds_match_no_text(benching: Benching) -> None:
    """The digest of the embeddings belongs to its block."""
    async with benching() as bench:
        await bench.publish(stored(1, 2, extra_keys=[None, [b"\x01" * 32]]))

        assert await bench.overlap(tokens(40)) == 16


@pytest.mark.parametrize(("first", "second"), [(32, 16), (768, 16), (48, 32), (1, 128)])
async def test_each_rank_has_its_own_block_size(
    benching: Benching, first: int, second: int
) -> None:
    """F13, F14: sizes come from events, also such as don't divide each other."""
    length = 2304
    async with benching() as bench:
        await bench.publish(stored(*range(1, length // first + 1), size=first))
        prompt = tokens(length + 1)
        assert await bench.overlap(prompt) == length

        await bench.publish(stored(*range(1, 2 * (length // second) + 1), size=second), on=1)

        assert await bench.overlap(prompt) == length
        assert await bench.overlap(prompt, R1) == length
        assert (await bench.ask(tokens(2 * length)))[0] == R1


async def test_block_size_that_changes_within_a_group_is_refused(benching: Benching) -> None:
    """One group has one size; the event that says otherwise costs itself and is shown."""
    async with benching() as bench:
        await bench.publish(stored(1, 2), stored(7, size=32, first=4))

        assert await bench.overlap(tokens(40)) == 32
        assert bench.trust() is Trust.DEGRADED


async def test_hybrid_groups_agree_on_a_hit(benching: Benching) -> None:
    """Full attention reaches further than the window and the state: they decide."""
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 33,
    }
    mamba: dict[str, Any] = {"group_idx": 2, "kv_cache_spec_kind": "mamba"}
    masked: dict[str, Any] = {"token_ids": tokens(128), "parent_block_hash": None}
    async with benching() as bench:
        # Sparse retention: of eight blocks the window keeps four, the states only checkpoints.
        await bench.publish(
            stored(3, 4, 7, 8, **{**window, **masked}),
            stored(4, 8, **{**mamba, **masked}),
            stored(*range(1, 9), group_idx=0, **FULL),
        )
        assert await bench.overlap(tokens(129)) == 128
        assert await bench.overlap(tokens(113)) == 64

        await bench.publish(removed(8, group_idx=2))
        assert await bench.overlap(tokens(129)) == 64

        await bench.publish(removed(3, group_idx=1))
        assert await bench.overlap(tokens(129)) == 0
        assert bench.trust() is Trust.EXACT


@pytest.mark.parametrize(
    ("announced", "taken_back"),
    [
        pytest.param(-1, 2**64 - 1, id="signed-then-unsigned"),
        pytest.param(2**64 - 1, -1, id="unsigned-then-signed"),
        pytest.param(b"\x07" * 24 + b"\xff" * 8, -1, id="bytes-then-signed"),
        pytest.param(5, b"\x07" * 24 + b"\x00" * 7 + b"\x05", id="unsigned-then-bytes"),
    ],
)
async def test_hash_forms_meet(benching: Benching, announced: Any, taken_back: Any) -> None:
    """F07: stored in one form, removed in another."""
    async with benching() as bench:
        await bench.publish(stored(announced))
        assert await bench.overlap(tokens(40)) == 16

        await bench.publish(removed(taken_back))
        assert await bench.overlap(tokens(40)) == 0


async def test_global_ranks_are_addressed_by_their_local_index(
    publishing: Any, indexing: Any
) -> None:
    """The second node of a data-parallel group: events say 4 and 5, its header wants 0 and 1."""
    async with publishing() as first, publishing() as second, publishing() as other:
        rank4, rank5 = (RankId(InstanceId(E0), number) for number in (4, 5))
        sources = [
            InstanceSource(
                url=E0,
                events=_at(first.events, -4),
                replay=_at(first.replay, -4),
                model="tiny",
                ranks=1,
                rank_base=4,
            ),
        ]
        async with indexing(*sources) as (service, index):
            await first.subscribed()
            await service.until(rank4, lambda now: now.trust is Trust.EXACT)
            payload = msgspec.msgpack.encode([2000.0, [stored(1, 2)], 4])
            first.publish_payload(payload)
            status = await service.caught_up(rank4, 0)
            assert status.counts.wrong_rank == 0

            bench = Bench((first, second, other), service, index, ranks=2)
            chosen, candidates = await bench.ask(tokens(40))

        assert chosen == rank4
        assert candidates[rank5].overlap_tokens == 0
        instance = candidates[rank4].instance
        assert [instance.rank_header(each) for each in (4, 5)] == ["0", "1"]


def _at(endpoint: str, ports: int) -> str:
    """Rank r is found r ports after the configured one."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + ports}"
