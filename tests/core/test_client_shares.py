"""Shares of one line: who is known, for how long, and what leaving costs."""

from balancer.core.routing.client_shares import ClientShares


def serve(shares: ClientShares, client: str, cost: float) -> None:
    """It comes, is served and leaves."""
    shares.enter(client)
    shares.serve(client, cost)
    shares.leave(client)


def test_what_is_served_moves_its_client_on() -> None:
    """And the line's progress to where the client was: others begin there."""
    shares = ClientShares(9)
    for _ in range(3):
        shares.enter("a")
    shares.serve("a", 100)
    shares.serve("a", 50)

    assert (shares.begin("a"), shares.begin("b")) == (150, 100)


def test_who_was_served_is_known_until_others_have_had_as_much() -> None:
    """Who asks again at once would else go before all others."""
    shares = ClientShares(9)
    serve(shares, "a", 100)
    known = shares.begin("a")
    for _ in range(3):
        serve(shares, "b", 60)
    shares.enter("a")
    shares.leave("a")

    assert known == 100
    assert shares.begin("a") == 120
    assert len(shares) == 1


def test_who_waits_keeps_its_turn_while_others_are_served() -> None:
    """It began to wait where the line was then."""
    shares = ClientShares(9)
    shares.enter("patient")
    for _ in range(3):
        serve(shares, "b", 60)

    assert shares.begin("patient") == 0
    assert shares.begin("newcomer") == 120


def test_who_leaves_unserved_has_used_nothing() -> None:
    """Whoever of the same client came before it or after it."""
    shares = ClientShares(9)
    shares.enter("a")
    shares.enter("a")
    shares.leave("a")
    begin = shares.begin("a")
    shares.leave("a")

    assert begin == 0
    assert len(shares) == 0


def test_only_so_many_are_known_that_do_not_wait() -> None:
    """The last ones; those that wait are known beside them."""
    shares = ClientShares(2)
    shares.enter("waiting")
    for name in "abc":
        serve(shares, name, 100)
    known, begins = len(shares), [shares.begin(name) for name in "abc"]
    shares.clear()

    assert (known, begins) == (3, [0, 100, 100])
    assert len(shares) == 0
