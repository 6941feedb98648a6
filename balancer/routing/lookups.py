"""`Lookups`: asks the index within its deadline. What it doesn't answer costs the overlap, never the request."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from indexer.core.index import BlockIndexError, PrefixLookup, PrefixMatch, Prompt
from indexer.core.throttle import Throttle
from indexer.core.types import RankId

logger = structlog.get_logger(__name__)

_REASONS: Final = {"timeout": "lookup_timeout", "failed": "lookup_failed"}
_TOO_SLOW = "the index didn't answer within routing.lookup_timeout_s"
_FAILURE_LOG_S = 30.0
"""Between two log lines about the same failure."""


class Lookups:
    """Of one process."""

    def __init__(
        self,
        index: PrefixLookup,
        *,
        clock: Callable[[], float],
        timeout_s: Callable[[], float],
        on_lookup: Callable[[str, float], None] | None,
    ) -> None:
        """`on_lookup` is told the outcome (ok, timeout, failed, skipped) and its seconds."""
        self._index = index
        self._never_waits: bool = getattr(index, "never_waits", False)
        self._clock = clock
        self._timeout_s = timeout_s
        self._on_lookup = on_lookup
        self._failures = Throttle(_FAILURE_LOG_S)
        self.problem: str | None = None
        """Why lookups fail, as far as it was told; None: the last one didn't."""
        self.reason: str | None = None
        """The same as one of two words: `lookup_timeout`, `lookup_failed`."""

    async def match(
        self, prompts: tuple[Prompt, ...]
    ) -> tuple[tuple[Mapping[RankId, PrefixMatch], ...], str]:
        """The index's answers, or none, and the outcome: slow and broken are alike to the request."""
        if not prompts:
            self._count("skipped", 0.0)
            return (), "skipped"
        started_s = self._clock()
        answers: tuple[Mapping[RankId, PrefixMatch], ...] = ()
        outcome = "ok"
        try:
            if self._never_waits and len(prompts) == 1:
                answers = (await self._index.match(prompts[0]),)
            else:
                async with asyncio.timeout(self._timeout_s()):
                    answers = await self._match_each(prompts)
            self.problem = self.reason = None
        except TimeoutError:
            outcome = "timeout"
            self.note_late(self.problem or _TOO_SLOW)
        except Exception as error:  # noqa: BLE001 - any backend, any fault: route by load, count it
            outcome = "failed"
            self.note_failure(error)
        self._count(outcome, self._clock() - started_s)
        return answers, outcome

    async def _match_each(
        self, prompts: tuple[Prompt, ...]
    ) -> tuple[Mapping[RankId, PrefixMatch], ...]:
        answers = [await self._index.match(prompts[0])]
        for prompt in prompts[1:]:
            # An index in memory never waits: without this neither the deadline nor anybody else
            # would get a turn before the last prompt.
            await asyncio.sleep(0)
            answers.append(await self._index.match(prompt))
        return tuple(answers)

    def note_answer(self, took_s: float) -> None:
        """The index was asked outside of a request, and answered."""
        if took_s <= self._timeout_s():
            self.problem = self.reason = None
        else:
            self.note_late(_TOO_SLOW)

    def note_late(self, problem: str) -> None:
        """Nothing came in time."""
        self.problem, self.reason = problem, _REASONS["timeout"]

    def note_failure(self, error: Exception) -> None:
        """Log it now and then: the counter has the rest."""
        # What a backend says of itself is fit to be shown; of a bug only its kind is.
        problem = str(error) if isinstance(error, BlockIndexError) else type(error).__name__
        self.problem, self.reason = problem, _REASONS["failed"]
        if self._failures.admits((problem,), self._clock()):
            logger.warning("index_lookup_failed", error=problem)

    @staticmethod
    def lack(outcome: str) -> str | None:
        """Why a request has no answer of the index, of a lookup that ended so."""
        return _REASONS.get(outcome)

    def _count(self, outcome: str, seconds: float) -> None:
        if self._on_lookup:
            self._on_lookup(outcome, seconds)
