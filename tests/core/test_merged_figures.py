"""One set of metrics out of several processes'."""

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.merged_figures import Family, Series, keep, merge


def family(name: str, kind: str, *values: tuple[str, float]) -> Family:
    series = [Series(name, (("instance", label),), value) for label, value in values]
    return Family(name, kind, "help", series)


def values(families: list[Family]) -> dict[tuple[str, str], float]:
    return {(each.name, each.labels[0][1]): each.value for f in families for each in f.series}


def test_counters_add_up_series_by_series() -> None:
    """One that a process doesn't have yet counts as 0."""
    merged = merge(
        [
            [family("legs", "counter", ("a", 1), ("b", 2))],
            [family("legs", "counter", ("b", 3), ("c", 4))],
        ]
    )

    assert values(merged) == {("legs", "a"): 1, ("legs", "b"): 5, ("legs", "c"): 4}


def test_what_all_see_alike_is_taken_from_the_first_that_has_it() -> None:
    """Load is shared: added up it would count twice."""
    merged = merge(
        [
            [family("load", "gauge"), family("well", "gauge", ("a", 1))],
            [family("load", "gauge", ("a", 7)), family("well", "gauge", ("a", 0))],
        ]
    )

    assert values(merged) == {("load", "a"): 7, ("well", "a"): 1}


def test_memory_of_processes_adds_up() -> None:
    """But for when they began and what they may: the least counts."""
    each = [
        family("process_resident_memory_bytes", "gauge", ("", 10)),
        family("process_start_time_seconds", "gauge", ("", 5)),
        family("kvlb_workers", "gauge", ("", 1)),
    ]
    later = [
        family("process_resident_memory_bytes", "gauge", ("", 20)),
        family("process_start_time_seconds", "gauge", ("", 9)),
        family("kvlb_workers", "gauge", ("", 1)),
    ]

    assert values(merge([each, later])) == {
        ("process_resident_memory_bytes", ""): 30,
        ("process_start_time_seconds", ""): 5,
        ("kvlb_workers", ""): 2,
    }


def test_what_an_ended_process_counted_stays() -> None:
    """A sum that fell would be read as a restart. Its gauges end with it."""
    first = [family("legs", "counter", ("a", 1)), family("load", "gauge", ("a", 9))]
    ended = keep(keep([], first), [family("legs", "counter", ("a", 2)), family("new", "counter")])
    merged = merge([[family("legs", "counter", ("a", 4))]], ended)

    assert values(merged) == {("legs", "a"): 7}


def test_series_of_instances_that_left_leave() -> None:
    """Also those that only an ended process had; `other` is nobody's name."""
    living = [
        family("kvlb_instance_healthy", "gauge", ("a", 1)),
        family("kvlb_peers", "gauge", ("gone", 1)),
    ]
    ended = [family("legs", "counter", ("a", 1), ("gone", 5), ("other", 2))]

    assert values(merge([living], ended)) == {
        ("kvlb_instance_healthy", "a"): 1,
        ("kvlb_peers", "gone"): 1,
        ("legs", "a"): 1,
        ("legs", "other"): 2,
    }


def of_models(name: str, kind: str, *values: tuple[str, float]) -> Family:
    series = [Series(name, (("model", model),), value) for model, value in values]
    return Family(name, kind, "help", series)


def test_series_of_models_that_nobody_serves_leave() -> None:
    """Unless it isn't known yet what is served."""
    ended = [of_models("asked", "counter", ("m", 1), ("gone", 5), ("other", 2))]
    served = of_models("kvlb_model_instances", "gauge", ("m", 3))
    nothing = of_models("kvlb_model_instances", "gauge")

    assert values(merge([[served]], ended)) == {
        ("kvlb_model_instances", "m"): 3,
        ("asked", "m"): 1,
        ("asked", "other"): 2,
    }
    assert values(merge([[nothing]], ended))["asked", "gone"] == 5


counts = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 99)), unique_by=lambda x: x[0])


@given(st.lists(counts, max_size=5))
def test_ending_changes_no_sum(processes: list[list[tuple[str, int]]]) -> None:
    """Whichever processes have ended, and in whichever order."""
    figures = [[family("legs", "counter", *each)] for each in processes]
    ended: list[Family] = []
    for each in figures[::2]:
        ended = keep(ended, each)

    assert values(merge(figures[1::2], ended)) == values(merge(figures))
