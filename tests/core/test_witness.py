"""What finished legs prove of a rank when they are taken together."""

import pytest

from indexer.core.contradictions import Cause
from indexer.core.reports import CacheReport, RankTally
from indexer.core.types import BlockKey, InstanceId, RankId
from indexer.core.witness import (
    AGREED_NEEDED,
    GRACE_S,
    MAX_PENDING,
    RETRY_S,
    SILENT_LEGS,
    SLACK_S,
    Evidence,
    RankWitness,
)

RANK = RankId(InstanceId("http://e0:8000"), 0)
SILENT_AFTER_S = 10.0


def report(*, age_s: float = 0.0, short_blocks: int = 2) -> CacheReport:
    return CacheReport(
        rank=RANK,
        epoch=1,
        age_s=age_s,
        block_size=16,
        predicted_tokens=160,
        cached_tokens=160 - 16 * short_blocks,
        key=BlockKey(1),
    )


def tally(*, agreed: int = 0, computing_legs: int = 0, age_s: float = 0.0) -> RankTally:
    return RankTally(rank=RANK, epoch=1, agreed=agreed, computing_legs=computing_legs, age_s=age_s)


@pytest.fixture
def witness() -> RankWitness:
    return RankWitness(1, SILENT_AFTER_S)


def test_contradiction_is_due_at_once(witness: RankWitness) -> None:
    """And the index was asked as long ago as the age says, or a little longer."""
    assert witness.take_due(100.0) is None
    was_waiting = witness.is_waiting

    assert witness.hear(report(age_s=3.0), 100.0) == []
    assert (was_waiting, witness.is_waiting) == (False, True)
    due = witness.take_due(100.0)

    assert due is not None
    assert due.matched_s == 97.0 - SLACK_S
    assert witness.take_due(100.0) is None


def test_what_may_be_told_yet_is_weighed_again_for_a_while(witness: RankWitness) -> None:
    """Then it is the last word."""
    witness.hear(report(), 100.0)
    due = witness.take_due(100.0)
    assert due is not None

    assert witness.postpone(due, Cause.UNSEEN, 100.0)
    assert witness.take_due(100.0 + RETRY_S / 2) is None
    assert witness.take_due(100.0 + RETRY_S) == due
    assert witness.postpone(due, Cause.RECOMPUTE_UNTOLD, 100.0 + GRACE_S / 2)
    assert witness.take_due(101.0) == due
    assert not witness.postpone(due, Cause.UNSEEN, 100.0 + GRACE_S)


def test_what_is_sure_is_not_weighed_again(witness: RankWitness) -> None:
    """A ghost stays one."""
    witness.hear(report(), 100.0)
    due = witness.take_due(100.0)
    assert due is not None

    assert not witness.postpone(due, Cause.GHOST, 100.0)


def test_only_so_many_wait(witness: RankWitness) -> None:
    """The others are counted."""
    for _ in range(MAX_PENDING + 2):
        witness.hear(report(), 0.0)

    assert witness.overflown == 2


def test_three_unseen_prove_a_gap(witness: RankWitness) -> None:
    """Told once; then counting begins anew."""
    judged = [witness.judge(Cause.UNSEEN) for _ in range(6)]

    assert judged == [[], [], [Evidence.UNSEEN_BLOCKS]] * 2


def test_five_broken_promises_prove_it_of_the_tables(witness: RankWitness) -> None:
    """Whatever broke them, unless events explained it."""
    causes = [Cause.GHOST, Cause.EVICTED_SINCE, Cause.GHOST, Cause.OTHER_GROUPS, Cause.GHOST]

    assert [witness.judge(cause) for cause in causes] == [[]] * 5
    assert witness.judge(Cause.GHOST) == [Evidence.MISPREDICTED]


def test_three_promises_the_tables_never_made_prove_it_of_the_index(witness: RankWitness) -> None:
    """Not the first: what is removed and stored in one write may look like it."""
    judged = [witness.judge(Cause.INDEX_DIFFERS) for _ in range(4)]

    assert judged == [[], [], [Evidence.INDEX_DIFFERS], []]


def test_index_that_isn_t_written_yet_is_looked_at_again(witness: RankWitness) -> None:
    """What left the tables just now is in it still."""
    witness.hear(report(), 100.0)
    pending = witness.take_due(100.0)
    assert pending is not None

    cause = Cause.INDEX_DIFFERS
    assert witness.postpone(pending, cause, 100.0, is_unwritten=True)
    assert not witness.postpone(pending, cause, 100.0)
    assert not witness.postpone(pending, cause, 100.0 + GRACE_S, is_unwritten=True)


def test_legs_that_agree_push_old_faults_out_of_sight(witness: RankWitness) -> None:
    """Only the last twenty count."""
    for _ in range(4):
        witness.judge(Cause.GHOST)
    witness.hear(tally(agreed=19), 0.0)

    assert witness.judge(Cause.GHOST) == []


def test_twenty_in_a_row_that_agree_take_it_back(witness: RankWitness) -> None:
    """What is explained doesn't break the row, what isn't does."""
    assert witness.hear(tally(agreed=AGREED_NEEDED - 1), 0.0) == []
    witness.judge(Cause.EVICTED_SINCE)
    assert witness.hear(tally(agreed=1), 0.0) == [Evidence.AGREED]

    assert witness.hear(tally(agreed=AGREED_NEEDED - 1), 0.0) == []
    witness.judge(Cause.GHOST)
    assert witness.hear(tally(agreed=1), 0.0) == []


def test_rank_that_is_always_one_block_short_drafts(witness: RankWitness) -> None:
    """Until it has been exact once: then one block short is a block missing."""
    assert witness.is_drafting(report(short_blocks=1))
    assert not witness.is_drafting(report(short_blocks=2))

    witness.hear(tally(agreed=1), 0.0)

    assert not witness.is_drafting(report(short_blocks=1))


def test_legs_that_compute_and_no_batch_mean_silence(witness: RankWitness) -> None:
    """Told once, when the first of them was told of long enough ago."""
    for number in range(SILENT_LEGS):
        witness.hear(tally(computing_legs=1), 100.0 + number)

    assert witness.check_silence(100.0 + SILENT_AFTER_S - 1, 50.0) == []
    assert witness.check_silence(100.0 + SILENT_AFTER_S, 50.0) == [Evidence.SILENT]
    assert witness.check_silence(100.0 + SILENT_AFTER_S + 1, 50.0) == []


def test_a_few_legs_are_no_silence(witness: RankWitness) -> None:
    """One may have been cut off before it computed anything."""
    witness.hear(tally(computing_legs=SILENT_LEGS - 1), 100.0)

    assert witness.check_silence(1000.0, None) == []


def test_batch_after_the_lookup_answers_for_the_leg(witness: RankWitness) -> None:
    """Silence is counted anew from then on, and told anew."""
    witness.hear(tally(computing_legs=9), 100.0)
    assert witness.check_silence(200.0, None) == [Evidence.SILENT]

    assert witness.check_silence(201.0, 150.0) == []
    witness.hear(tally(computing_legs=9, age_s=1.0), 202.0)

    assert witness.check_silence(202.0 + SILENT_AFTER_S, 150.0) == [Evidence.SILENT]


def test_batch_before_the_lookup_answers_for_nothing(witness: RankWitness) -> None:
    """The engine has computed since, and said nothing."""
    witness.hear(tally(computing_legs=SILENT_LEGS, age_s=2.0), 100.0)

    assert witness.check_silence(120.0, 97.0) == [Evidence.SILENT]
