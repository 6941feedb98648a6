"""How far one rank's entries can be believed, why, and the way back.

Rules:

1. Ten things keep a rank from being exact: a cut (the live socket has no peer, so what happens now
   is not heard), not having been heard (on a socket that several ranks share: since it lost a peer,
   or at all), silence (the engine computes and publishes nothing), a loss (numbers that never
   came, or can't be proved), refused events (numbers that came and couldn't be used), groups
   that aren't followed (all that the engine stores is of them), the bound of its tables (blocks left
   that the engine has), orphans (blocks whose parent is unknown), contradictions (finished legs found
   other blocks cached than were told of, `core.witness`), and a repair that is overdue (numbers are
   missing, or in doubt, and replay hasn't brought them within a grace, `core.repair_watch`). It is
   DEGRADED while any of them stands; the reason is the first of that order.
2. Ways back. From a cut: a connection, or a batch; what was missed meanwhile shows then. From not
   having been heard: a live message, since a replay comes another way. From silence: the next batch.
   From a loss: a complete replay, or a clear after it. From refused events and the bound: a clear
   after them, or a new epoch without any. From groups that aren't followed: a store that is taken, or
   a clear. From orphans: none are left. From contradictions: a complete replay, a clear, or legs that
   agree. From a repair that is overdue: it has ended; what it couldn't bring is a loss from then on.
3. A replay is worth asking for after a loss; for orphans until one complete replay has brought no
   parent: then the engine never announced it, or has dropped it since; for contradictions, but for
   doubts, until one complete replay has not ended them. Once the bound was hit both may be because of it.
4. A new epoch forgets what stood against the old one, silently: until it has been joined the last
   word stays, and only the join says otherwise, unless it is overdue: exact is not said of a life
   that is hardly known. A rebuild is of the same engine: what it told before
   doesn't end its silence.
5. While two publishers take turns under its name (`core.interleaving`) nothing of it is believed,
   through all epochs.
6. A change of level, or of the reason for a lower one, is reported once.

Cost: constant.
"""

from typing import Final, assert_never

from indexer.core.stream_effects import BatchOutcome, Effect, TrustChanged
from indexer.core.types import Trust
from indexer.core.witness import Evidence

_DOUBTED: Final = Evidence.DOUBTED.value
"""What makes blocks doubtful is known already: being told again would say the same."""


class RankTrust:
    """Trust of one rank. It starts with nothing known."""

    def __init__(self) -> None:
        self.level = Trust.LOAD_ONLY
        self.reason = "no_events_yet"
        self._is_cut = False
        self._is_unheard = False
        self._is_interleaved = False
        self._overdue: str | None = None
        """What has not been repaired in time."""
        self._is_joined = False
        """What this epoch began with is known, or known to be lost."""
        self._forget()

    def _forget(self) -> None:
        self._loss: str | None = None
        self._lost_at = 0
        """First number after the newest loss."""
        self._refused_at: int | None = None
        """First number after the newest refused event."""
        self._bound_hit_at: int | None = None
        """First number after the newest block that had to leave."""
        self._is_unfollowed = False
        self._orphans = 0
        self._contradiction: str | None = None
        self._is_silent = False
        self._newest = -1
        """Number of the newest batch that had its turn."""
        self._is_replay_tried = False
        """A complete replay has told all there is to tell."""

    def resume(self, level: Trust, *, at: int) -> None:
        """Another process left off before number `at`; what lowered trust then still stands."""
        self.level, self.reason, self._is_joined = level, "resumed", True
        if level is not Trust.EXACT:
            self._loss, self._lost_at = "resumed", at

    @property
    def is_healed_by_replay(self) -> bool:
        """What was refused once would be refused again; anything else is worth a replay."""
        is_untold = self._orphans > 0 or self._contradiction not in {None, _DOUBTED}
        is_hopeless = self._is_replay_tried or self._bound_hit_at is not None
        if self._is_interleaved:
            return False  # it would be told one publisher's life
        return self._loss is not None or (is_untold and not is_hopeless)

    def on_epoch(self, *, by_rebuild: bool = False) -> None:
        """Nothing that stood against the old epoch matters any more."""
        said = self._is_silent, self._newest
        self._is_joined = False
        self._forget()
        if by_rebuild:
            self._is_silent, self._newest = said

    def on_nothing_known(self) -> list[Effect]:
        """Nobody could tell anything about this epoch."""
        return self._report(Trust.LOAD_ONLY, "nothing_known")

    def on_whole(self, reason: str, *, by_rebuild: bool = False) -> list[Effect]:
        """Nothing of this epoch is missing; `by_rebuild`: a replay has just told all of it."""
        self._loss = None
        self._is_replay_tried = by_rebuild
        return self._join(reason)

    def on_loss(self, reason: str, *, at: int) -> list[Effect]:
        """Something before number `at` was lost or can't be proved."""
        self._loss = self._loss or reason
        self._lost_at = at
        return self._join(reason)

    def on_refused(self, *, at: int) -> list[Effect]:
        """Something before number `at` came and could not be used."""
        self._refused_at = at
        return self._weigh("")

    def on_bound_hit(self, *, at: int) -> list[Effect]:
        """Blocks of before number `at` had to leave though the engine has them."""
        self._bound_hit_at = at
        return self._weigh("")

    def on_orphans(self, orphans: int) -> list[Effect]:
        """So many blocks wait for their parent now."""
        if orphans == self._orphans:
            return []
        self._orphans = orphans
        return self._weigh("orphans_gone")

    def on_applied(self, seq: int, outcome: BatchOutcome, *, is_gap_open: bool) -> list[Effect]:
        """Batch `seq` had its turn."""
        effects = self.on_heard() if seq > self._newest else []
        self._newest = max(seq, self._newest)
        if outcome.is_cleared and not is_gap_open:
            effects += self.on_cleared(seq)
        if outcome.has_refusals:
            effects += self.on_refused(at=seq + 1)
        if outcome.is_bound_hit:
            effects += self.on_bound_hit(at=seq + 1)
        if outcome.is_unfollowed is not self._is_unfollowed:
            self._is_unfollowed = outcome.is_unfollowed
            effects += self._weigh("followed")
        return [*effects, *self.on_orphans(outcome.orphans)]

    def on_cleared(self, seq: int) -> list[Effect]:
        """Batch `seq` said that the cache is empty: nothing older matters any more."""
        if seq >= self._lost_at:
            self._loss = None
        if self._refused_at is not None and seq >= self._refused_at:
            self._refused_at = None
        if self._bound_hit_at is not None and seq >= self._bound_hit_at:
            self._bound_hit_at = None
        self._orphans = 0
        self._contradiction = None
        return self._weigh("cleared")

    def on_evidence(self, evidence: Evidence) -> list[Effect]:
        """Finished legs have shown something."""
        match evidence:
            case Evidence.SILENT:
                self._is_silent = True
            case Evidence.UNSEEN_BLOCKS | Evidence.MISPREDICTED:
                if self._contradiction in {None, _DOUBTED}:
                    self._contradiction = evidence.value
            case Evidence.DOUBTED:
                self._contradiction = self._contradiction or _DOUBTED
            case Evidence.AGREED:
                if self._contradiction is not None:
                    self._contradiction = None
                    self._is_replay_tried = False
            case Evidence.INDEX_DIFFERS | Evidence.CONTRADICTED:
                pass  # of the index, which is written anew; of one leg
            case _:
                assert_never(evidence)
        return self._weigh("agreed")

    def on_overdue(self, reason: str) -> list[Effect]:
        """What is known to be missing, or is in doubt, has not come in time."""
        self._overdue = reason
        return self._weigh("")

    def on_repair_ended(self) -> list[Effect]:
        """It has come, or was given up."""
        if self._overdue is None:
            return []
        self._overdue = None
        return self._weigh("repaired")

    def on_cut(self) -> list[Effect]:
        """The live socket lost its peer."""
        self._is_cut = True
        return self._weigh("")

    def on_connected(self) -> list[Effect]:
        """It has one."""
        self._is_cut = False
        return self._weigh("reconnected")

    def on_unheard(self) -> list[Effect]:
        """Whether the live socket's peers are ours can't be told before one is heard."""
        self._is_unheard = True
        return self._weigh("")

    def on_present(self) -> list[Effect]:
        """The rank's own publisher was heard on the live socket."""
        self._is_cut = self._is_unheard = False
        return self._weigh("heard_again")

    def on_heard(self) -> list[Effect]:
        """A batch has come that was not known. So there is a peer, whether we were told or not."""
        if not self._is_silent and not self._is_cut:
            return []
        self._is_silent = self._is_cut = False
        return self._weigh("heard_again")

    def on_interleaved(self) -> list[Effect]:
        """Two publishers take turns under its name."""
        self._is_interleaved = True
        return self._report(Trust.LOAD_ONLY, "interleaved")

    def on_untangled(self) -> list[Effect]:
        """Only one has for long enough."""
        self._is_interleaved = False
        return self._weigh("untangled")

    def _join(self, reason: str) -> list[Effect]:
        self._is_joined = True
        return self._weigh(reason)

    def _weigh(self, way_back: str) -> list[Effect]:
        if self._is_interleaved:
            return []
        if not self._is_joined:
            is_shaken = self._overdue is not None and self.level is Trust.EXACT
            return self._report(Trust.DEGRADED, self._overdue or "") if is_shaken else []
        standing = (
            "disconnected" if self._is_cut else None,
            "unheard" if self._is_unheard else None,
            "silent" if self._is_silent else None,
            self._loss,
            "events_refused" if self._refused_at is not None else None,
            "unsupported_group" if self._is_unfollowed else None,
            "bound_hit" if self._bound_hit_at is not None else None,
            "orphans" if self._orphans else None,
            self._contradiction,
            self._overdue,
        )
        reason = next(filter(None, standing), None)
        if reason is None:
            return self._report(Trust.EXACT, way_back)
        return self._report(Trust.DEGRADED, reason)

    def _report(self, level: Trust, reason: str) -> list[Effect]:
        is_same_level = level is self.level
        if is_same_level and (level is not Trust.DEGRADED or reason == self.reason):
            return []
        self.level, self.reason = level, reason
        return [TrustChanged(level, reason)]
