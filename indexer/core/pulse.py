"""Whether somebody still writes each rank, as far as a reader can tell. Pure.

Rules:

1. Each rank has a sign: a number that is another one whenever its writer has been there. Only whether it
   changes is looked at, over the reader's own time: clocks of other machines play no part.
2. A rank whose sign has stayed the same for `silent_after_s` is silent: what engines store and evict
   isn't known any more. The first change ends that.
3. Time counts as far as the reader looked: between two looks at most half of it. Who was stopped, or
   couldn't ask, has missed signs that may have been there.
4. A silent rank's entries keep their credit, DEGRADED, and say why. LOAD_ONLY stays what it is.

Cost: per look and rank a dictionary operation; per lookup nothing, while none is silent.
"""

from collections.abc import Mapping, Set
from typing import Final

import msgspec

from indexer.core.index import PrefixMatch
from indexer.core.types import RankId, Trust

SILENT: Final = "indexer_silent"


class Pulses:
    """Of the ranks of one model."""

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._seen: dict[RankId, tuple[int, float]] = {}
        """Sign of each rank at the last look, and for how long it has been the same."""
        self._looked_s: float | None = None

    def take(self, signs: Mapping[RankId, int], now_s: float) -> frozenset[RankId]:
        """Look at what each rank has now; return those that are silent."""
        passed_s = 0.0
        if self._looked_s is not None:
            passed_s = min(now_s - self._looked_s, self._silent_after_s / 2)
        self._looked_s = now_s
        seen = {}
        for rank, sign in signs.items():
            before, quiet_s = self._seen.get(rank, (sign, -passed_s))
            seen[rank] = sign, quiet_s + passed_s if sign == before else 0.0
        self._seen = seen
        return frozenset(
            rank for rank, (_, quiet_s) in seen.items() if quiet_s >= self._silent_after_s
        )


def lowered(
    matches: Mapping[RankId, PrefixMatch], silent: Set[RankId]
) -> dict[RankId, PrefixMatch]:
    """An answer in which ranks that nobody writes aren't exact."""
    found = dict(matches)
    for rank in silent & matches.keys():
        if matches[rank].trust is not Trust.LOAD_ONLY:
            found[rank] = msgspec.structs.replace(
                matches[rank], trust=Trust.DEGRADED, reason=SILENT
            )
    return found
