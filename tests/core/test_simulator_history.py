"""The simulator's account of what its engines could do, and of requests."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.core.history import Condition, FleetHistory


def history_of(*changes: tuple[float, str, Condition]) -> FleetHistory:
    history = FleetHistory()
    for at_s, what, condition in changes:
        history.note("d0", what, condition, at_s)
    return history


KILLED = history_of(
    (0.0, "started", Condition.WELL),
    (5.0, "killed", Condition.DOWN),
    (7.0, "started", Condition.WELL),
)


def test_an_engine_is_what_befell_it_last() -> None:
    """Before its first start it can do nothing, and one nobody knows never could."""
    conditions = [KILLED.condition("d0", at_s) for at_s in (-1.0, 0.0, 5.0, 6.9, 7.0)]

    assert conditions == ["down", "well", "down", "down", "well"]
    assert KILLED.condition("d1", 1.0) is Condition.DOWN


def test_well_is_well_at_every_moment_between() -> None:
    """A life that ends and a new one that begins are no service in between."""
    assert KILLED.was_well("d0", 1.0, 4.9)
    assert not KILLED.was_well("d0", 1.0, 5.0)
    assert not KILLED.was_well("d0", 6.0, 8.0)
    assert KILLED.was_well("d0", 7.0, 8.0)


def test_cut_connections_disturb_a_well_engine() -> None:
    """It could serve all the time, and yet answers broke off."""
    history = history_of((0.0, "started", Condition.WELL), (2.0, "cut", Condition.WELL))

    assert history.was_well("d0", 1.0, 3.0)
    assert history.was_disturbed("d0", 1.0, 3.0)
    assert not history.was_disturbed("d0", 2.1, 3.0)


def test_changes_are_told_in_order_over_all_engines() -> None:
    """However many they are."""
    history = FleetHistory()
    for at_s, engine in ((1.0, "d0"), (3.0, "d0"), (2.0, "p0")):
        history.note(engine, "cut", Condition.WELL, at_s)

    assert [each.at_s for each in history.changes] == [1.0, 2.0, 3.0]


def test_an_attempt_runs_until_its_end_is_written() -> None:
    """By whoever began it."""
    history = FleetHistory()
    attempt = history.begin("d0", "one", 1.0)
    running = attempt.outcome
    attempt.outcome, attempt.ended_s = "complete", 2.0

    assert running == "running"
    assert [(each.engine, each.request_id) for each in history.attempts] == [("d0", "one")]


@given(
    st.lists(st.sampled_from(Condition), max_size=6),
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 10),
)
def test_well_over_a_time_is_well_over_every_part_of_it(
    conditions: list[Condition], first: float, second: float, third: float
) -> None:
    """The law of the account."""
    history = history_of(*((float(at), "x", each) for at, each in enumerate(conditions)))
    from_s, between_s, to_s = sorted((first, second, third))

    whole = history.was_well("d0", from_s, to_s)

    parts = history.was_well("d0", from_s, between_s) and history.was_well("d0", between_s, to_s)
    assert whole == parts
