"""Batches that are lost, come twice, or are too many at once: snapshots tell all."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from balancer.core.load import shared_ledger
from balancer.core.load.ledger import LegWork
from balancer.core.load.peer_messages import (
    WIRE_VERSION,
    Ask,
    Batch,
    Left,
    booked,
    decode_message,
    encode_message,
)
from balancer.core.load.peers import ASK_S, MAX_PEERS
from indexer.core.types import BlockKey, InstanceId, RankId

Two = tuple[Any, Any]
Deliver = Callable[..., Sequence[bytes]]
Settle = Callable[..., None]
MakeProcess = Callable[..., Any]

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


def test_a_lost_batch_is_repaired_by_a_snapshot(two: Two, settle: Settle) -> None:
    """Legs that began and ended unseen, and one that went on."""
    here, there = two
    ended, lasting = there.ledger.hold(WORK), there.ledger.hold(WORK)
    settle(here, there)
    ended.__exit__(None, None, None)
    lasting.first_token()
    there.ledger.hold(replace(WORK, rank=OTHER))
    there.ledger.outgoing()  # lost
    before = here.ledger.peers.gaps
    there.ledger.hold(WORK)
    settle(here, there)

    assert here.ledger.peers.gaps == before + 1
    assert (here.requests, here.ledger.load(FIRST).decoding) == (2, 1)
    assert here.ledger.load(OTHER).requests == 1


def test_nothing_is_taken_between_a_gap_and_its_snapshot(two: Two, deliver: Deliver) -> None:
    """And it isn't asked for with every batch."""
    here, there = two
    there.ledger.hold(WORK)
    there.ledger.outgoing()  # lost
    asked = []
    for _ in range(3):
        there.ledger.hold(WORK)
        deliver(there, here)
        asked += [decode_message(each) for each in here.ledger.outgoing()]
    in_between = here.requests
    here.clock.now_s += 2 * ASK_S
    there.ledger.hold(WORK)
    deliver(there, here)
    asked += [decode_message(each) for each in here.ledger.outgoing()]

    assert in_between == 0
    assert asked == [Ask(WIRE_VERSION, "there")] * 2


def test_a_newcomer_learns_all_legs_at_once(settle: Settle, make_process: MakeProcess) -> None:
    """It asks everybody when it begins; a hand-over in the middle is part of it."""
    old = make_process("old")
    settle(old)
    first = old.ledger.hold(WORK)
    first.first_token()
    second = old.ledger.hold(replace(WORK, kind="decode"))
    second.handed_over(OTHER)
    old.ledger.outgoing()
    new = make_process("new")
    settle(old, new)

    load = new.ledger.load(FIRST)
    assert (load.requests, load.decoding, load.queued_tokens) == (2, 1, 0)
    assert new.ledger.peers.gaps == 0


def test_a_snapshot_that_nobody_here_needs_changes_nothing(
    two: Two, settle: Settle, make_process: MakeProcess
) -> None:
    """A third process asked for it."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)
    third = make_process("third")
    settle(here, there, third)

    assert here.requests == there.requests == third.requests == 1


def test_two_who_ask_get_one_snapshot(make_process: MakeProcess) -> None:
    """It is told to everybody anyway."""
    process = make_process("me")
    process.ledger.outgoing()
    for _ in range(2):
        process.ledger.on_message(encode_message(Ask(WIRE_VERSION, "me")))
    process.ledger.on_message(encode_message(Ask(WIRE_VERSION, "somebody else")))

    assert len(process.ledger.outgoing()) == 1


def test_a_batch_that_comes_twice_counts_once(two: Two, deliver: Deliver) -> None:
    """A channel that is not sure may send again."""
    here, there = two
    there.ledger.hold(WORK)
    for message in deliver(there, here):
        here.ledger.on_message(message)

    assert here.requests == 1


def test_who_leaves_is_gone_at_once(two: Two, settle: Settle) -> None:
    """Without waiting for the lease, and without being counted as lost."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)
    here.ledger.on_message(there.ledger.leave())
    here.ledger.on_message(encode_message(Left(WIRE_VERSION, "nobody")))

    assert here.requests == 0
    assert here.ledger.peers.expired == 0


def test_our_own_messages_count_for_nothing(two: Two, deliver: Deliver) -> None:
    """Some channels bring them back."""
    here, _ = two
    here.ledger.hold(WORK)
    deliver(here, here)

    assert here.requests == 1


def test_peers_are_bounded(make_process: MakeProcess) -> None:
    """Whoever can write to the channel can't fill our memory."""
    process = make_process("me")
    for number in range(MAX_PEERS + 1):
        batch = Batch(WIRE_VERSION, f"peer {number}", 1, 0.0, [booked(1, 0.0, WORK)])
        process.ledger.on_message(encode_message(batch))

    assert process.requests == process.ledger.peers.count == MAX_PEERS


def test_too_much_at_once_is_a_gap(
    two: Two, monkeypatch: pytest.MonkeyPatch, settle: Settle
) -> None:
    """A channel that doesn't come round to sending costs no memory, and nothing is wrong afterwards."""
    here, there = two
    monkeypatch.setattr(shared_ledger, "MAX_WAITING", 4)
    for _ in range(7):
        there.ledger.hold(WORK)
    settle(here, there)

    assert here.requests == 7
    assert here.ledger.peers.gaps == 1
