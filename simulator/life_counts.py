"""What went wrong in an engine's lives: a killed one takes its own counters along."""

from dataclasses import dataclass, fields
from typing import Self

from simulator.engine import SimulatedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeCounts:
    """Figures that rise, over ranks and lives."""

    corrupt_reads: int = 0
    failed_loads: int = 0
    reads_after_expiry: int = 0
    reads_of_other_prompt: int = 0
    reservations_released: int = 0
    reservations_expired: int = 0

    @classmethod
    def of(cls, engine: SimulatedEngine | None) -> Self:
        """Of its present life; none if there is no engine."""
        counts = cls()
        for rank in engine.ranks if engine is not None else ():
            load, statistics = rank.core.load(), rank.core.statistics
            counts += cls(
                corrupt_reads=statistics.corrupt_reads,
                failed_loads=statistics.failed_loads,
                reads_after_expiry=load.reads_after_expiry,
                reads_of_other_prompt=load.reads_of_other_prompt,
                reservations_released=load.released_reservations,
                reservations_expired=load.expired_reservations,
            )
        return counts

    def __add__(self, other: "LifeCounts") -> Self:
        names = [field.name for field in fields(self)]
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})
