"""Two publishers that take turns under one rank's name, and one that merely restarts."""

import pytest

from indexer.core.interleaving import Interleaving
from indexer.core.stream_effects import TrustChanged
from indexer.core.trust import RankTrust
from indexer.core.types import Trust


def test_lives_that_no_lost_connection_explains_are_suspicious() -> None:
    """One or two may be chance; whoever restarts in earnest loses its connection."""
    lives = Interleaving()
    assert [lives.on_epoch("restarted") for _ in range(4)] == [False, False, True, True]


def test_lives_after_lost_connections_are_restarts() -> None:
    """However many there are."""
    lives = Interleaving()
    for _ in range(10):
        lives.on_connection_lost()
        assert not lives.on_epoch("reconnect_contradicted")


@pytest.mark.parametrize("reason", ["started", "rebuilt", "cache_dropped"])
def test_epochs_of_our_own_say_nothing_of_the_publisher(reason: str) -> None:
    """They begin without a word of it."""
    lives = Interleaving()
    assert not any(lives.on_epoch(reason) for _ in range(10))


def test_life_that_lasts_ends_the_suspicion() -> None:
    """Once; and what came before it counts no more."""
    lives = Interleaving()
    for _ in range(3):
        lives.on_epoch("restarted")
    ends = [lives.on_batch() for _ in range(2000)]

    assert (ends.index(True), ends.count(True)) == (999, 1)
    assert not lives.on_epoch("restarted")


def test_interleaved_rank_is_not_believed_in_any_epoch_until_it_is_untangled() -> None:
    """A new life proves nothing: the other publisher opens the next."""
    trust = RankTrust()
    trust.on_epoch()
    trust.on_whole("fresh")
    assert trust.on_interleaved() == [TrustChanged(Trust.LOAD_ONLY, "interleaved")]
    trust.on_epoch()

    assert trust.on_whole("fresh") == []
    assert trust.on_untangled() == [TrustChanged(Trust.EXACT, "untangled")]


def test_interleaved_rank_is_not_told_anew() -> None:
    """A replay would tell the life of one publisher, and the next batch may be the other's."""
    trust = RankTrust()
    trust.on_epoch()
    trust.on_loss("gap_lost", at=7)
    healed = [trust.is_healed_by_replay]
    trust.on_interleaved()
    healed.append(trust.is_healed_by_replay)

    assert trust.on_untangled() == [TrustChanged(Trust.DEGRADED, "gap_lost")]
    assert [*healed, trust.is_healed_by_replay] == [True, False, True]
