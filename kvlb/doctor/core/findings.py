"""What a check found: a fault by its name, what was seen, and what to change."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How bad it is. An error makes `kvlb doctor` exit 1."""

    ERROR = "error"
    """Requests fail, or cache knowledge is missing or wrong."""
    WARNING = "warning"
    """It works until something else happens."""
    INFO = "info"
    """Something could not be looked at."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of one instance."""

    name: str
    level: Level
    instance: str
    seen: str
    change: str


_ORDER = {level: number for number, level in enumerate(Level)}


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first, each level in the order of the instances' names."""
    return sorted(findings, key=lambda each: (_ORDER[each.level], each.instance, each.name))
