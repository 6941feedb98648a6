"""Shares of one line: who is known, for how long, and what leaving costs."""

from balancer.core.routing.client_shares import ClientShares


def test_share_begins_where_the_last_one_ended() -> None:
    """Or at the line's progress, if that is later."""
    shares = ClientShares(9)
    first = shares.enter("a", 100)
    second = shares.enter("a", 50)
    shares.leave(first, is_served=True)
    shares.leave(second, is_served=True)

    assert (first.begin, second.begin) == (0, 100)
    assert (shares.begin("a"), shares.begin("b")) == (150, 100)


def test_who_was_served_is_known_until_others_have_had_as_much() -> None:
    """Who asks again at once would else go before all others."""
    shares = ClientShares(9)
    shares.leave(shares.enter("a", 100), is_served=True)
    known = shares.begin("a")
    for _ in range(3):
        shares.leave(shares.enter("b", 60), is_served=True)
    shares.leave(shares.enter("a", 1), is_served=False)

    assert known == 100
    assert shares.begin("a") == 120
    assert len(shares) == 1


def test_who_leaves_unserved_has_used_nothing() -> None:
    """Unless more of the same client came after it."""
    shares = ClientShares(9)
    for _ in range(3):
        shares.leave(shares.enter("a", 100), is_served=False)
    gone = len(shares)
    first, _ = shares.enter("a", 100), shares.enter("a", 100)
    shares.leave(first, is_served=False)

    assert gone == 0
    assert shares.begin("a") == 200


def test_only_so_many_are_known_that_do_not_wait() -> None:
    """The last ones; those that wait are known beside them."""
    shares = ClientShares(2)
    waiting = shares.enter("waiting", 70)
    for name in "abc":
        shares.leave(shares.enter(name, 100), is_served=True)

    assert len(shares) == 3
    assert [shares.begin(name) for name in "abc"] == [0, 100, 100]
    shares.clear()
    assert len(shares) == 0
    assert waiting.end == 70
