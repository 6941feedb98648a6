"""Shared storages and meetings by name, on simulated ranks in virtual time."""

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.engine import EngineCore
from simulator.core.errors import EngineDiedError
from simulator.core.generation import FixedTokens
from simulator.core.settings import EngineSettings
from simulator.core.storage import SharedStorage
from simulator.core.transfer import SideChannel, TransferDirectory
from simulator.core.types import EngineRequest, Keep, RemotePrefill, TokenOutput

SETTINGS = EngineSettings(
    block_size=4,
    num_blocks=400,
    transfer_tokens_per_s=1000.0,
    transfer_latency_ms=2.0,
    inter_token_ms=10.0,
)


class Pair:
    """A prefill and a decode rank that share what there is to share."""

    def __init__(self, **changes: Any) -> None:
        settings = msgspec.structs.replace(SETTINGS, **changes)
        self.now_s = 0.0
        self.directory = TransferDirectory()
        self.prefill, self.decode = (self._create(settings, name) for name in "pd")

    def _create(self, settings: EngineSettings, name: str) -> EngineCore:
        core = EngineCore(
            settings,
            none_hash=b"seed",
            channel=SideChannel(engine_id=name, host=name, port=1),
            directory=self.directory,
        )
        self.directory.enter(name, core.reservations)
        return core

    def run(
        self, core: EngineCore, prompt: list[int], steps: int = 1000, **fields: Any
    ) -> list[TokenOutput]:
        request: dict[str, Any] = {
            "request_id": "r",
            "prompt_token_ids": prompt,
            "sampler": FixedTokens(range(1000, 1100)),
            "max_tokens": 2,
        }
        core.add(EngineRequest(**(request | fields)), self.now_s)
        return self.drain(core, steps)

    def drain(self, core: EngineCore, steps: int = 1000) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for _ in range(steps):
            if not core.has_work:
                break
            result = core.step(self.now_s)
            outputs += result.outputs
            self.now_s += result.duration_s or 0.002
        return outputs


def tokens(outputs: list[TokenOutput]) -> list[int | None]:
    return [output.token_id for output in outputs]


PROMPT = list(range(20))


def test_example_finds_the_prompt_that_another_engine_wrote() -> None:
    """All full blocks but what the last token needs."""
    pair = Pair(kv_connector="example")
    pair.run(pair.prefill, PROMPT)

    outputs = pair.run(pair.decode, PROMPT)

    assert outputs[-1].cached_tokens == 16
    assert tokens(outputs) == [1000, 1001]
    assert pair.decode.statistics.computed_prompt_tokens == 4


def test_example_doesnt_find_the_beginning_of_a_longer_prompt() -> None:
    """Its name is the whole prompt's."""
    pair = Pair(kv_connector="example")
    pair.run(pair.prefill, PROMPT)

    pair.run(pair.decode, list(range(40)))

    assert pair.decode.statistics.computed_prompt_tokens == 40


def test_example_loads_another_tenants_cache() -> None:
    """The name tells tokens only; what comes out is nobody's text."""
    pair = Pair(kv_connector="example")
    pair.run(pair.prefill, PROMPT)

    outputs = pair.run(pair.decode, PROMPT, cache_salt="s")

    assert pair.decode.statistics.corrupt_reads == 1
    assert tokens(outputs) == [ord("#")] * 2


def test_example_dies_of_one_length_if_an_entry_of_its_other_name_is_there() -> None:
    """The request fails, and every one after it."""
    pair = Pair(kv_connector="example")
    pair.run(pair.prefill, PROMPT)

    unharmed = pair.run(pair.decode, list(range(17)), request_id="other")
    pair.run(pair.prefill, list(range(13)))
    fatal = pair.run(pair.decode, list(range(17)), request_id="fatal")
    later = pair.run(pair.decode, [7, 7, 7], request_id="later")

    assert tokens(unharmed) == [1000, 1001]
    assert [output.finish_reason for output in (*fatal, *later)] == ["error", "error"]
    assert pair.decode.is_dead


def test_lmcache_finds_the_longest_known_beginning() -> None:
    """In chunks, for one adapter and tenant."""
    pair = Pair(kv_connector="lmcache")
    prompt = list(range(600))
    pair.run(pair.prefill, prompt)

    longer = pair.run(pair.decode, [*prompt, *range(9000, 9050)])
    other = pair.run(pair.decode, prompt, cache_salt="s", request_id="other")
    short = pair.run(pair.decode, [5, 6, 7], request_id="short")

    assert [each[-1].cached_tokens for each in (longer, other, short)] == [512, 0, 0]


@given(length=st.integers(1, 60), other=st.integers(1, 60))
def test_a_prompt_finds_its_own_entry_or_none(length: int, other: int) -> None:
    """Law: what is found is a beginning of the prompt that was written."""
    storage = SharedStorage()
    storage.write_prompt(array("I", range(other)), 4, None, 0.0)

    try:
        found = storage.find_prompt(array("I", range(length)), 4, None, 0.0)
    except EngineDiedError:
        assert length % 4 == 1
        return
    if found is not None:
        assert found.num_tokens is not None
        assert found.num_tokens < min(length, other) + 1


# Meetings by name


def remote(waits_s: float | None = float("inf"), **fields: Any) -> RemotePrefill:
    named: dict[str, Any] = {
        "engine_id": "p",
        "request_id": "x",
        "block_ids": (),
        "prefill_cached_tokens": None,
        "waits_s": waits_s,
    }
    return RemotePrefill(**(named | fields))


def test_the_decode_side_may_come_first() -> None:
    """It reads when the other side is ready."""
    pair = Pair()
    assert pair.run(pair.decode, PROMPT, steps=5, remote=remote()) == []

    pair.run(pair.prefill, PROMPT, max_tokens=1, keep=Keep(key="x", tells=None))
    outputs = pair.drain(pair.decode)

    assert tokens(outputs) == [1000, 1001]
    assert pair.decode.statistics.computed_prompt_tokens == 1
    assert pair.prefill.load().released_reservations == 1


def test_the_prefill_side_may_have_finished() -> None:
    """And its answer tells nothing, if the connector has nothing to tell."""
    pair = Pair()
    first = pair.run(pair.prefill, PROMPT, max_tokens=1, keep=Keep(key="x", tells=None))

    outputs = pair.run(pair.decode, PROMPT, remote=remote())

    assert first[-1].transfer_params is None
    assert tokens(outputs) == [1000, 1001]


def test_what_ended_too_early_is_not_handed_over() -> None:
    """An end-of-text as first token: the other side waits."""
    pair = Pair()
    keep = Keep(key="x", reasons=frozenset({"length"}), tells=None)
    pair.run(
        pair.prefill, PROMPT, sampler=FixedTokens([7]), stop_token_ids=frozenset({7}), keep=keep
    )

    assert pair.run(pair.decode, PROMPT, steps=50, remote=remote()) == []
    assert pair.prefill.load().open_reservations == 0
    assert pair.decode.load().loading == 1


def test_waiting_for_nobody_ends_in_a_failed_load() -> None:
    """If it ends at all."""
    pair = Pair()

    outputs = pair.run(pair.decode, PROMPT, remote=remote(waits_s=0.05))

    assert [output.finish_reason for output in outputs] == ["error"]
    assert pair.now_s >= 0.05


def test_a_request_that_waits_can_be_given_up() -> None:
    """What the other side kept is let go."""
    pair = Pair()
    pair.run(pair.decode, PROMPT, steps=2, remote=remote())
    pair.run(pair.prefill, PROMPT, max_tokens=1, keep=Keep(key="x", tells=None))

    assert pair.decode.abort("r")
    assert pair.prefill.load().released_reservations == 1
    assert not pair.decode.has_work


def test_copies_hold_nothing_in_the_cache() -> None:
    """They are elsewhere until they are fetched."""
    pair = Pair()
    pair.run(pair.prefill, PROMPT, max_tokens=1, keep=Keep(key="x", tells=None, copies=True))
    held = pair.prefill.load()

    outputs = pair.run(pair.decode, PROMPT, remote=remote())

    assert (held.open_reservations, held.cache_usage) == (1, 0)
    assert tokens(outputs) == [1000, 1001]


@pytest.mark.parametrize("tells", ["push", "decode", "read"])
def test_answers_tell_in_the_connectors_words(tells: Any) -> None:
    """Who is to do what with the blocks."""
    pair = Pair()
    told = pair.run(pair.prefill, PROMPT, max_tokens=1, keep=Keep(key="x", tells=tells))[
        -1
    ].transfer_params

    assert told is not None
    assert told["do_remote_decode"] is (tells == "decode")
    expected = {"push": ("transfer_mode", "push"), "read": ("transfer_id", "x")}
    name, value = expected.get(tells, ("transfer_mode", "pull"))
    assert told[name] == value


def test_a_lease_may_be_the_connectors_own() -> None:
    """Longer or shorter than the engine's usual one."""
    pair = Pair()
    pair.run(pair.prefill, PROMPT, max_tokens=1, keep=Keep(key="x", lease_s=1.0))

    pair.prefill.expire(pair.now_s + 0.9)
    assert pair.prefill.load().open_reservations == 1
    pair.prefill.expire(pair.now_s + 1.1)
    assert pair.prefill.load().expired_reservations == 1


# Partial reads


def test_a_part_of_the_prompt_is_read_and_the_rest_computed() -> None:
    """What a decode engine kept of the last turn is the next prompt's beginning."""
    pair = Pair()
    pair.run(pair.prefill, PROMPT, max_tokens=1, keep=Keep())
    last_turn = remote(waits_s=None, request_id="r", num_tokens=20)

    outputs = pair.run(pair.decode, list(range(40)), remote=last_turn)

    assert tokens(outputs) == [1000, 1001]
    assert pair.decode.statistics.computed_prompt_tokens == 20
    assert pair.prefill.load().released_reservations == 1


def test_a_part_of_another_prompt_is_read_all_the_same() -> None:
    """Nothing checks it: the text is wrong."""
    pair = Pair()
    pair.run(pair.prefill, list(range(100, 120)), max_tokens=1, keep=Keep())
    last_turn = remote(waits_s=None, request_id="r", num_tokens=20)

    pair.run(pair.decode, list(range(40)), remote=last_turn)

    assert pair.decode.statistics.corrupt_reads == 1


@pytest.mark.parametrize(
    ("held", "computed"),
    [pytest.param(20, 20, id="peer-has-more"), pytest.param(0, 40, id="peer-has-nothing")],
)
def test_a_peer_is_asked_for_what_it_has(held: int, computed: int) -> None:
    """Under equal hashes; what it lacks is computed."""
    pair = Pair()
    if held:
        pair.run(pair.prefill, list(range(held + 1)))

    outputs = pair.run(
        pair.decode, list(range(40)), remote=remote(waits_s=None, probes=True), request_id="q"
    )

    assert tokens(outputs) == [1000, 1001]
    assert pair.decode.statistics.computed_prompt_tokens == computed


def test_a_peer_that_is_gone_has_nothing() -> None:
    """The prompt is computed."""
    pair = Pair()
    pair.directory.leave("p")

    outputs = pair.run(pair.decode, PROMPT, remote=remote(waits_s=None, probes=True))

    assert tokens(outputs) == [1000, 1001]
