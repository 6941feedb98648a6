"""Prefill on one simulated rank, decode on another, in virtual time."""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.engine import EngineCore
from simulator.core.generation import FixedTokens
from simulator.core.settings import EngineSettings, parse_version
from simulator.core.transfer import Reservations, SideChannel, TransferDirectory
from simulator.core.types import BlockStored, EngineRequest, KvEvent, RemotePrefill, TokenOutput

SETTINGS = EngineSettings(
    block_size=4,
    num_blocks=51,
    transfer_tokens_per_s=1000.0,
    transfer_latency_ms=2.0,
    inter_token_ms=10.0,
)


class Pair:
    """A prefill and a decode rank that know each other, with one clock."""

    def __init__(self, **changes: Any) -> None:
        settings = msgspec.structs.replace(SETTINGS, **changes)
        self.now_s = 0.0
        self.directory = TransferDirectory()
        self.prefill = self._create(settings, "p")
        self.decode = self._create(settings, "d")
        self.directory.enter("p", self.prefill.reservations)
        self.events: list[KvEvent] = []

    def _create(self, settings: EngineSettings, engine_id: str) -> EngineCore:
        return EngineCore(
            settings,
            none_hash=engine_id.encode(),
            channel=SideChannel(engine_id=engine_id, host="host", port=5600),
            directory=self.directory,
        )

    def request(self, prompt_tokens: int, **changes: Any) -> EngineRequest:
        fields: dict[str, Any] = {
            "request_id": "r",
            "prompt_token_ids": range(prompt_tokens),
            "sampler": FixedTokens(range(1000, 1100)),
            "max_tokens": 1,
        }
        return EngineRequest(**(fields | changes))

    def run(self, core: EngineCore, request: EngineRequest) -> list[TokenOutput]:
        core.add(request, self.now_s)
        return self.drain(core)

    def drain(self, core: EngineCore) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while core.has_work:
            result = core.step(self.now_s)
            self.events.extend(result.events)
            outputs.extend(result.outputs)
            if result.scheduled_tokens:
                self.now_s += result.duration_s
            elif core.has_work:
                assert result.wake_s is not None
                self.now_s = max(self.now_s, result.wake_s)
        return outputs

    def run_prefill(self, prompt_tokens: int = 10, **changes: Any) -> Mapping[str, Any]:
        """Run the prefill leg and return its transfer parameters."""
        request = self.request(prompt_tokens, keeps_blocks=True, **changes)
        params = self.run(self.prefill, request)[-1].transfer_params
        assert params is not None
        return params

    def run_decode(
        self, params: Mapping[str, Any], prompt_tokens: int = 10, **changes: Any
    ) -> list[TokenOutput]:
        remote = read(params)
        request = self.request(prompt_tokens, max_tokens=3, **({"remote": remote} | changes))
        return self.run(self.decode, request)


def read(params: Mapping[str, Any]) -> RemotePrefill:
    blocks = params["remote_block_ids"]
    return RemotePrefill(
        engine_id=params["remote_engine_id"],
        request_id=params.get("remote_request_id"),
        block_ids=tuple(blocks[0] if isinstance(blocks[0], list) else blocks),
        prefill_cached_tokens=params.get("remote_prefill_cached_tokens"),
    )


def test_prefill_keeps_its_blocks_and_decode_frees_them() -> None:
    """Blocks are pinned until the decode rank has read them; the answer is the ordinary one."""
    pair = Pair()
    params = pair.run_prefill()
    assert pair.prefill.load().open_reservations == 1
    assert pair.prefill.load().cache_usage == pytest.approx(3 / 50)

    outputs = pair.run_decode(params)

    assert [output.token_id for output in outputs] == [1000, 1001, 1002]
    assert pair.prefill.load().cache_usage == 0
    assert pair.prefill.load().released_reservations == 1


def test_loaded_tokens_count_as_cached_before_0_31() -> None:
    """A decode rank reports all but the last prompt token (F35)."""
    pair = Pair(version="0.30")

    assert pair.run_decode(pair.run_prefill())[-1].cached_tokens == 9


def test_decode_reports_the_prefill_rank_s_figure_since_0_31() -> None:
    """What the prefill leg had cached is forwarded and reported instead."""
    pair = Pair(version="0.31")
    pair.run(pair.prefill, pair.request(10, request_id="warm"))

    assert pair.run_decode(pair.run_prefill())[-1].cached_tokens == 8


def test_loaded_blocks_are_announced_when_they_have_arrived() -> None:
    """Nothing is announced while the transfer runs; then the full blocks, then it decodes."""
    pair = Pair()
    params = pair.run_prefill()
    pair.events.clear()
    pair.decode.add(pair.request(10, remote=read(params)), pair.now_s)
    first = pair.decode.step(pair.now_s)

    assert (first.events, first.scheduled_tokens) == ([], 0)
    assert pair.decode.load().loading == 1
    assert first.wake_s == pytest.approx(pair.now_s + 0.002 + 10 / 1000)
    pair.drain(pair.decode)
    stored = [event for event in pair.events if isinstance(event, BlockStored)]
    assert [len(event.hashes) for event in stored] == [2]
    assert pair.decode.statistics.external_cache_hits_tokens == 9


def test_only_what_decode_lacks_is_transferred() -> None:
    """Blocks the decode rank holds are used; the rest is read."""
    pair = Pair()
    pair.run(pair.decode, pair.request(9, request_id="warm"))
    params = pair.run_prefill()
    pair.run_decode(params)

    assert pair.decode.statistics.external_cache_queries_tokens == 2
    assert pair.decode.statistics.prefix_cache_hits_tokens == 8


def test_unused_reservation_expires_with_its_lease() -> None:
    """If nobody comes, the blocks are free when the lease ends, and it is counted."""
    pair = Pair()
    pair.run_prefill()

    pair.prefill.expire(pair.now_s + 29.9)
    assert pair.prefill.load().open_reservations == 1
    pair.prefill.expire(pair.now_s + 30.0)
    assert pair.prefill.load().expired_reservations == 1
    assert pair.prefill.load().cache_usage == 0


def test_read_after_expiry_goes_unnoticed_but_for_the_text() -> None:
    """The decode rank reads whatever is there: wrong text, counted on both sides."""
    pair = Pair()
    params = pair.run_prefill()
    pair.now_s += 60
    pair.prefill.expire(pair.now_s)

    outputs = pair.run_decode(params)

    assert [output.token_id for output in outputs] == [ord("#")] * 3
    assert pair.prefill.load().reads_after_expiry == 1
    assert pair.decode.statistics.corrupt_reads == 1


def test_another_prompt_than_prefilled_gives_wrong_text() -> None:
    """A decode leg whose prompt was altered reads blocks of something else (F40)."""
    pair = Pair()
    params = pair.run_prefill()

    outputs = pair.run_decode(params, prompt_tokens=11)

    assert outputs[-1].token_id == ord("#")
    assert pair.prefill.load().reads_of_other_prompt == 1


def test_waiting_decode_rank_prolongs_the_lease() -> None:
    """Heartbeats keep the blocks while the request is accepted but not read."""
    pair = Pair(transfer_tokens_per_s=0.1)  # 100 s for the prompt
    outputs = pair.run_decode(pair.run_prefill())

    assert outputs[-1].token_id == 1002
    assert pair.prefill.load().expired_reservations == 0


def test_old_releases_have_a_long_fixed_lease() -> None:
    """Up to 0.21 blocks wait 480 s and no heartbeat is sent."""
    pair = Pair(version="0.21", transfer_tokens_per_s=0.1)
    params = pair.run_prefill()
    kept_until_s = pair.now_s + 480

    assert pair.run_decode(params)[-1].token_id == 1002
    pair.run_prefill(request_id="unused")
    pair.prefill.expire(kept_until_s)
    assert pair.prefill.load().open_reservations == 1


@pytest.mark.parametrize(
    ("version", "outcome"),
    [pytest.param("0.16", "length", id="recompute"), pytest.param("0.17", "error", id="fail")],
)
def test_unknown_engine_fails_the_load(version: str, outcome: str) -> None:
    """An engine that isn't there: computed here before 0.17, an error since."""
    pair = Pair(version=version)
    params = pair.run_prefill()
    pair.directory.leave("p")

    outputs = pair.run_decode(params)

    assert outputs[-1].finish_reason == outcome
    assert pair.decode.statistics.failed_loads == 1
    assert pair.decode.load().cache_usage == 0


@pytest.mark.parametrize("is_loading", [False, True], ids=["waiting", "loading"])
def test_aborted_decode_lets_prefill_free_its_blocks(is_loading: bool) -> None:
    """A client that leaves the decode leg doesn't pin the prefill rank."""
    pair = Pair()
    params = pair.run_prefill()
    pair.decode.add(pair.request(10, remote=read(params)), pair.now_s)
    if is_loading:
        pair.decode.step(pair.now_s)

    assert pair.decode.abort("r")
    assert pair.prefill.load().open_reservations == 0
    assert pair.decode.load().cache_usage == 0


@pytest.mark.parametrize("leaves", [False, True], ids=["forgotten", "gone"])
def test_abort_of_a_request_whose_blocks_are_gone_is_harmless(leaves: bool) -> None:
    """Nothing is left to release when the lease has ended or the other engine died."""
    pair = Pair()
    params = pair.run_prefill()
    pair.prefill.expire(pair.now_s + 60)
    if leaves:
        pair.directory.leave("p")
    pair.decode.add(pair.request(10, remote=read(params)), pair.now_s)

    assert pair.decode.abort("r")
    assert pair.prefill.load().released_reservations == 0


def test_aborted_prefill_keeps_nothing() -> None:
    """Only a finished prefill leaves a reservation."""
    pair = Pair()
    pair.prefill.add(pair.request(10, keeps_blocks=True, max_tokens=5), pair.now_s)
    pair.prefill.step(pair.now_s)

    assert pair.prefill.abort("r")
    assert pair.prefill.load().open_reservations == 0
    assert pair.prefill.load().cache_usage == 0


def test_decode_without_room_waits_for_blocks() -> None:
    """A transfer begins only when the whole prompt has room."""
    pair = Pair(num_blocks=4, max_model_len=12)
    params = pair.run_prefill()
    pair.decode.add(
        pair.request(5, request_id="busy", prompt_token_ids=range(50, 55), max_tokens=4), pair.now_s
    )
    pair.decode.step(pair.now_s)
    pair.decode.add(pair.request(10, remote=read(params)), pair.now_s)
    pair.decode.step(pair.now_s)

    assert pair.decode.load().loading == 0
    assert pair.drain(pair.decode)[-1].finish_reason == "length"


def test_pinned_blocks_wake_the_queue_when_their_lease_ends() -> None:
    """A prefill rank that is full of reservations goes on at the first expiry."""
    pair = Pair(num_blocks=4, max_model_len=12)
    pair.run_prefill()
    expires_s = pair.now_s + 30
    pair.prefill.add(pair.request(10, request_id="next"), pair.now_s)

    assert pair.prefill.step(pair.now_s).wake_s == pytest.approx(expires_s)
    pair.drain(pair.prefill)
    assert pair.now_s > expires_s


def test_preempted_loaded_request_is_computed_here() -> None:
    """Blocks that were transferred and lost are not asked for again."""
    pair = Pair(num_blocks=7, max_model_len=24)
    params = pair.run_prefill(8)
    pair.decode.add(
        pair.request(8, request_id="busy", prompt_token_ids=range(50, 58), max_tokens=9), pair.now_s
    )
    pair.decode.step(pair.now_s)
    pair.decode.add(pair.request(8, remote=read(params), max_tokens=9), pair.now_s)
    outputs = pair.drain(pair.decode)

    assert pair.decode.statistics.preemptions > 0
    tokens = [out.token_id for out in outputs if out.request_id == "r"]
    assert tokens == list(range(1000, 1009))


@pytest.mark.parametrize(
    ("version", "newest_field"),
    [
        ("0.9.0", None),
        ("0.9.2", "tp_size"),
        ("0.13", "remote_request_id"),
        ("0.21", "remote_num_tokens"),
        ("0.26", "remote_blocks_expiry_time"),
        ("0.28", "transfer_mode"),
        ("0.29", "pp_size"),
        ("0.31", "remote_prefill_cached_tokens"),
        ("0.33", "remote_registration_generation"),
    ],
)
def test_parameters_have_the_fields_of_their_release(
    version: str, newest_field: str | None
) -> None:
    """Each release adds fields; with those of any release the transfer works."""
    pair = Pair(version=version)
    params = pair.run_prefill()

    base = {"do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id"}
    assert base | {"remote_host", "remote_port"} <= set(params)
    assert newest_field is None or list(params)[-1] == newest_field
    assert isinstance(params["remote_block_ids"][0], list) == (parse_version(version) >= (0, 21, 0))
    assert pair.run_decode(params)[-1].token_id == 1002


operations = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "read", "release", "renew", "expire"]), st.integers(0, 5)
    ),
    max_size=40,
)


@given(operations)
def test_every_reservation_ends_once(steps: list[tuple[str, int]]) -> None:
    """What was reserved is open, released or expired, and its blocks are freed exactly once."""
    freed: list[int] = []
    kept = Reservations(SETTINGS, freed.extend)
    reserved = 0
    for now_s, (operation, number) in enumerate(steps):
        remote = RemotePrefill(
            engine_id="p", request_id=str(number), block_ids=(), prefill_cached_tokens=None
        )
        match operation:
            case "reserve":
                kept.release(remote)
                kept.reserve(str(number), [reserved], array("I", [number]), now_s * 10)
                reserved += 1
            case "read":
                kept.read(remote, array("I", [number]))
            case "release":
                kept.release(remote)
            case "renew":
                kept.renew(remote, now_s * 10)
            case _:
                kept.expire(now_s * 10)

    assert kept.open + kept.released + kept.expired == reserved
    assert len(freed) == len(set(freed)) == reserved - kept.open


def test_a_second_reservation_of_one_name_hides_the_first() -> None:
    """Which nobody can ask for any more: its blocks are free when its lease ends."""
    freed: list[tuple[int, ...]] = []
    kept = Reservations(EngineSettings(kv_lease_s=5.0), freed.append)
    prompt = array("I", [1, 2])
    kept.reserve("xfer", [1], prompt, 0.0)
    kept.reserve("xfer", [2], prompt, 1.0)
    remote = RemotePrefill(
        engine_id="p", request_id="xfer", block_ids=(), prefill_cached_tokens=None
    )

    assert kept.read(remote, prompt) == "ok"
    assert kept.open == 1
    kept.expire(5.0)
    assert (kept.open, kept.expired, freed) == (0, 1, [(2,), (1,)])
