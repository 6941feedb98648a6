"""What lowers trust in a rank, what stands before what, and the ways back."""

from collections.abc import Callable
from functools import partial

from indexer.core.stream_effects import BatchOutcome, TrustChanged
from indexer.core.trust import RankTrust
from indexer.core.types import Trust
from indexer.core.witness import Evidence


def whole() -> RankTrust:
    """Trust of a rank of which nothing is missing."""
    trust = RankTrust()
    assert trust.on_whole("fresh") == [TrustChanged(Trust.EXACT, "fresh")]
    return trust


def test_nothing_is_known_in_the_beginning() -> None:
    """And it is no news that nobody answered."""
    trust = RankTrust()

    assert (trust.level, trust.reason) == (Trust.LOAD_ONLY, "no_events_yet")
    assert trust.on_nothing_known() == []


def test_first_reason_stands_until_it_is_healed() -> None:
    """A second loss is no news, orphans and refused events stand behind a loss."""
    trust = whole()

    assert trust.on_loss("gap_lost", at=5) == [TrustChanged(Trust.DEGRADED, "gap_lost")]
    assert trust.on_loss("reconnect_unverified", at=7) == []
    assert trust.on_orphans(3) == []
    assert trust.on_refused(at=9) == []
    assert trust.on_whole("replayed") == [TrustChanged(Trust.DEGRADED, "events_refused")]


def test_loss_takes_over_from_a_lesser_reason() -> None:
    """The operator sees the worst of what stands."""
    trust = whole()

    assert trust.on_orphans(1) == [TrustChanged(Trust.DEGRADED, "orphans")]
    assert trust.on_refused(at=2) == [TrustChanged(Trust.DEGRADED, "events_refused")]
    assert trust.on_loss("gap_lost", at=5) == [TrustChanged(Trust.DEGRADED, "gap_lost")]


def test_number_of_orphans_is_no_news_while_there_are_any() -> None:
    """Only the first and the last."""
    trust = whole()
    trust.on_orphans(1)

    assert trust.on_orphans(2) == []
    assert trust.on_orphans(0) == [TrustChanged(Trust.EXACT, "orphans_gone")]
    assert trust.on_orphans(0) == []


def test_clear_heals_only_what_came_before_it() -> None:
    """A batch's own clear doesn't vouch for what was refused in it."""
    trust = whole()
    trust.on_refused(at=6)

    assert trust.on_cleared(5) == []
    assert trust.on_cleared(6) == [TrustChanged(Trust.EXACT, "cleared")]


def test_clear_takes_orphans_along() -> None:
    """Whatever waited is gone."""
    trust = whole()
    trust.on_orphans(4)

    assert trust.on_cleared(0) == [TrustChanged(Trust.EXACT, "cleared")]


def test_epoch_that_is_being_joined_keeps_the_last_word() -> None:
    """Half a replay proves nothing, neither good nor bad."""
    trust = whole()
    trust.on_loss("gap_lost", at=5)
    trust.on_epoch()

    assert trust.on_orphans(2) == []
    assert trust.on_orphans(0) == []
    assert trust.on_refused(at=1) == []
    assert trust.on_cleared(2) == []
    assert trust.level is Trust.DEGRADED
    assert trust.on_whole("replayed") == [TrustChanged(Trust.EXACT, "replayed")]


def test_unknown_life_is_reported() -> None:
    """A replay socket that is someone else's leaves nothing to believe."""
    trust = whole()
    trust.on_epoch()

    assert trust.on_nothing_known() == [TrustChanged(Trust.LOAD_ONLY, "nothing_known")]


def test_replay_helps_against_losses_and_new_orphans_only() -> None:
    """A refused event would be refused again; orphans that outlive a rebuild are the engine's."""
    trust = whole()
    steps: list[Callable[[], object]] = [
        lambda: None,
        partial(trust.on_refused, at=1),
        partial(trust.on_orphans, 1),
        partial(trust.on_whole, "replayed", by_rebuild=True),
        partial(trust.on_loss, "gap_lost", at=5),
    ]
    helps = []
    for step in steps:
        step()
        helps.append(trust.is_healed_by_replay)

    assert helps == [False, False, True, False, True]


def test_bound_stands_until_a_clear_and_makes_replays_useless() -> None:
    """What had to leave would have to leave again; parents are missing because of it."""
    trust = whole()
    trust.on_orphans(1)

    assert trust.on_bound_hit(at=5) == [TrustChanged(Trust.DEGRADED, "bound_hit")]
    assert trust.on_bound_hit(at=9) == []
    assert not trust.is_healed_by_replay
    assert trust.on_cleared(8) == []
    assert trust.on_cleared(9) == [TrustChanged(Trust.EXACT, "cleared")]


def test_contradictions_lower_trust_and_a_complete_replay_raises_it() -> None:
    """They stand behind everything else, and the first of them is told."""
    trust = whole()

    lowered = trust.on_evidence(Evidence.UNSEEN_BLOCKS)
    assert lowered == [TrustChanged(Trust.DEGRADED, "unseen_blocks")]
    assert trust.is_healed_by_replay
    assert trust.on_evidence(Evidence.MISPREDICTED) == []
    assert trust.on_orphans(1) == [TrustChanged(Trust.DEGRADED, "orphans")]

    trust.on_epoch()
    assert trust.on_whole("replayed", by_rebuild=True) == [TrustChanged(Trust.EXACT, "replayed")]


def test_contradictions_that_outlive_a_replay_are_not_replayed_again() -> None:
    """The engine told the same again. Legs that agree take it back, and the next is replayed."""
    trust = whole()
    trust.on_epoch()
    trust.on_whole("replayed", by_rebuild=True)

    trust.on_evidence(Evidence.MISPREDICTED)
    assert not trust.is_healed_by_replay
    assert trust.on_evidence(Evidence.AGREED) == [TrustChanged(Trust.EXACT, "agreed")]
    assert trust.on_evidence(Evidence.AGREED) == []

    trust.on_evidence(Evidence.MISPREDICTED)
    assert trust.is_healed_by_replay


def test_clear_takes_contradictions_along() -> None:
    """What was wrong is gone with everything else."""
    trust = whole()
    trust.on_evidence(Evidence.MISPREDICTED)

    assert trust.on_cleared(7) == [TrustChanged(Trust.EXACT, "cleared")]


def test_silence_stands_before_all_else_until_something_is_heard() -> None:
    """Nothing else can be judged meanwhile."""
    trust = whole()
    assert trust.on_heard() == []
    trust.on_loss("gap_lost", at=3)

    assert trust.on_evidence(Evidence.SILENT) == [TrustChanged(Trust.DEGRADED, "silent")]
    assert trust.on_heard() == [TrustChanged(Trust.DEGRADED, "gap_lost")]


def test_evidence_before_a_rank_is_joined_waits() -> None:
    """Until then nothing is believed anyway."""
    trust = RankTrust()

    assert trust.on_evidence(Evidence.SILENT) == []
    assert trust.on_whole("fresh") == [TrustChanged(Trust.DEGRADED, "silent")]


def test_index_that_differs_from_the_tables_says_nothing_of_the_rank() -> None:
    """It is written anew; the tables are as true as they were."""
    trust = whole()

    assert trust.on_evidence(Evidence.INDEX_DIFFERS) == []
    assert trust.level is Trust.EXACT


def test_rebuild_does_not_end_silence() -> None:
    """What is told anew was told before; a number that wasn't known is news."""
    trust = whole()
    plain = BatchOutcome()
    trust.on_applied(4, plain, is_gap_open=False)
    trust.on_evidence(Evidence.SILENT)

    trust.on_epoch(by_rebuild=True)
    trust.on_whole("rebuilt", by_rebuild=True)
    for seq in range(5):
        trust.on_applied(seq, plain, is_gap_open=False)
    retold = (trust.level, trust.reason)

    assert retold == (Trust.DEGRADED, "silent")
    assert trust.on_applied(5, plain, is_gap_open=False) == [
        TrustChanged(Trust.EXACT, "heard_again")
    ]


def test_cut_connection_lowers_trust_until_there_is_another() -> None:
    """What happens meanwhile is not heard."""
    trust = whole()

    assert trust.on_cut() == [TrustChanged(Trust.DEGRADED, "disconnected")]
    assert trust.on_connected() == [TrustChanged(Trust.EXACT, "reconnected")]
    assert trust.on_connected() == []


def test_rank_of_a_shared_socket_is_in_doubt_until_it_is_heard() -> None:
    """Neither another peer nor a replayed batch says that its own publisher is there."""
    trust = whole()

    assert trust.on_unheard() == [TrustChanged(Trust.DEGRADED, "unheard")]
    assert trust.on_cut() == [TrustChanged(Trust.DEGRADED, "disconnected")]
    assert trust.on_connected() == [TrustChanged(Trust.DEGRADED, "unheard")]
    assert trust.on_applied(1, BatchOutcome(), is_gap_open=False) == []
    assert trust.on_present() == [TrustChanged(Trust.EXACT, "heard_again")]


def test_new_batch_says_that_there_is_a_peer() -> None:
    """Though nobody told of the connection."""
    trust = whole()
    trust.on_cut()

    effects = trust.on_applied(1, BatchOutcome(), is_gap_open=False)

    assert effects == [TrustChanged(Trust.EXACT, "heard_again")]


def test_rank_of_groups_that_are_not_followed_is_degraded_until_a_store_is_taken() -> None:
    """What it holds isn't known, so nothing that is said of it is exact."""
    trust = whole()
    refused = BatchOutcome(is_unfollowed=True)

    assert trust.on_applied(0, refused, is_gap_open=False) == [
        TrustChanged(Trust.DEGRADED, "unsupported_group")
    ]
    assert trust.on_applied(1, refused, is_gap_open=False) == []
    assert trust.on_applied(2, BatchOutcome(), is_gap_open=False) == [
        TrustChanged(Trust.EXACT, "followed")
    ]
