"""What befalls which engine and when, drawn from a seed. Pure.

Rules:

1. An engine suffers one thing at a time, and after it is left alone for `RECOVERY_S`.
2. Of each role at least one engine is well at every moment, and has been for `RECOVERY_S`: so
   there is always one that could serve, and that a balancer had time to know.
3. After `duration_s` nothing is wrong any more.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "restart", "hang", "cut_off", "cut"]

RECOVERY_S = 2.5
"""A balancer that probes every 0.5 s knows by then who is back."""
_MEAN_PAUSE_S = 0.7
_WEIGHTS: Mapping[Kind, int] = {"kill": 3, "restart": 2, "hang": 3, "cut_off": 2, "cut": 3}
_LONGEST_S: Mapping[Kind, float] = {
    "kill": 4.0,
    "restart": 0.0,
    "hang": 7.0,
    "cut_off": 3.0,
    "cut": 0.0,
}
_SHORTEST_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One engine, one misfortune."""

    at_s: float
    engine: str
    kind: Kind
    lasts_s: float
    """0: over at once."""

    @property
    def clear_s(self) -> float:
        """From when on the engine counts as well again."""
        return self.at_s + self.lasts_s + RECOVERY_S


def draw_faults(
    chance: random.Random, roles: Mapping[str, Sequence[str]], duration_s: float
) -> list[Fault]:
    """Draw the faults of one run; `roles` names the engines of each role."""
    faults: list[Fault] = []
    at_s = chance.expovariate(1 / _MEAN_PAUSE_S)
    while at_s < duration_s:
        role = chance.choice(sorted(roles))
        kind = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        longest_s = min(_LONGEST_S[kind], duration_s - at_s)
        lasts_s = chance.uniform(_SHORTEST_S, longest_s) if longest_s > _SHORTEST_S else 0.0
        suffering = {each.engine for each in faults if each.clear_s > at_s}
        well = [name for name in roles[role] if name not in suffering]
        if len(well) > 1 and (lasts_s or kind in {"restart", "cut"}):
            engine = chance.choice(well)
            faults.append(Fault(at_s=at_s, engine=engine, kind=kind, lasts_s=lasts_s))
        at_s += chance.expovariate(1 / _MEAN_PAUSE_S)
    return faults
