"""Comparison: who stands out, and who only looks as if."""

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.reliability.outliers import FAILING, SLOW, Figures, Tally, find_outliers
from balancer.core.settings.reliability import ReliabilitySettings
from indexer.core.types import InstanceId

SETTINGS = ReliabilitySettings()
A, B, C = (InstanceId(f"http://{name}:1") for name in "abc")
WELL = Figures(legs=50, paced=50, pace_s=0.2)


def of(**fields: float) -> Figures:
    return Figures(**({"legs": 50.0, "paced": 50.0, "pace_s": 0.2} | fields))


def test_all_alike_is_nobody() -> None:
    """However many there are."""
    assert find_outliers({A: WELL, B: WELL, C: WELL}, SETTINGS) == {}


def test_who_fails_alone_stands_out() -> None:
    """Half of its legs, and nobody else's."""
    assert find_outliers({A: of(failed_share=0.5), B: WELL, C: WELL}, SETTINGS) == {A: FAILING}
    assert find_outliers({A: of(failed_share=0.49), B: WELL, C: WELL}, SETTINGS) == {}


def test_what_fails_everywhere_is_nobodys_fault() -> None:
    """A request that kills every engine, or a network that is down."""
    assert find_outliers({A: of(failed_share=0.9), B: of(failed_share=0.5)}, SETTINGS) == {}


def test_who_is_far_slower_stands_out() -> None:
    """Ten times and a second more, not one of the two."""
    quick = of(pace_s=0.15)
    assert find_outliers({A: of(pace_s=1.6), B: quick, C: quick}, SETTINGS) == {A: SLOW}
    assert find_outliers({A: of(pace_s=1.4), B: quick, C: quick}, SETTINGS) == {}

    slow = of(pace_s=1.0)
    assert find_outliers({A: of(pace_s=9.0), B: slow, C: slow}, SETTINGS) == {}


def test_too_few_legs_say_nothing() -> None:
    """Neither of one instance nor of those it is compared with."""
    bad = {"failed_share": 1.0, "pace_s": 60.0}
    assert find_outliers({A: of(legs=9, paced=9, **bad), B: WELL}, SETTINGS) == {}
    assert find_outliers({A: of(**bad), B: of(legs=9, paced=9)}, SETTINGS) == {}
    assert find_outliers({A: of(**bad)}, SETTINGS) == {}


def test_worst_goes_first() -> None:
    """Where only some may be held back it decides who; failing counts before slow."""
    found = find_outliers(
        {
            A: of(failed_share=0.6),
            B: of(failed_share=0.9),
            C: of(pace_s=9.0),
            **{InstanceId(f"http://{n}:1"): WELL for n in range(3)},
        },
        SETTINGS,
    )

    assert list(found.items()) == [(B, FAILING), (A, FAILING), (C, SLOW)]


def test_each_comparison_can_be_switched_off() -> None:
    """By 0."""
    figures = {A: of(failed_share=1.0), B: of(pace_s=9.0), C: WELL}
    none = ReliabilitySettings(outlier_failures=0, outlier_slowness=0)

    assert find_outliers(figures, none) == {}


def test_tally_counts_shares_and_paces() -> None:
    """Of legs of late."""
    tally = Tally(30.0, 0.0)
    for failed in (True, False, False, False):
        tally.ended(0.0, failed=failed)
    tally.first_token(0.0, 0.2)
    tally.first_token(0.0, 0.4)

    figures = tally.figures(0.0, ())
    assert (figures.legs, figures.failed_share, figures.paced) == (4, 0.25, 2)
    assert round(figures.pace_s, 6) == 0.3
    assert tally.figures(300.0, ()).legs < 0.01


def test_tally_of_nothing() -> None:
    """No division by what isn't there."""
    assert Tally(30.0, 0.0).figures(0.0, ()) == Figures()


def test_legs_that_wait_count_once_they_are_late() -> None:
    """One that came just now isn't quick."""
    tally = Tally(30.0, 0.0)
    tally.first_token(0.0, 1.0)

    assert tally.figures(0.0, [0.5]).paced == 1
    figures = tally.figures(0.0, [0.5, 3.0])
    assert (figures.paced, figures.pace_s) == (2, 2.0)
    assert Tally(30.0, 0.0).figures(0.0, [5.0, 7.0]).pace_s == 6.0


def test_who_stops_waiting_early_says_nothing() -> None:
    """Only one that had waited longer than usual."""
    tally = Tally(30.0, 0.0)
    tally.first_token(0.0, 1.0)
    tally.gave_up(0.0, 0.5)
    assert tally.figures(0.0, ()).paced == 1

    tally.gave_up(0.0, 3.0)
    assert tally.figures(0.0, ()).pace_s == 2.0


figures = st.builds(
    Figures,
    legs=st.floats(0, 100),
    failed_share=st.floats(0, 1),
    paced=st.floats(0, 100),
    pace_s=st.floats(0, 100),
)


@given(st.dictionaries(st.sampled_from([InstanceId(str(n)) for n in range(6)]), figures))
def test_never_everybody(fleet: dict[InstanceId, Figures]) -> None:
    """Law: somebody is always as good as the others."""
    assert len(find_outliers(fleet, SETTINGS)) < max(1, len(fleet))
