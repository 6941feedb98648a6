"""Several processes' legs in each one's ledger: gaps, leases, repeated prompts, what can't be read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from balancer.core.load import shared_ledger
from balancer.core.load.ledger import LegGuard, LegWork
from balancer.core.load.peer_messages import (
    MAX_BLOCKS,
    WIRE_VERSION,
    Ask,
    Batch,
    Booked,
    Change,
    FirstToken,
    Left,
    PeerMessageError,
    booked,
    booked_work,
    decode_message,
    encode_message,
    unpack_keys,
)
from balancer.core.load.peers import ASK_S, MAX_AGE_S, MAX_PEERS
from balancer.core.load.shared_ledger import SharedLedger
from indexer.core.types import BlockKey, InstanceId, RankId

FIRST, OTHER = (RankId(InstanceId(f"http://e{number}:8000"), 0) for number in (0, 1))
KEYS = [BlockKey(2**63 + number) for number in range(8)]
LEASE_S = 3.0
WORK = LegWork(
    rank=FIRST,
    kind="whole",
    prompt_tokens=130,
    uncached_tokens=130,
    work_s=0.013,
    keys=KEYS,
    block_size=16,
)


@dataclass(slots=True)
class Clock:
    """Time as the test says."""

    now_s: float = 5.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class News:
    """What peers did beside the ledger."""

    booked: list[RankId] = field(default_factory=list)
    outcomes: list[tuple[str, bool, str | None]] = field(default_factory=list)

    def on_booked(self, rank: RankId) -> None:
        self.booked.append(rank)

    def on_outcome(self, instance: InstanceId, ok: bool, reason: str | None) -> None:
        self.outcomes.append((instance, ok, reason))


@dataclass(slots=True)
class Process:
    """One of several, with a clock of its own."""

    me: str
    clock: Clock = field(default_factory=Clock)
    news: News = field(default_factory=News)
    ledger: SharedLedger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = SharedLedger(self.clock, me=self.me, lease_s=LEASE_S, news=self.news)

    @property
    def requests(self) -> int:
        return self.ledger.load(FIRST).requests


def deliver(sender: Process, *receivers: Process) -> Sequence[bytes]:
    messages = sender.ledger.outgoing()
    for receiver in receivers:
        for message in messages:
            receiver.ledger.on_message(message)
    return messages


def settle(*processes: Process) -> None:
    """Everything is told to everybody, answers included."""
    while any(each.ledger.is_waiting for each in processes):
        for each in processes:
            deliver(each, *processes)


@pytest.fixture
def two() -> tuple[Process, Process]:
    """Two processes that know each other; their clocks have nothing in common."""
    here, there = Process("here"), Process("there", Clock(9000.0))
    settle(here, there)
    return here, there


def fail(guard: LegGuard) -> None:
    guard.__exit__(RuntimeError, RuntimeError(), None)


def test_loads_are_sums_over_processes(two: tuple[Process, Process]) -> None:
    """Each counts its own and the other's."""
    here, there = two
    mine, others = here.ledger.hold(WORK), there.ledger.hold(WORK)
    settle(here, there)
    both = (here.requests, there.requests)
    mine.first_token()
    mine.__exit__(None, None, None)
    fail(others)
    settle(here, there)

    assert both == (2, 2)
    assert (here.requests, there.requests) == (0, 0)
    assert here.ledger.peers.legs == there.ledger.peers.legs == 0


def test_a_peers_prompt_is_found_by_its_sibling(two: tuple[Process, Process]) -> None:
    """Its blocks are predicted here, and whose turn it is is known, too."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)

    assert here.ledger.predicted_blocks(FIRST, KEYS, 0) == len(KEYS)
    assert here.news.booked == [FIRST]
    assert there.news.booked == []


def test_a_prompt_booked_twice_in_ignorance_is_computed_once(two: tuple[Process, Process]) -> None:
    """The engine finds the second one's blocks; both processes then count alike."""
    here, there = two
    mine, others = here.ledger.hold(WORK), there.ledger.hold(WORK)
    settle(here, there)
    queued = [each.ledger.load(FIRST).queued_tokens for each in two]
    mine.first_token()
    others.first_token()
    settle(here, there)

    assert queued == [132, 132]
    assert [each.ledger.load(FIRST).queued_tokens for each in two] == [0, 0]


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(replace(WORK, kind="decode"), id="it-waits-for-a-transfer"),
        pytest.param(replace(WORK, block_size=0), id="its-keys-are-of-several-prompts"),
        pytest.param(replace(WORK, uncached_tokens=1), id="it-knew-more"),
        pytest.param(replace(WORK, keys=()), id="nobody-knows-its-tokens"),
    ],
)
def test_a_leg_that_repeats_nothing_counts_as_it_was_told(
    two: tuple[Process, Process], work: LegWork
) -> None:
    """Only what another leg computes for it is taken off."""
    here, there = two
    here.ledger.hold(WORK)
    there.ledger.hold(work)
    settle(here, there)

    told = 0 if work.kind == "decode" else work.uncached_tokens
    assert here.ledger.load(FIRST).queued_tokens == 130 + told


def test_moments_are_those_of_the_sender(two: tuple[Process, Process]) -> None:
    """Whatever its clock says; a late message makes nothing older."""
    here, there = two
    there.ledger.hold(WORK)
    there.clock.now_s += 2
    settle(here, there)

    assert here.ledger.load(FIRST).oldest_queued_s == here.clock.now_s - 2


def test_what_is_very_old_counts_as_old(two: tuple[Process, Process]) -> None:
    """A stream of some hours must not overflow an exponential."""
    here, there = two
    there.ledger.hold(WORK)
    there.clock.now_s += 1e6
    settle(here, there)

    load = here.ledger.load(FIRST)
    assert load.oldest_queued_s == here.clock.now_s - MAX_AGE_S
    assert load.arrivals_per_s < 1


def test_a_silent_peers_legs_end_with_its_lease(two: tuple[Process, Process]) -> None:
    """Killed, stuck or cut off: no load and no predicted block is left of it."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)
    here.clock.now_s += LEASE_S
    at_lease = here.ledger.beat()[1], here.requests
    here.clock.now_s += 0.1
    silent = here.ledger.beat()[1]

    assert at_lease == ([], 1)
    assert silent == ["there"]
    assert here.requests == 0
    assert here.ledger.predicted_blocks(FIRST, KEYS, 0) == 0
    assert (here.ledger.peers.count, here.ledger.peers.expired) == (0, 1)


def test_signs_of_life_renew_the_lease(two: tuple[Process, Process]) -> None:
    """A leg may run for as long as it likes."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)
    for _ in range(5):
        here.clock.now_s += LEASE_S - 0.1
        for message in there.ledger.beat()[0]:
            here.ledger.on_message(message)

        assert here.ledger.beat()[1] == []
    assert here.requests == 1


def test_a_peer_that_was_only_stuck_is_counted_again(two: tuple[Process, Process]) -> None:
    """Its next message shows that something is missing; its snapshot tells all."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)
    here.clock.now_s += LEASE_S + 1
    here.ledger.beat()
    for message in there.ledger.beat()[0]:
        here.ledger.on_message(message)
    settle(here, there)

    assert here.requests == 1


def test_a_lost_batch_is_repaired_by_a_snapshot(two: tuple[Process, Process]) -> None:
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


def test_nothing_is_taken_between_a_gap_and_its_snapshot(two: tuple[Process, Process]) -> None:
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


def test_a_newcomer_learns_all_legs_at_once() -> None:
    """It asks everybody when it begins; a hand-over in the middle is part of it."""
    old = Process("old")
    settle(old)
    first = old.ledger.hold(WORK)
    first.first_token()
    second = old.ledger.hold(replace(WORK, kind="decode"))
    second.handed_over(OTHER)
    old.ledger.outgoing()
    new = Process("new")
    settle(old, new)

    load = new.ledger.load(FIRST)
    assert (load.requests, load.decoding, load.queued_tokens) == (2, 1, 0)
    assert new.ledger.peers.gaps == 0


def test_a_snapshot_that_nobody_here_needs_changes_nothing(two: tuple[Process, Process]) -> None:
    """A third process asked for it."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)
    third = Process("third")
    settle(here, there, third)

    assert here.requests == there.requests == third.requests == 1


def test_two_who_ask_get_one_snapshot() -> None:
    """It is told to everybody anyway."""
    process = Process("me")
    process.ledger.outgoing()
    for _ in range(2):
        process.ledger.on_message(encode_message(Ask(WIRE_VERSION, "me")))
    process.ledger.on_message(encode_message(Ask(WIRE_VERSION, "somebody else")))

    assert len(process.ledger.outgoing()) == 1


def test_a_batch_that_comes_twice_counts_once(two: tuple[Process, Process]) -> None:
    """A channel that is not sure may send again."""
    here, there = two
    there.ledger.hold(WORK)
    for message in deliver(there, here):
        here.ledger.on_message(message)

    assert here.requests == 1


def test_who_leaves_is_gone_at_once(two: tuple[Process, Process]) -> None:
    """Without waiting for the lease, and without being counted as lost."""
    here, there = two
    there.ledger.hold(WORK)
    settle(here, there)
    here.ledger.on_message(there.ledger.leave())
    here.ledger.on_message(encode_message(Left(WIRE_VERSION, "nobody")))

    assert here.requests == 0
    assert here.ledger.peers.expired == 0


def test_our_own_messages_count_for_nothing(two: tuple[Process, Process]) -> None:
    """Some channels bring them back."""
    here, _ = two
    here.ledger.hold(WORK)
    deliver(here, here)

    assert here.requests == 1


def test_what_engines_report_is_known_to_all(two: tuple[Process, Process]) -> None:
    """Lengths of answers, and what a rank without events seems to hold."""
    here, there = two
    with there.ledger.hold(replace(WORK, remembered_s=60.0)) as guard:
        guard.first_token()
        guard.cached(16)
        guard.generated(500)
    settle(here, there)

    assert here.ledger.has_guesses(FIRST)
    assert here.ledger.load(FIRST).rates.output_tokens > 128


def test_how_instances_answered_is_told(two: tuple[Process, Process]) -> None:
    """Breakers of all processes go by it."""
    here, there = two
    there.ledger.tell_outcome(FIRST.instance, ok=False, reason="engine_unreachable")
    settle(here, there)

    assert here.news.outcomes == [(FIRST.instance, False, "engine_unreachable")]
    assert there.news.outcomes == []


def test_what_is_told_of_unknown_legs_changes_nothing(two: tuple[Process, Process]) -> None:
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
        pytest.param(encode_message(Ask(WIRE_VERSION + 1, "me")), id="another-version"),
    ],
)
def test_what_cannot_be_read_is_counted(two: tuple[Process, Process], payload: bytes) -> None:
    """Another version of kvlb on the same Redis is no fault."""
    here, _ = two
    here.ledger.on_message(payload)

    assert here.ledger.refused == 1
    assert not here.ledger.is_waiting


def test_peers_are_bounded() -> None:
    """Whoever can write to the channel can't fill our memory."""
    process = Process("me")
    for number in range(MAX_PEERS + 1):
        batch = Batch(WIRE_VERSION, f"peer {number}", 1, 0.0, [booked(1, 0.0, WORK)])
        process.ledger.on_message(encode_message(batch))

    assert process.requests == process.ledger.peers.count == MAX_PEERS


def test_too_much_at_once_is_a_gap(
    two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel that doesn't come round to sending costs no memory, and nothing is wrong afterwards."""
    here, there = two
    monkeypatch.setattr(shared_ledger, "MAX_WAITING", 4)
    for _ in range(7):
        there.ledger.hold(WORK)
    settle(here, there)

    assert here.requests == 7
    assert here.ledger.peers.gaps == 1


def test_guards_tell_each_thing_once(two: tuple[Process, Process]) -> None:
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


def test_the_owner_is_woken_for_whatever_is_to_be_sent() -> None:
    """Without being asked over and over."""
    woken: list[int] = []
    ledger = SharedLedger(
        Clock(), me="me", lease_s=1.0, news=News(), on_waiting=lambda: woken.append(1)
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


def test_of_a_giant_prompt_the_beginning_is_told(two: tuple[Process, Process]) -> None:
    """What many processes keep of it is bounded."""
    here, there = two
    keys = [BlockKey(number) for number in range(MAX_BLOCKS + 1)]
    there.ledger.hold(replace(WORK, keys=keys))
    settle(here, there)

    assert here.ledger.predicted_blocks(FIRST, keys, 0) == MAX_BLOCKS
    assert there.ledger.predicted_blocks(FIRST, keys, 0) == MAX_BLOCKS + 1


def test_of_several_giant_prompts_the_first_blocks_are_told(two: tuple[Process, Process]) -> None:
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


steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["book", "token", "end", "fail", "tell", "lose", "beat"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@given(steps)
def test_all_agree_once_everything_was_told(happened: list[tuple[int, str, int]]) -> None:
    """Whatever was lost on the way: the next sign of life shows it."""
    processes = [Process(f"p{number}") for number in range(3)]
    guards: list[list[LegGuard]] = [[], [], []]
    settle(*processes)
    for number, step, which in happened:
        happen(processes, number, guards[number], step, which)
    for _ in range(3):
        for process in processes:
            process.clock.now_s += 2 * ASK_S
            for message in process.ledger.beat()[0]:
                for other in processes:
                    other.ledger.on_message(message)
        settle(*processes)

    total = sum(len(each) for each in guards)
    assert [each.requests for each in processes] == [total] * 3


def happen(
    processes: list[Process], number: int, held: list[LegGuard], step: str, which: int
) -> None:
    ledger = processes[number].ledger
    if step == "book":
        held.append(ledger.hold(WORK))
    elif step == "tell":
        deliver(processes[number], *processes)
    elif step == "lose":
        ledger.outgoing()
    elif step == "beat":
        ledger.beat()
    elif which < len(held):
        act(held, which, step)


def act(held: list[LegGuard], which: int, step: str) -> None:
    if step == "token":
        held[which].first_token()
    elif step == "end":
        held.pop(which).__exit__(None, None, None)
    else:
        fail(held.pop(which))
