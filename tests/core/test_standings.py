"""Standings: who is held back from new requests, and who never is."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.snapshot import Instance
from balancer.core.reliability.breaker import Phase
from balancer.core.reliability.standings import Attempt, Outcome, Standings
from balancer.core.reliability.vetting import NoVetting
from balancer.core.settings.reliability import ReliabilitySettings
from indexer.core.types import InstanceId, RankId

A, B, C = (Instance(id=InstanceId(f"http://{n}:1"), alias=n, ranks=(0, 1)) for n in "abc")
FLEET = (A, B, C)
NOBODY: frozenset[RankId] = frozenset()


def made(**settings: Any) -> Standings:
    return Standings(ReliabilitySettings(**({"breaker_failures": 2} | settings)))


def leg(
    standings: Standings,
    instance: Instance,
    outcome: Outcome,
    now_s: float = 0.0,
    *,
    took_s: float | None = None,
) -> None:
    """One leg from its start to its end; `took_s` to its first token, if there was one."""
    attempt = standings.started(instance.id, now_s, None if took_s is None else 0)
    if took_s is not None:
        standings.answered(attempt, now_s + took_s)
    standings.ended(attempt, outcome, now_s + (took_s or 0.0), "stream_cut")


def broken(standings: Standings, *instances: Instance, now_s: float = 0.0) -> Standings:
    for instance in instances:
        for _ in range(2):
            leg(standings, instance, Outcome.BROKEN, now_s)
    return standings


def usable(standings: Standings, now_s: float, exclude: frozenset[RankId] = NOBODY) -> str:
    return "".join(each.alias for each in standings.usable(FLEET, exclude, now_s))


def test_where_all_is_well_nothing_is_looked_at() -> None:
    """The very same candidates come back."""
    standings = made()
    leg(standings, A, Outcome.WELL)
    leg(standings, A, Outcome.BROKEN)

    assert standings.usable(FLEET, NOBODY, 0.0) is FLEET
    assert NoVetting().usable(FLEET, NOBODY) is FLEET
    assert NoVetting().reason(A.id) is None


def test_who_fails_in_a_row_is_held_back_until_its_trial() -> None:
    """Then it is a candidate again; once it is taken, nobody else's."""
    standings = broken(made(), A)
    assert (usable(standings, 0.0), usable(standings, 4.9)) == ("bc", "bc")
    assert usable(standings, 5.0) == "abc"

    standings.claim([B.id, A.id], 5.0)
    assert usable(standings, 5.0) == "bc"


def test_claiming_costs_nothing_where_all_is_well() -> None:
    """And says nothing of those who aren't on trial."""
    standings = made()
    standings.claim([A.id], 0.0)

    assert standings.breakers() == {}


def test_first_token_of_a_trial_closes_it() -> None:
    """Its stream may last for an hour; if it is cut then, that counts as one."""
    standings = broken(made(), A)
    standings.claim([A.id], 5.0)
    trial = standings.started(A.id, 5.0, 100)
    standings.answered(trial, 6.0)
    assert usable(standings, 6.0) == "abc"

    standings.ended(trial, Outcome.BROKEN, 7.0, "stream_cut")
    assert standings.breaker(A.id).failures == 1


@pytest.mark.parametrize("outcome", [Outcome.BROKEN, Outcome.REFUSED])
def test_failed_trial_holds_it_back_for_longer(outcome: Outcome) -> None:
    """An engine that answers 500 has not recovered."""
    standings = broken(made(), A)
    standings.claim([A.id], 5.0)
    leg(standings, A, outcome, 5.0)

    assert (usable(standings, 14.9), usable(standings, 15.0)) == ("bc", "abc")


def test_good_end_closes_it_where_no_first_token_is_told() -> None:
    """Answers that aren't streams."""
    standings = broken(made(), A)
    standings.claim([A.id], 5.0)
    leg(standings, A, Outcome.WELL, 5.0)

    assert usable(standings, 5.0) == "abc"
    assert standings.openings == {(A.id, "stream_cut"): 1}


def test_error_statuses_and_cancelled_legs_are_no_failures_in_a_row() -> None:
    """Nor do they break one."""
    standings = made()
    leg(standings, A, Outcome.BROKEN)
    for outcome in (Outcome.REFUSED, Outcome.UNTOLD):
        leg(standings, A, outcome)
    assert not standings.breaker(A.id).is_open

    leg(standings, A, Outcome.BROKEN)
    assert standings.breaker(A.id).is_open


def test_if_everybody_is_held_back_nobody_is() -> None:
    """An engine's error says more than one of ours."""
    assert usable(broken(made(), A, B), 0.0) == "c"
    assert usable(broken(made(), A, B, C), 0.0) == "abc"


def test_who_failed_this_request_is_nobody_left() -> None:
    """The retry may go to one that is held back, if there is no other."""
    standings = broken(made(), A, B)

    assert usable(standings, 0.0, frozenset([RankId(C.id, 0)])) == "c"
    assert usable(standings, 0.0, frozenset(C.rank_ids())) == "abc"


def test_leg_that_goes_well_in_such_an_hour_counts_as_a_trial() -> None:
    """Before its time."""
    standings = broken(made(), A, B, C)
    leg(standings, B, Outcome.WELL, 1.0)

    assert usable(standings, 1.0) == "b"


def judged(standings: Standings, *times_s: float, group: tuple[Instance, ...] = FLEET) -> str:
    for now_s in times_s:
        standings.judge([[each.id for each in group]], now_s)
    return usable(standings, times_s[-1])


def test_who_fails_beside_the_others_is_held_back_after_a_while() -> None:
    """Ten seconds of it, not one look."""
    standings = made()
    for _ in range(30):
        leg(standings, A, Outcome.REFUSED)
        leg(standings, B, Outcome.WELL)
        leg(standings, C, Outcome.WELL)

    assert judged(standings, 0.0) == "abc"
    assert judged(standings, 9.0) == "abc"
    assert judged(standings, 10.0) == "bc"
    assert standings.breaker(A.id).reason == "failing"


def test_suspicion_that_passes_begins_anew() -> None:
    """It has to be so all the time."""
    standings = made()
    for _ in range(20):
        leg(standings, A, Outcome.REFUSED)
        leg(standings, B, Outcome.WELL)
    judged(standings, 0.0)
    for _ in range(40):
        leg(standings, A, Outcome.WELL, 5.0)
    judged(standings, 5.0)
    for _ in range(200):
        leg(standings, A, Outcome.REFUSED, 11.0)
        leg(standings, B, Outcome.WELL, 11.0)

    assert judged(standings, 11.0) == "abc"


def test_engine_that_never_answers_is_slow() -> None:
    """While its legs wait, long before they time out."""
    standings = made()
    for _ in range(20):
        standings.started(A.id, 0.0, 500)
        leg(standings, B, Outcome.WELL, 0.0, took_s=0.1)
        leg(standings, C, Outcome.WELL, 0.0, took_s=0.1)

    assert judged(standings, 5.0, 10.0) == "abc"
    assert judged(standings, 15.0) == "bc"
    assert standings.breaker(A.id).reason == "slow"


def test_waiting_that_a_client_ended_counts() -> None:
    """Clients are less patient than we."""
    standings = made()
    for _ in range(20):
        attempt = standings.started(A.id, 0.0, 500)
        standings.ended(attempt, Outcome.UNTOLD, 8.0)
        leg(standings, B, Outcome.WELL, 8.0, took_s=0.1)

    assert judged(standings, 8.0, 18.0) == "bc"


def test_long_prompts_take_longer() -> None:
    """Pace is by a thousand tokens."""
    standings = made()
    for _ in range(20):
        attempt = standings.started(A.id, 0.0, 20_000)
        standings.answered(attempt, 4.0)
        standings.ended(attempt, Outcome.WELL, 4.0)
        leg(standings, B, Outcome.WELL, 4.0, took_s=0.1)

    assert judged(standings, 4.0, 20.0) == "abc"


def slow(standings: Standings, *instances: Instance) -> None:
    for _ in range(200):
        for each in FLEET:
            leg(standings, each, Outcome.WELL, 0.0, took_s=30.0 if each in instances else 0.1)


def test_comparison_holds_back_a_share_at_most() -> None:
    """One of two or three, whoever is open already included; never the only one."""
    standings = made(max_outliers=0.0)
    slow(standings, A)
    assert judged(standings, 30.0, 40.0) == "bc"

    taken = made()
    slow(taken, A)
    broken(taken, B, now_s=30.0)
    assert judged(taken, 31.0, 42.0) == "abc"
    assert taken.breaker(A.id).phase(42.0) is Phase.CLOSED

    alone = made()
    slow(alone, A)
    assert judged(alone, 30.0, 60.0, group=(A,)) == "abc"


def test_unknown_members_of_a_group_are_no_fault() -> None:
    """They have had no leg yet."""
    assert judged(made(), 0.0) == "abc"


def test_held_back_one_is_compared_anew_afterwards() -> None:
    """What it did before isn't held against it."""
    standings = made()
    slow(standings, A)
    judged(standings, 30.0, 40.0)
    leg(standings, A, Outcome.WELL, 45.0)

    assert judged(standings, 46.0, 60.0) == "abc"


def test_another_life_begins_without_a_burden() -> None:
    """Down and back again; one that was never asked has none anyway."""
    standings = broken(made(), A)
    standings.renew(A.id, 1.0)
    standings.renew(B.id, 1.0)

    assert usable(standings, 1.0) == "abc"


def test_those_who_left_are_forgotten() -> None:
    """A leg that ends after its instance left harms nobody."""
    standings = broken(made(), A, B)
    running = standings.started(A.id, 0.0, 10)
    standings.keep_only(frozenset([B.id, C.id]))
    standings.answered(running, 1.0)
    standings.ended(running, Outcome.WELL, 1.0)

    assert standings.breakers().keys() == {B.id}
    assert standings.openings.keys() == {(B.id, "stream_cut")}
    assert usable(standings, 1.0) == "ac"


def test_changes_are_told() -> None:
    """Each opening and closing once."""
    told: list[tuple[str, str | None]] = []
    standings = Standings(
        ReliabilitySettings(breaker_failures=2),
        lambda instance, state: told.append((instance, state.reason)),
    )
    broken(standings, A)
    standings.renew(B.id, 0.0)
    standings.renew(A.id, 0.0)
    standings.renew(A.id, 0.0)

    assert told == [(A.id, "stream_cut"), (A.id, None)]


def test_what_another_process_tells_is_taken_over_and_not_told_again() -> None:
    """Once each; what it tells twice changes nothing, and an echo could reopen what it has closed."""
    told: list[object] = []
    standings = Standings(ReliabilitySettings(), lambda *change: told.append(change))
    for _ in range(2):
        standings.told(A.id, "stream_cut", 10.0)
        assert (usable(standings, 14.9), usable(standings, 15.0)) == ("bc", "abc")
    for _ in range(2):
        standings.told(A.id, None, 16.0)
        assert usable(standings, 16.0) == "abc"

    assert standings.breaker(A.id).generation == 2
    assert told == []


events = st.lists(
    st.tuples(st.sampled_from(FLEET), st.sampled_from(Outcome), st.floats(0, 3), st.floats(0, 20)),
    max_size=40,
)


@given(events, st.floats(0, 200))
def test_somebody_is_always_let_through(
    history: list[tuple[Instance, Outcome, float, float]], later_s: float
) -> None:
    """Law: whatever happened, and whoever is excluded, a request has somewhere to go."""
    standings, now_s = made(outlier_legs=2, outlier_after_s=0.0), 0.0
    for instance, outcome, after_s, took_s in history:
        now_s += after_s
        leg(standings, instance, outcome, now_s, took_s=took_s)
        standings.judge([[each.id for each in FLEET]], now_s)
        assert standings.usable(FLEET, NOBODY, now_s)

    left = standings.usable(FLEET, frozenset(A.rank_ids()), now_s + later_s)
    assert any(each is not A for each in left)


def test_attempts_are_told_apart() -> None:
    """Two legs that began alike are two."""
    one = Attempt(instance=A.id, generation=0, started_s=0.0, thousands=1.0)

    assert one != Attempt(instance=A.id, generation=0, started_s=0.0, thousands=1.0)
