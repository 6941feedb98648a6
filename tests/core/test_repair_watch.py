"""When a repair that is under way keeps a rank from being called exact."""

import math

import pytest

from indexer.core.repair_watch import RepairWatch
from indexer.core.replay import Purpose
from indexer.core.stream_effects import TrustChanged
from indexer.core.trust import RankTrust
from indexer.core.types import Trust

OVERDUE = [TrustChanged(Trust.DEGRADED, "gap_open")]
REPAIRED = [TrustChanged(Trust.EXACT, "repaired")]


@pytest.fixture
def trust() -> RankTrust:
    """Of a rank of which nothing is missing."""
    trust = RankTrust()
    trust.on_whole("fresh")
    return trust


@pytest.fixture
def watch(trust: RankTrust) -> RepairWatch:
    """With two seconds of grace."""
    return RepairWatch(trust, 2.0)


def test_repair_within_the_grace_is_no_news(watch: RepairWatch) -> None:
    """As all are of engines that are well."""
    assert watch.wait_s(9.0) == math.inf
    assert watch.look(Purpose.GAP, 10.0) == []
    assert watch.look(Purpose.GAP, 11.5) == []
    assert watch.wait_s(11.5) == 0.5

    assert watch.look(None, 11.9) == []
    assert watch.wait_s(11.9) == math.inf
    assert watch.look(Purpose.GAP, 12.5) == []


def test_repair_over_its_grace_lowers_trust_until_it_ends(watch: RepairWatch) -> None:
    """Said once, and nothing is waited for any more."""
    watch.look(Purpose.GAP, 10.0)

    assert watch.look(Purpose.GAP, 12.0) == OVERDUE
    assert watch.look(Purpose.GAP, 13.0) == []
    assert watch.wait_s(13.0) == math.inf
    assert watch.look(None, 14.0) == REPAIRED


def test_questions_that_follow_each_other_count_as_one(watch: RepairWatch) -> None:
    """Each answer that is cut leads to the next question."""
    watch.look(Purpose.VERIFY, 10.0)

    assert watch.look(Purpose.GAP, 12.0) == OVERDUE


def test_contradicted_leg_leaves_no_grace(watch: RepairWatch) -> None:
    """What is missing matters."""
    watch.look(Purpose.GAP, 10.0)
    watch.on_contradicted()

    assert watch.wait_s(10.0) == 0
    assert watch.look(Purpose.GAP, 10.0) == OVERDUE


@pytest.mark.parametrize("purpose", [None, Purpose.REBUILD])
def test_contradicted_leg_says_nothing_of_a_rank_without_a_repair(
    watch: RepairWatch, purpose: Purpose | None
) -> None:
    """Legs of other times are weighed one by one, and a rebuild is not for what is missing now."""
    watch.look(purpose, 10.0)
    watch.on_contradicted()

    assert watch.look(purpose, 10.0) == []


def test_loss_takes_over_from_the_repair_that_failed(watch: RepairWatch, trust: RankTrust) -> None:
    """It stands when the repair has ended."""
    watch.look(Purpose.GAP, 10.0)
    watch.look(Purpose.GAP, 12.0)

    assert trust.on_loss("gap_lost", at=5) == [TrustChanged(Trust.DEGRADED, "gap_lost")]
    assert watch.look(None, 13.0) == []


def test_life_that_cannot_be_joined_in_time_is_not_called_exact(
    watch: RepairWatch, trust: RankTrust
) -> None:
    """The last word was of the life before; a new one that is told at last is believed."""
    trust.on_epoch()
    watch.look(Purpose.JOIN, 10.0)

    assert watch.look(Purpose.JOIN, 12.0) == [TrustChanged(Trust.DEGRADED, "joining")]
    trust.on_whole("replayed")
    assert watch.look(None, 13.0) == REPAIRED


def test_first_life_that_cannot_be_joined_stays_unknown() -> None:
    """Nothing was known before either."""
    trust = RankTrust()
    watch = RepairWatch(trust, 2.0)
    watch.look(Purpose.JOIN, 10.0)

    assert watch.look(Purpose.JOIN, 12.0) == []
    assert watch.look(None, 13.0) == []
    assert trust.level is Trust.LOAD_ONLY


def test_interleaved_lives_stay_unbelieved(watch: RepairWatch, trust: RankTrust) -> None:
    """Whatever is asked for."""
    trust.on_interleaved()
    watch.look(Purpose.GAP, 10.0)

    assert watch.look(Purpose.GAP, 12.0) == []
