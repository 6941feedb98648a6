"""What a clairvoyant could have made of a run: the best placement that a search finds.

Rules:

1. Arrival times are fixed: those of our own policy's run, where calls wait for answers.
2. A placement is judged by running each engine with the calls it was given. Engines don't know
   of each other, so a move costs the run of two engines, each from a checkpoint before the moved
   call on.
3. It has to spread work: most loaded over mean at most `WORK_LIMIT`, in uncached tokens. Beyond,
   what is above the limit counts against it.
4. The search begins at every policy's own placement, spends a tenth of its moves on each, and the
   rest on the best. A move takes one call, or it and all later calls of its session, to another
   engine: in half of the moves to where most of its beginning was sent last. It stays if the
   placement isn't worse for it.

It is the best found, not the best there is: the true optimum is at least as good. `endless` is a
bound that no placement reaches: one cache for the whole fleet that forgets nothing.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from kvlb.bench.calls import Call
from kvlb.bench.play import Outcome
from kvlb.bench.run import OURS, Job, Scenario, play
from kvlb.bench.solo import Arrival, Served, serve
from kvlb.bench.workloads import WORKLOADS
from simulator.core.settings import EngineSettings

WORK_LIMIT = 1.3
UNEVEN_PRICE = 2.0
"""Of the mean work: what each part above the limit counts as."""
FIRST_SHARE = 0.1
"""Of all moves: tried from each policy's placement, before the best one gets the rest."""

CHECKPOINTS = 16
"""Of each engine's run: so many states are held at a time, of a megabyte where there are many blocks."""

Aim = Literal["cached", "ttft"]


class OracleJob(msgspec.Struct, frozen=True, kw_only=True):
    """One search."""

    scenario: Scenario
    load: float
    """Share of saturation; to be told only."""
    policies: Sequence[str]
    moves: int
    aim: Aim = "cached"


class OracleResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the search found, beside what policies reached on the same arrivals."""

    scenario: Scenario
    load: float
    moves: int
    cached: float
    """Share of prompt tokens found in a cache, by the best placement."""
    ttft_mean: float
    most_over_mean: float
    began_at: str
    """The policy whose placement led there."""
    endless: float
    """Share that one endless cache would find."""
    by_policy: dict[str, float]
    """Cached share of each policy's own run."""
    ours: float
    """Of it, ours."""


def search(job: OracleJob) -> OracleResult:
    """Look for the best placement."""
    runs = {
        policy: play(Job(scenario=job.scenario, policy=policy))
        for policy in dict.fromkeys((OURS, *job.policies))
    }
    order = sorted(range(len(runs[OURS])), key=lambda number: runs[OURS][number].arrived_s)
    arrivals = [Arrival(runs[OURS][each].arrived_s, runs[OURS][each].call) for each in order]
    engine = WORKLOADS[job.scenario.workload].engine
    chance = random.Random(job.scenario.seed)  # noqa: S311 - a search
    first_moves = round(job.moves * FIRST_SHARE)
    searches = {}
    for policy, outcomes in runs.items():
        ranks = sorted({each.rank for run in runs.values() for each in run})
        places = [ranks.index(outcomes[number].rank) for number in order]
        one = Search(arrivals, engine, job.scenario.engines, places, chance, job.aim)
        one.improve(first_moves)
        searches[policy] = one
    began_at = max(searches, key=lambda policy: searches[policy].worth)
    best = searches[began_at]
    best.improve(max(0, job.moves - first_moves * len(searches)))
    prompt_tokens = sum(each.call.prompt.tokens for each in arrivals)
    by_policy = {policy: _cached(outcomes) for policy, outcomes in runs.items()}
    return OracleResult(
        scenario=job.scenario,
        load=job.load,
        moves=job.moves,
        cached=1 - best.uncached_tokens / prompt_tokens,
        ttft_mean=best.ttft_s / len(arrivals),
        most_over_mean=best.most_over_mean,
        began_at=began_at,
        endless=endless_share([each.call for each in arrivals], engine.block_size),
        by_policy=by_policy,
        ours=by_policy[OURS],
    )


class Search:
    """Local search from one placement."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        engine: EngineSettings,
        engines: int,
        places: Sequence[int],
        chance: random.Random,
        aim: Aim,
    ) -> None:
        """`places`: the engine of each arrival."""
        self._arrivals = arrivals
        self._engine = engine
        self._engines = engines
        self._places = list(places)
        self._chance = chance
        self._aim = aim
        self._served = [replace(self._serve(number), checkpoints=()) for number in range(engines)]
        self._sessions: dict[str, list[int]] = {}
        self._relatives = _relatives(arrivals)
        for number, each in enumerate(arrivals):
            if each.call.session is not None:
                self._sessions.setdefault(each.call.session, []).append(number)
        self.worth = self._judge(self._served)

    @property
    def uncached_tokens(self) -> int:
        return sum(each.uncached_tokens for each in self._served)

    @property
    def ttft_s(self) -> float:
        """Over all calls."""
        return sum(each.ttft_s for each in self._served)

    @property
    def most_over_mean(self) -> float:
        return _unevenness(self._served)

    def improve(self, moves: int) -> None:
        """Try so many moves, and keep those that do no harm."""
        if not moves:
            return
        self._served = [self._serve(place) for place in range(self._engines)]  # with checkpoints
        for _ in range(moves):
            numbers, target = self._pick()
            before = [self._places[number] for number in numbers]
            touched = {*before, target}
            for number in numbers:
                self._places[number] = target
            served = list(self._served)
            for place in touched:
                served[place] = self._serve(place, numbers[0])
            worth = self._judge(served)
            if worth >= self.worth:
                self.worth, self._served = worth, served
                continue
            for number, place in zip(numbers, before, strict=True):
                self._places[number] = place
        self._served = [replace(each, checkpoints=()) for each in self._served]

    def _pick(self) -> tuple[list[int], int]:
        """Which calls to move, and where to."""
        chance = self._chance
        while True:
            number = chance.randrange(len(self._arrivals))
            place = self._places[number]
            relative = self._relatives[number]
            target = chance.randrange(self._engines)
            if relative is not None and chance.random() < 0.5:
                target = self._places[relative]
            if target == place:
                continue
            session = self._arrivals[number].call.session
            if session is None or chance.random() < 0.5:
                return [number], target
            later = [each for each in self._sessions[session] if each >= number]
            return [each for each in later if self._places[each] == place], target

    def _serve(self, place: int, changed: int = 0) -> Served:
        """Run one engine with what it was given, all of it as before up to arrival `changed`."""
        return serve(
            self._engine,
            self._arrivals,
            [number for number, its in enumerate(self._places) if its == place],
            every=max(1, len(self._arrivals) // CHECKPOINTS),
            checkpoints=self._served[place].before(changed) if changed else (),
        )

    def _judge(self, served: Sequence[Served]) -> float:
        """What a placement is worth, in tokens or seconds; more is better."""
        uncached = sum(each.uncached_tokens for each in served)
        over = max(0.0, _unevenness(served) - WORK_LIMIT) * UNEVEN_PRICE
        if self._aim == "ttft":
            return -sum(each.ttft_s for each in served) * (1 + over)
        return -uncached * (1 + over)


def _unevenness(served: Sequence[Served]) -> float:
    work = [each.uncached_tokens for each in served]
    return max(work) * len(work) / max(1, sum(work))


def _relatives(arrivals: Sequence[Arrival]) -> list[int | None]:
    """For each call the last one before it that has most of its beginning; None: nobody has."""
    last: dict[int, int] = {}
    found: list[int | None] = []
    for number, each in enumerate(arrivals):
        relative = None
        for key in each.call.keys:
            earlier = last.get(key)
            if earlier is None:
                break
            relative = earlier
        found.append(relative)
        last.update(dict.fromkeys(each.call.keys, number))
    return found


def endless_share(calls: Sequence[Call], block_size: int) -> float:
    """Share of prompt tokens that one cache without end would find, in order of arrival."""
    known: set[int] = set()
    held_tokens = 0
    for call in calls:
        limit = call.prompt.hit_limit_blocks(block_size)
        for key in call.keys[:limit]:
            if key not in known:
                break
            held_tokens += block_size
        known.update(call.keys)
    return held_tokens / sum(call.prompt.tokens for call in calls)


def _cached(outcomes: Sequence[Outcome]) -> float:
    tokens = sum(each.call.prompt.tokens for each in outcomes)
    return sum(each.cached_tokens for each in outcomes) / tokens
