"""One set of metrics out of those of several processes. Pure.

Rules:

1. Counters and histograms add up, series by series. Of a process that has ended what it had counted
   last goes on to count: a sum that fell would be read as a restart, and its whole value as new.
2. A gauge says how something is that all processes see, load included, which they share: it is taken
   from the first process that has it. Of the processes themselves (`process_*`, `kvlb_workers`)
   gauges add up, but for limits and the start, of which the least counts.
3. Series of instances and models that no process knows any more leave, also those of processes that have
   ended.

Cost: one dict operation per series and process.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

ADDED = frozenset({"counter", "histogram", "summary"})
LEAST = frozenset({"process_start_time_seconds", "process_max_fds"})
NAMED_BY = {"instance": "kvlb_instance_healthy", "model": "kvlb_model_instances"}
"""The gauges that have a series for every instance of the fleet, and for every model."""
OTHER = "other"


class Series(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sample; labels in the order of the family."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """All samples of one metric."""

    name: str
    kind: str
    help: str
    series: list[Series]


Figures = Sequence[Family]


def merge(processes: Sequence[Figures], ended: Figures = ()) -> list[Family]:
    """Figures of all processes together, the first one asked first; `ended` are out of `keep`."""
    families: dict[str, Family] = {}
    for family in _each(*processes, ended):
        before = families.get(family.name)
        families[family.name] = family if before is None else _joined(before, family)
    return _without_absent(list(families.values()))


def keep(ended: Figures, last: Figures) -> list[Family]:
    """What stays of processes that have ended, once one more has, with its last figures."""
    counted = [each for each in last if each.kind in ADDED]
    families: dict[str, Family] = {each.name: each for each in ended}
    for family in counted:
        before = families.get(family.name)
        families[family.name] = family if before is None else _joined(before, family)
    return list(families.values())


def _each(*processes: Figures) -> Iterable[Family]:
    for figures in processes:
        yield from figures


def _joined(first: Family, other: Family) -> Family:
    if first.kind not in ADDED and not _is_of_process(first):
        return first if first.series else other
    least = first.name in LEAST
    values = {(each.name, each.labels): each.value for each in first.series}
    for each in other.series:
        at = (each.name, each.labels)
        before = values.get(at)
        if before is None:
            values[at] = each.value
        else:
            values[at] = min(before, each.value) if least else before + each.value
    return Family(first.name, first.kind, first.help, _series(values))


def _series(values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]) -> list[Series]:
    return [Series(name, labels, value) for (name, labels), value in values.items()]


def _is_of_process(family: Family) -> bool:
    return family.name.startswith("process_") or family.name == "kvlb_workers"


def _without_absent(families: list[Family]) -> list[Family]:
    for label, gauge in NAMED_BY.items():
        told = next((each for each in families if each.name == gauge), None)
        if told is not None and told.series:
            known = {value for each in told.series for name, value in each.labels if name == label}
            known.add(OTHER)
            families = [
                _of_known(each, label, known) if each.kind in ADDED else each for each in families
            ]
    return families


def _of_known(family: Family, label: str, known: set[str]) -> Family:
    kept = [
        each
        for each in family.series
        if all(name != label or value in known for name, value in each.labels)
    ]
    return (
        family if len(kept) == len(family.series) else msgspec.structs.replace(family, series=kept)
    )
