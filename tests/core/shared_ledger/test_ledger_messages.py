"""What ledgers tell each other: each thing once, as it is, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from balancer.core.load.ledger import LegGuard, LegWork
from balancer.core.load.peer_messages import (
    MAX_BLOCKS,
    WIRE_VERSION,
    Ask,
    Batch,
    Booked,
    Change,
    FirstToken,
    PeerMessageError,
    booked,
    booked_work,
    decode_message,
    encode_message,
    unpack_keys,
)
from balancer.core.load.shared_ledger import SharedLedger
from indexer.core.types import BlockKey, InstanceId, RankId

Two = tuple[Any, Any]
MakeProcess = Callable[..., Any]
Settle = Callable[..., None]

FIRST, OTHER = (RankId(InstanceId(f"http://e{number}:8000"), 0) for number in (0, 1))
KEYS = [BlockKey(2**63 + number) for number in range(8)]

WORK = LegWork(
    rank=FIRST,
    kind="whole",
    prompt_tokens=130,
    uncached_tokens=130,
    work_s=0.013,
    keys=KEYS,
    block_size=16,
)


def fail(guard: LegGuard) -> None:
    guard.__exit__(RuntimeError, RuntimeError(), None)


def test_what_is_told_of_unknown_legs_changes_nothing(two: Two) -> None:
    """And a leg that is booked twice is one leg."""
    here, there = two
    told = booked(1, 0.0, WORK)
    broken = replace_keys(told, b"1234567")
    changes: list[Change] = [FirstToken(77, 0.0), told, told, broken, replace_number(broken, 2)]
    here.ledger.on_message(encode_message(Batch(WIRE_VERSION, "x", 1, 0.0, changes)))

    assert here.requests == 1
    assert there.requests == 0


def replace_keys(told: Booked, keys: bytes) -> Booked:
    fields = {name: getattr(told, name) for name in told.__struct_fields__}
    return Booked(**{**fields, "keys": keys})


def replace_number(told: Booked, number: int) -> Booked:
    fields = {name: getattr(told, name) for name in told.__struct_fields__}
    return Booked(**{**fields, "number": number})


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x93\x01\x02\x03", id="something-else"),
        pytest.param(
            b"\x94" + encode_message(Ask(WIRE_VERSION, "me"))[1:] + b"\x91" * 100_000, id="nested"
        ),
        pytest.param(encode_message(Ask(WIRE_VERSION + 1, "me")), id="another-version"),
    ],
)
def test_what_cannot_be_read_is_counted(two: Two, payload: bytes) -> None:
    """Another version of kvlb on the same Redis is no fault."""
    here, _ = two
    here.ledger.on_message(payload)

    assert here.ledger.refused == 1
    assert not here.ledger.is_waiting


def test_guards_tell_each_thing_once(two: Two) -> None:
    """Later calls change nothing here, so they aren't told either."""
    _, there = two
    guard = there.ledger.hold(replace(WORK, kind="decode"))
    guard.handed_over(OTHER)
    with guard:
        guard.first_token()
        guard.first_token()
        guard.handed_over(OTHER)
        guard.generated(3)
        guard.cached(16)
    guard.first_token()
    guard.handed_over(OTHER)
    fail(guard)
    (message,) = there.ledger.outgoing()
    batch = decode_message(message)

    assert isinstance(batch, Batch)
    assert [type(each).__name__ for each in batch.changes] == [
        "Booked",
        "HandedOver",
        "FirstToken",
        "Ended",
    ]
    assert batch.changes[-1].output_tokens == 3  # type: ignore[union-attr]


def test_the_owner_is_woken_for_whatever_is_to_be_sent(make_process: MakeProcess) -> None:
    """Without being asked over and over."""
    woken: list[int] = []
    spare = make_process("spare")
    ledger = SharedLedger(
        spare.clock, me="me", lease_s=1.0, news=spare.news, on_waiting=lambda: woken.append(1)
    )
    ledger.outgoing()
    ledger.hold(WORK)
    ledger.on_message(encode_message(Ask(WIRE_VERSION, "")))
    messages, _ = ledger.beat()

    assert woken == [1, 1]
    assert len(messages) == 2
    assert len(ledger.beat()[0]) == 1


legs = st.builds(
    LegWork,
    rank=st.sampled_from([FIRST, OTHER]),
    kind=st.sampled_from(["whole", "prefill", "decode"]),
    prompt_tokens=st.integers(0, 2**31),
    uncached_tokens=st.integers(0, 2**31),
    work_s=st.floats(0, 1e6),
    keys=st.lists(st.integers(0, 2**64 - 1).map(BlockKey), max_size=20),
    streamed=st.booleans(),
    believed_s=st.floats(0, 1e6),
    believed_tokens=st.integers(0, 2**31),
    remembered_s=st.floats(0, 1e6),
    block_size=st.integers(0, 1024),
).flatmap(
    lambda work: st.lists(st.integers(0, len(work.keys)), max_size=3).map(
        lambda ends: replace(work, chain_ends=tuple(sorted(ends)))
    )
)


@given(legs)
def test_a_leg_is_told_as_it_is(work: LegWork) -> None:
    """Nothing of it is lost on the way."""
    batch = Batch(WIRE_VERSION, "me", 1, 0.0, [booked(1, 2.0, work)])
    told = decode_message(encode_message(batch))

    assert isinstance(told, Batch)
    assert isinstance(told.changes[0], Booked)
    assert booked_work(told.changes[0]) == work


def test_of_a_giant_prompt_the_beginning_is_told(two: Two, settle: Settle) -> None:
    """What many processes keep of it is bounded."""
    here, there = two
    keys = [BlockKey(number) for number in range(MAX_BLOCKS + 1)]
    there.ledger.hold(replace(WORK, keys=keys))
    settle(here, there)

    assert here.ledger.predicted_blocks(FIRST, keys, 0) == MAX_BLOCKS
    assert there.ledger.predicted_blocks(FIRST, keys, 0) == MAX_BLOCKS + 1


def test_of_several_giant_prompts_the_first_blocks_are_told(two: Two, settle: Settle) -> None:
    """Prompt by prompt, until there are so many."""
    here, there = two
    keys = [BlockKey(number) for number in range(MAX_BLOCKS + 10)]
    work = replace(WORK, keys=keys, chain_ends=(MAX_BLOCKS - 1, MAX_BLOCKS + 10))
    there.ledger.hold(work)
    settle(here, there)

    assert here.ledger.predicted_blocks(FIRST, keys, 0) == MAX_BLOCKS - 1
    assert here.ledger.predicted_blocks(FIRST, keys[MAX_BLOCKS - 1 :], 0) == 1


@pytest.mark.parametrize(
    "ends", [pytest.param((3, 2), id="backwards"), pytest.param((2, 9), id="past-the-last")]
)
def test_prompts_that_overlap_are_refused(ends: tuple[int, ...]) -> None:
    """Whoever sends them could have one key counted over and over."""
    told = booked(1, 2.0, replace(WORK, chain_ends=ends))

    with pytest.raises(PeerMessageError):
        booked_work(told)


def test_keys_cut_short_are_refused() -> None:
    """They are eight bytes each."""
    with pytest.raises(PeerMessageError):
        unpack_keys(b"123456789")
