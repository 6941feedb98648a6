"""Turns one rank's numbered batches into an ordered, gap-free sequence, one cache life at a time.

Sans-IO: messages go in as arguments, work comes out as effects. The subscriber performs the
effects in order; nothing here can block, sleep or fail.

Rules:

1. Within an epoch `ApplyBatch` numbers rise by one, except over a `GapLost` or a late join, and
   either leaves the rank DEGRADED.
2. While a replay runs, or the publisher is doubted (5), live batches wait.
3. A replay starts at the first number asked for, or the publisher hasn't got it any more: a later
   first answer settles that hole for good. Some numbers an engine consumed and never sent.
4. A number at or below the newest is a duplicate, a late batch, or a restart, which opens a new
   epoch (`core.fallen_numbers`).
5. A connection that was lost may hide a restart behind a rising number. Until replay has shown the
   last applied batch again (`_doubt`), nothing more is applied. What came in between is doubted too.
6. An empty replay from a number known to exist, or another payload under a known number, means
   another process: a new epoch, joined from 0.
7. Asking is bounded (`StreamLimits`). What can't be had is given up, visibly, and live goes on.
8. What a batch showed comes back as an argument (`on_applied`); what follows for the rank's trust,
   and whether its life is worth telling again, is `core.trust`'s.

Cost: O(1) per batch in order, one digest of its payload; held batches are sorted on giving up.
"""

from collections.abc import Callable, Mapping

from indexer.core.fallen_numbers import Fallen, FallenNumbers
from indexer.core.known_batches import KnownBatches
from indexer.core.replay import Purpose, Replay, StreamLimits
from indexer.core.stream_effects import (
    ApplyBatch,
    BatchOutcome,
    Dropped,
    Effect,
    GapLost,
    GapOpened,
    GapRepaired,
    OpenEpoch,
    ReplayEnded,
    RequestReplay,
)
from indexer.core.trust import RankTrust
from indexer.core.types import Trust


class RankStream:
    """The stream of one (instance, rank)."""

    def __init__(
        self,
        *,
        can_replay: bool,
        ts_of: Callable[[bytes], float | None],
        limits: StreamLimits,
    ) -> None:
        """`ts_of` reads a payload's publishing time; None says that it isn't a batch with one."""
        self.trust = RankTrust()
        self._can_replay = can_replay
        self._ts_of = ts_of
        self._limits = limits
        self._ticket = 0
        self._asks = self._silences = 0
        self._replay: Replay | None = None
        self._is_cut = False  # the live socket lost its peer, and no other has come yet
        self._is_replay_foreign = False  # it keeps contradicting what comes live
        self._forget_life()

    def _forget_life(self, *, by_rebuild: bool = False) -> None:
        self._next: int | None = None
        """The number to apply next; None: nothing is known of this life."""
        self.trust.on_epoch(by_rebuild=by_rebuild)
        self._known = KnownBatches()
        self._fallen = FallenNumbers(self._known, self._ts_of)
        self._doubt: str | None = None
        """Why the publisher may be another process by now."""
        self._gap: GapOpened | None = None
        self._is_joining = self._is_rebuilding = False
        """A replay from 0 is under way and nothing of it has been lost; it is not the first."""
        self._has_beginning = True
        """As far as we know the publisher still buffers this life's first batch."""

    @property
    def last_seq(self) -> int | None:
        """Number of the batch applied last in this epoch."""
        return self._next - 1 if self._next else None

    @property
    def held_batches(self) -> int:
        return len(self._known.held)

    @property
    def replaying(self) -> Purpose | None:
        return self._replay.purpose if self._replay is not None else None

    def resume(self, seq: int, digest: int, trust: Trust) -> None:
        """Go on after batch `seq` of an earlier process, once replay has shown it again."""
        self._next, self._doubt = seq + 1, "resume"
        self._known.remember(seq, digest)
        self.trust.resume(trust, at=seq + 1)

    # What happened.

    def on_connected(self) -> list[Effect]:
        """The live socket has a peer."""
        self._asks = self._silences = 0
        self._is_replay_foreign = False
        if self._is_cut and self._next:
            self._doubt = self._doubt or "reconnect"
        self._is_cut = False
        is_due = self._replay is None and (self._next is None or self._doubt is not None)
        effects = self._advance() if is_due else []
        return [*effects, *self.trust.on_connected()]

    def on_disconnected(self) -> list[Effect]:
        """The live socket lost its peer: the next one may be another process."""
        self._asks = self._silences = 0
        self._is_cut = True
        if self._next:
            self._doubt = "reconnect"
        else:  # nothing applied yet; what waits may be the old process's
            self._forget_life()
        return [*self.trust.on_cut(), *self._abandon_replay()]

    def on_live(self, seq: int, payload: bytes) -> list[Effect]:
        """A batch arrived on the live socket."""
        if seq == self._next and self._replay is None and not self._doubt:
            return [self._apply(seq, payload)]
        if seq <= self._known.newest:
            return self._on_known_number(seq, payload)
        if seq != self._next and self._ts_of(payload) is None:
            # Its number proves nothing: following it would open a gap to nowhere.
            return [Dropped(seq, "undecodable")]
        self._known.hold(seq, payload)
        return self._advance()

    def on_replayed(self, ticket: int, seq: int, payload: bytes) -> list[Effect]:
        """A batch arrived on the replay socket."""
        replay = self._replay
        if replay is None or replay.ticket != ticket:
            return []
        if self._known.contradicts(seq, payload):
            return self._open_other_life()
        effects: list[Effect] = []
        if replay.first_seq is None:
            replay.first_seq = seq
            effects += self._on_first_answer(replay, seq)
        if seq >= (self._next or 0):
            self._known.hold(seq, payload)
        return [*effects, *self._flush(), *self._check_room()]

    def on_replay_end(self, ticket: int) -> list[Effect]:
        """The replay is complete, as far as the publisher knows."""
        replay = self._replay
        if replay is None or replay.ticket != ticket:
            return []
        if replay.is_contradicted_by_silence:
            return self._open_other_life()
        self._replay = None
        if replay.first_seq is None and replay.purpose is Purpose.JOIN:
            return [replay.ended(), *self._on_empty_life()]
        return [replay.ended(), *self._settle()]

    def on_replay_failed(self, ticket: int) -> list[Effect]:
        """The replay stopped without its end: no answer in time, or no connection."""
        replay = self._replay
        if replay is None or replay.ticket != ticket:
            return []
        self._replay = None
        if replay.first_seq is not None:
            return [ReplayEnded("cut"), *self._ask(Purpose.GAP)]
        self._silences += 1
        return [ReplayEnded("silent"), *self._ask(replay.purpose)]

    def on_applied(self, seq: int, outcome: BatchOutcome) -> list[Effect]:
        """Batch `seq` had its turn."""
        return self.trust.on_applied(seq, outcome, is_gap_open=self._gap is not None)

    def on_silence(self) -> list[Effect]:
        """The engine computes, and nothing comes: perhaps only the live socket is dead."""
        is_busy = self._replay is not None or self._next is None
        return [] if is_busy or not self._may_replay else self._ask(Purpose.GAP)

    @property
    def wants_rebuild(self) -> bool:
        """Being told the whole life again may help, and can be asked for now."""
        is_busy = self._replay is not None or self._doubt is not None or not self._next
        is_hopeless = not self._may_replay or not self._has_beginning
        return not is_busy and not is_hopeless and self.trust.is_healed_by_replay

    def on_rebuild_wanted(self) -> list[Effect]:
        """The time has come: start over, if the beginning can still be had."""
        return self._ask(Purpose.REBUILD) if self.wants_rebuild else []

    # Numbers already seen.

    def _on_known_number(self, seq: int, payload: bytes) -> list[Effect]:
        fallen = self._fallen.judge(seq, payload)
        if fallen is Fallen.RESTARTED:
            return self._restart(self._fallen.told)
        if fallen is not Fallen.LATE:
            return [Dropped(seq, fallen.value)]
        if seq >= (self._next or 0) and seq not in self._known.held:
            self._known.hold(seq, payload)  # it was overtaken on the way, and is missing
            return []
        return [Dropped(seq, fallen.value), *self._check_life_after_late_batch()]

    def _check_life_after_late_batch(self) -> list[Effect]:
        # A clock set back looks the same; one look per number settles it.
        if self._replay is not None or not self._fallen.is_worth_a_look(self._next):
            return []
        self._doubt = self._doubt or "late_batch"
        return self._advance()

    def _restart(self, told: Mapping[int, bytes]) -> list[Effect]:
        effects = self._abandon_replay()
        self._forget_life()
        self._asks = self._silences = 0
        for seq, payload in told.items():
            self._known.hold(seq, payload)
        return [*effects, OpenEpoch("restarted"), *self._advance()]

    # Going forward.

    def _apply(self, seq: int, payload: bytes, *, waited: bool = False) -> ApplyBatch:
        self._next = seq + 1
        self._known.applied(seq, payload)
        return ApplyBatch(seq, payload, waited)

    def _flush(self) -> list[Effect]:
        """Apply what is held and in order."""
        effects: list[Effect] = []
        held = self._known.held
        seq = self._next or 0
        while seq in held:
            effects.append(self._apply(seq, held.pop(seq), waited=True))
            seq += 1
        if self._gap is not None and seq > self._gap.last_seq:
            effects.append(GapRepaired(self._gap.first_seq, self._gap.last_seq))
            self._gap = None
        return effects

    def _advance(self) -> list[Effect]:
        """Apply what is in order and ask for what isn't."""
        if self._replay is not None:
            return self._check_room()
        effects: list[Effect] = []
        if not self._next:
            if 0 not in self._known.held:
                return self._ask(Purpose.JOIN)
            effects += self._begin_at_0()
        if self._doubt:
            return self._ask(Purpose.VERIFY)
        effects += self._flush()
        if not self._known.held:
            self._asks = self._silences = 0
            return effects
        return [*effects, *self._open_gap(), *self._ask(Purpose.GAP)]

    def _begin_at_0(self) -> list[Effect]:
        self._next = 0
        return self.trust.on_whole("joined_at_0")

    def _open_gap(self) -> list[Effect]:
        if self._gap is not None:
            return []
        self._gap = GapOpened(self._next or 0, min(self._known.held) - 1)
        return [self._gap]

    def _check_room(self) -> list[Effect]:
        if self.held_batches <= self._limits.max_held_batches:
            return []
        return [*self._abandon_replay(), *self._give_up()]

    def _give_up(self) -> list[Effect]:
        """Go on with what is there."""
        self._asks = self._silences = 0
        effects: list[Effect] = []
        if self._doubt:
            effects += self._lose(f"{self._doubt}_unverified")
            self._fallen.on_unproven(is_reconnected=self._doubt == "reconnect" and not self._is_cut)
        self._doubt = None
        for seq in sorted(self._known.held):
            effects += self._skip_to(seq)
            effects.append(self._apply(seq, self._known.held.pop(seq), waited=True))
        if self._next is None:
            effects += self.trust.on_nothing_known()
        # A beginning whose end nobody told isn't all of it.
        return [*effects, *(self._lose("replay_cut") if self._is_joining else [])]

    def _skip_to(self, seq: int) -> list[Effect]:
        """Go on at `seq`; what lies between is lost."""
        first, self._next = self._next, seq
        if not first:
            return self._begin_at_0() if seq == 0 else self._lose("joined_late")
        if first == seq:
            return []
        self._gap = None
        return [GapLost(first, seq - 1), *self._lose("gap_lost")]

    def _lose(self, reason: str) -> list[Effect]:
        self._is_joining = False
        return self.trust.on_loss(reason, at=self._next or 0)

    # Replay.

    @property
    def _may_replay(self) -> bool:
        return self._can_replay and not self._is_replay_foreign

    def _ask(self, purpose: Purpose) -> list[Effect]:
        limits = self._limits
        exhausted = self._asks >= limits.max_asks or self._silences >= limits.max_silences
        if exhausted or not self._may_replay:
            return self._give_up()
        self._asks += 1
        self._ticket += 1
        next_seq = self._next or 0
        from_seq = {Purpose.GAP: next_seq, Purpose.VERIFY: next_seq - 1}.get(purpose, 0)
        self._replay = Replay(
            ticket=self._ticket,
            purpose=purpose,
            from_seq=from_seq,
            knows_more=self._known.newest >= from_seq,
        )
        return [RequestReplay(from_seq, self._ticket)]

    def _abandon_replay(self) -> list[Effect]:
        if self._replay is None:
            return []
        self._replay = None
        return [ReplayEnded("abandoned")]

    def _on_first_answer(self, replay: Replay, seq: int) -> list[Effect]:
        if seq > 0 == replay.from_seq:
            self._has_beginning = False
        match replay.purpose:
            case Purpose.JOIN:
                return self._join_at(seq)
            case Purpose.GAP if seq > replay.from_seq:
                return self._skip_to(self._known.first_held_or(seq))
            case Purpose.VERIFY if seq == replay.from_seq:
                self._doubt = None
            case Purpose.VERIFY:
                # The ring no longer reaches back to what we know. Entries that nothing
                # vouches for may be a dead process's: they go.
                reason = f"{self._doubt}_unproven"
                self._forget_life()
                return [OpenEpoch(reason), *self._join_at(seq)]
            case Purpose.REBUILD if seq == 0:
                return self._rebuild()
            case _:
                pass
        return []

    def _rebuild(self) -> list[Effect]:
        held = self._known.held
        self._forget_life(by_rebuild=True)
        for seq, payload in held.items():
            self._known.hold(seq, payload)
        self._is_rebuilding = True
        return [OpenEpoch("rebuilt"), *self._join_at(0)]

    def _join_at(self, seq: int) -> list[Effect]:
        if seq > 0:
            return self._skip_to(self._known.first_held_or(seq))
        self._next = 0
        self._is_joining = True
        return []

    def _finish_join(self) -> list[Effect]:
        if not self._is_joining:
            return []
        self._is_joining = False
        return self.trust.on_whole("replayed", by_rebuild=self._is_rebuilding)

    def _on_empty_life(self) -> list[Effect]:
        """The publisher buffers nothing: it has published nothing, or we know better."""
        if self._known.held:
            return self._advance()
        self._next = 0
        self._asks = self._silences = 0
        return self.trust.on_whole("fresh")

    def _settle(self) -> list[Effect]:
        """A replay ended as it should: what it left open is asked for again."""
        effects = self._flush()
        if not self._known.held:
            self._asks = self._silences = 0
            return [*effects, *self._finish_join()]
        return [*effects, *self._advance()]

    def _open_other_life(self) -> list[Effect]:
        """Replay has shown that another process answers: forget, and join it from 0."""
        reason = f"{self._doubt or 'replay'}_contradicted"
        self._replay = None
        self._is_replay_foreign = self._asks >= self._limits.max_asks
        self._forget_life()
        return [ReplayEnded("contradicted"), OpenEpoch(reason), *self._ask(Purpose.JOIN)]
