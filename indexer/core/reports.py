"""What a balancer tells the indexer of finished legs: the prediction held against the engine's word.

Rules:

1. A report is advice: bounded, late, lost or refused, it never delays or fails a request.
2. Only contradictions travel one by one. What agreed is counted, and the count travels.
3. Times travel as ages, so the two processes need no common clock. A sender gives the age as of
   sending, a source adds what the message has waited.
4. One key says all of a contradiction: held means reachable, so what was predicted from it on stands
   or falls with it.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from indexer.core.types import BlockKey, RankId

MOST_AGREED_KEYS = 8

FULL_REPORT_SESSION = "kvlb-full-report"
"""Session of requests that have their engine announce again what they reuse. What is announced under
it from the root on means at least one copy, not one more."""


class CacheReport(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="contradicted"):
    """One leg whose cached tokens were not what the index had predicted."""

    rank: RankId
    epoch: int
    """Of the rank, when the index was asked."""
    age_s: float
    """Since the index was asked."""
    block_size: int
    predicted_tokens: int
    """By the index alone: what was on its way there is not in it."""
    cached_tokens: int
    """As the engine reported, cut to what could have been predicted."""
    key: BlockKey
    """Predicted too much: the first block that the engine did not have. Too little: the last that
    it had."""

    @property
    def is_over(self) -> bool:
        return self.predicted_tokens > self.cached_tokens

    @property
    def is_one_block_short(self) -> bool:
        return self.predicted_tokens - self.cached_tokens == self.block_size


class RankTally(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="tally"):
    """What else legs of one rank have shown since the last tally."""

    rank: RankId
    epoch: int
    agreed: int = 0
    """Legs with cached tokens, exactly as many as predicted."""
    computing_legs: int = 0
    """Legs that computed at least one whole block, which the engine has to announce."""
    age_s: float = 0.0
    """Since the index was asked for the newest of those legs."""
    agreed_keys: tuple[BlockKey, ...] = ()
    """Last block that the engine had, of some of the legs that agreed: the newest `MOST_AGREED_KEYS`."""


Report = CacheReport | RankTally


def aged(reports: Iterable[Report], waited_s: float) -> list[Report]:
    """The same, so much later."""
    return [msgspec.structs.replace(report, age_s=report.age_s + waited_s) for report in reports]


class ReportSink(Protocol):
    """The balancer's end. Tested by tests/integration/indexer/reports/."""

    async def send(self, model: str, reports: Sequence[Report]) -> None:
        """Hand reports to whoever writes the ranks of `model`.

        Raises BlockIndexError; they are lost then.
        """
        ...


class ReportSource(Protocol):
    """The indexer's end."""

    async def wait(self) -> None:
        """Return when there may be something to take: at once, or a little later."""
        ...

    async def take(self, model: str) -> Sequence[Report]:
        """Take what has come for the ranks of `model`, aged by its wait. Raises BlockIndexError."""
        ...
