"""Laws of a stream: whatever the network does, what is applied is in order and nobody else's."""

from hypothesis import given
from hypothesis import strategies as st

from indexer.core.replay import StreamLimits
from indexer.core.stream import RankStream
from indexer.core.stream_effects import ApplyBatch, BatchOutcome, Effect, OpenEpoch, RequestReplay
from indexer.core.types import Trust


class Publisher:
    """An engine's side of the protocol: numbers, a ring, answers to replay."""

    def __init__(self, ring: int) -> None:
        self._ring = ring
        self._life = 0
        self.batches: list[bytes] = []

    def restart(self) -> None:
        self._life += 1
        self.batches = []

    def publish(self) -> tuple[int, bytes]:
        seq = len(self.batches)
        self.batches.append(b"%d" % (self._life * 1000 + seq))  # when: a later life is later
        return seq, self.batches[-1]

    def replay(self, from_seq: int) -> list[int]:
        first = max(from_seq, len(self.batches) - self._ring)
        return list(range(first, len(self.batches)))


class Network:
    """Carries batches to a stream, with the faults that a strategy chose."""

    def __init__(self, publisher: Publisher, *, connected: bool) -> None:
        self.publisher = publisher
        self.stream = RankStream(can_replay=True, ts_of=float, limits=StreamLimits())
        self.applied: list[int] = []
        self.payloads: list[bytes] = []
        self.epochs = 0
        self._answer: list[int] = []
        self._ticket = 0
        if connected:
            self.perform(self.stream.on_connected())

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ApplyBatch(seq=seq, payload=payload):
                    self.applied.append(seq)
                    self.payloads.append(payload)
                    self.stream.on_applied(seq, BatchOutcome())
                case RequestReplay(from_seq=from_seq, ticket=ticket):
                    self._ticket = ticket
                    self._answer = self.publisher.replay(from_seq)
                case OpenEpoch():
                    self.epochs += 1
                    self.applied.clear()
                    self.payloads.clear()
                case _:
                    pass

    def answer(self, messages: int) -> None:
        """Deliver up to `messages` messages of the replay under way."""
        for _ in range(messages):
            if not self.stream.replaying:
                return
            if self._answer:
                seq = self._answer.pop(0)
                payload = self.publisher.batches[seq]
                self.perform(self.stream.on_replayed(self._ticket, seq, payload))
            else:
                self.perform(self.stream.on_replay_end(self._ticket))

    def play(self, steps: list[tuple[str, int]]) -> None:
        sent: list[tuple[int, bytes]] = []
        for action, amount in steps:
            match action:
                case "send":
                    sent.append(self.publisher.publish())
                    self.perform(self.stream.on_live(*sent[-1]))
                case "drop":
                    self.publisher.publish()
                case "duplicate" if sent:
                    self.perform(self.stream.on_live(*sent[-1 - amount % len(sent)]))
                case "answer":
                    self.answer(amount)
                case "restart":
                    self.publisher.restart()
                    sent.clear()
                    self.perform(self.stream.on_disconnected())
                    if amount % 2:
                        self.perform(self.stream.on_connected())
                case _:
                    pass
        self.perform(self.stream.on_live(*self.publisher.publish()))
        self.answer(10_000)


steps = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "drop", "duplicate", "answer"]),
        st.integers(1, 5),
    ),
    max_size=60,
)


@given(steps, st.booleans())
def test_full_ring_gives_every_batch_once_in_order(
    steps: list[tuple[str, int]], connected: bool
) -> None:
    """Drops and duplicates anywhere, replays interleaved anyhow: 0..n, each once, in order."""
    network = Network(Publisher(ring=10_000), connected=connected)

    network.play(steps)

    assert network.applied == list(range(len(network.publisher.batches)))
    assert network.stream.trust.level is Trust.EXACT
    assert network.epochs == 0


@given(steps, st.integers(1, 4))
def test_short_ring_never_goes_back_within_an_epoch(
    steps: list[tuple[str, int]], ring: int
) -> None:
    """What is lost is lost; what is applied only rises, up to the newest."""
    network = Network(Publisher(ring=ring), connected=True)

    network.play(steps)

    assert network.applied == sorted(set(network.applied))
    assert network.applied[-1] == len(network.publisher.batches) - 1
    assert network.stream.held_batches == 0
    missing = len(network.publisher.batches) - len(network.applied)
    assert (network.stream.trust.level is Trust.EXACT) == (missing == 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "send", "drop", "duplicate", "answer", "restart"]),
            st.integers(1, 5),
        ),
        max_size=60,
    )
)
def test_restarts_leave_exactly_the_last_life(steps: list[tuple[str, int]]) -> None:
    """However far the new process has come when we see it, nothing of an older one counts."""
    network = Network(Publisher(ring=10_000), connected=True)

    network.play(steps)

    assert network.payloads == network.publisher.batches
    assert network.stream.trust.level is Trust.EXACT
