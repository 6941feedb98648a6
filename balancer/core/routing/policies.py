"""Policies: in which order candidates are preferred. `kvlb` is the product, the others compare.

Rules:

1. Pure over (candidate, load), and over whom it chose before, which decides between equals only.
2. Every choice carries the estimated cost in seconds, whatever the policy went by: plans of
   different policies can be compared.
3. Of exact ties the one chosen longest ago goes first. Those that were never chosen come in flat
   interleaved order: every instance's first rank, then every instance's second, and so on; which
   instance begins falls by a random draw. So permuting candidates changes nothing.
4. No policy excludes a candidate: the least preferred one still serves if the others fail.

Cost: one estimate and one sort key per candidate.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Protocol, assert_never, runtime_checkable

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from balancer.core.routing.cost import LoadedCandidate, RequestShape, TieBreak, estimate_all
from balancer.core.routing.plan import Candidate, Choice
from balancer.core.routing.sessions import affinity
from balancer.core.settings.routing import PolicyName
from indexer.core.types import RankId

MAX_TURNS = 65_536
"""Ranks remembered; fleets whose instances come and go meet more over time."""
SAVED_BY_A_HIT = ("work", "delay", "stall", "eviction", "prefill", "transfer")
"""Terms that a prompt in the cache wouldn't have."""
LOAD_BOUND = 1.25
"""A session leaves its rank when that has more than this times the mean of requests."""


class Policy(Protocol):
    """Orders candidates. `named_policy` knows the five that exist; docs/extending.md shows another."""

    def choose(
        self, shape: RequestShape, candidates: Sequence[LoadedCandidate], draw: TieBreak
    ) -> list[Choice]:
        """All candidates, the preferred one first."""
        ...

    def chosen(self, rank: RankId) -> None:
        """`rank` got the leg. Not called for a plan that is only explained."""
        ...


@runtime_checkable
class UnreadPolicy(Policy, Protocol):
    """One that can do without the prompt (`core.routing.unread`)."""

    def next_of(
        self,
        candidates: Sequence[Candidate],
        busy: Callable[[RankId], tuple[int, int]],
        draw: TieBreak,
    ) -> Candidate:
        """Whom `choose` would prefer of `candidates`, of which there is one at least.

        `busy` tells a rank's requests and queued tokens.
        """
        ...


Keys = list[tuple[float, ...]]
"""What to sort by, of each candidate."""


class Turns:
    """Whose turn it is between equals."""

    def __init__(self) -> None:
        self._turns: dict[RankId, int] = {}
        self._turn = 0

    def chosen(self, rank: RankId) -> None:
        """It goes last from now on."""
        self._turn += 1
        self._turns.pop(rank, None)
        self._turns[rank] = self._turn
        if len(self._turns) > MAX_TURNS:
            del self._turns[next(iter(self._turns))]

    def first(self, candidates: Sequence[Candidate], draw: TieBreak) -> Candidate:
        """Whose turn it is."""
        turns, found, least = self._turns, candidates[0], self._turn + 1
        for each in candidates:
            turn = turns.get(each.rank, 0)
            if turn < least:
                found, least = each, turn
        if least:
            return found
        equals = [each for each in candidates if each.rank not in turns]
        return min(equals, key=lambda each: (self.place(each), draw(each.rank)))

    def place(self, candidate: Candidate) -> tuple[int, int]:
        """Smaller goes first: the last turn, then the number of the rank in its instance."""
        rank = candidate.rank
        return self._turns.get(rank, 0), rank.rank - candidate.instance.rank_base


def _ordered(choices: Sequence[Choice], keys: Keys, draw: TieBreak, turns: Turns) -> list[Choice]:
    """By these keys, equals by turns."""
    if len(set(keys)) < len(keys):
        both = zip(keys, choices, strict=True)
        keys = [(*key, *turns.place(choice.candidate)) for key, choice in both]
    return _drawn(choices, keys, draw)


def _drawn(choices: Sequence[Choice], keys: Keys, draw: TieBreak) -> list[Choice]:
    """By these keys, equals by a draw."""
    if len(set(keys)) < len(keys):
        both = zip(keys, choices, strict=True)
        keys = [(*key, draw(choice.candidate.rank)) for key, choice in both]
    return [choices[number] for number in sorted(range(len(keys)), key=keys.__getitem__)]


class LeastCost:
    """`kvlb`: the least estimated time.

    Where nothing is known of a prompt its session's home comes first, as long as computing the whole
    prompt elsewhere isn't estimated to be faster than waiting there: what is most likely cached at
    home is worth no more than that.
    """

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(
        self, shape: RequestShape, candidates: Sequence[LoadedCandidate], draw: TieBreak
    ) -> list[Choice]:
        choices = estimate_all(shape, candidates)
        ordered = _ordered(choices, [(each.cost_s,) for each in choices], draw, self._turns)
        if shape.is_scored or shape.session is None:
            return ordered
        return _home_first(ordered, shape.session)

    def chosen(self, rank: RankId) -> None:
        self._turns.chosen(rank)


def _home_first(ordered: list[Choice], session: str) -> list[Choice]:
    """`ordered` by cost, with the session's home in front if a hit there would make it cheapest."""
    home = max(ordered, key=lambda each: affinity(session, each.candidate.rank))
    saved_s = sum(home.terms.get(term, 0.0) for term in SAVED_BY_A_HIT)
    if home.cost_s - saved_s > ordered[0].cost_s:
        return ordered
    return [replace(home, is_home=True), *(each for each in ordered if each is not home)]


class RoundRobin:
    """Whoever was chosen longest ago; stable when ranks come and go."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(
        self, shape: RequestShape, candidates: Sequence[LoadedCandidate], draw: TieBreak
    ) -> list[Choice]:
        choices = estimate_all(shape, candidates)
        return _drawn(choices, [self._turns.place(each.candidate) for each in choices], draw)

    def next_of(
        self,
        candidates: Sequence[Candidate],
        busy: Callable[[RankId], tuple[int, int]],  # noqa: ARG002 - the contract's signature
        draw: TieBreak,
    ) -> Candidate:
        return self._turns.first(candidates, draw)

    def chosen(self, rank: RankId) -> None:
        self._turns.chosen(rank)


class LeastLoaded:
    """Fewest requests in flight, then fewest queued tokens."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(
        self, shape: RequestShape, candidates: Sequence[LoadedCandidate], draw: TieBreak
    ) -> list[Choice]:
        choices = estimate_all(shape, candidates)
        return _ordered(choices, [_load_key(each) for each in candidates], draw, self._turns)

    def next_of(
        self,
        candidates: Sequence[Candidate],
        busy: Callable[[RankId], tuple[int, int]],
        draw: TieBreak,
    ) -> Candidate:
        loads = [busy(each.rank) for each in candidates]
        least = min(loads)
        equals = [each for each, load in zip(candidates, loads, strict=True) if load == least]
        return equals[0] if len(equals) == 1 else self._turns.first(equals, draw)

    def chosen(self, rank: RankId) -> None:
        self._turns.chosen(rank)


class PrefixOverlap:
    """The longest overlap, then the least load."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(
        self, shape: RequestShape, candidates: Sequence[LoadedCandidate], draw: TieBreak
    ) -> list[Choice]:
        keys: Keys = [(-_held_tokens(each), *_load_key(each)) for each in candidates]
        return _ordered(estimate_all(shape, candidates), keys, draw, self._turns)

    def chosen(self, rank: RankId) -> None:
        self._turns.chosen(rank)


class SessionAffinity:
    """Rendezvous hashing of the session, passing over ranks above the load bound.

    A request without a session goes by load.
    """

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(
        self, shape: RequestShape, candidates: Sequence[LoadedCandidate], draw: TieBreak
    ) -> list[Choice]:
        total = sum(each.load.requests for each in candidates)
        bound = ceil(LOAD_BOUND * (total + 1) / max(1, len(candidates)))
        session = shape.session

        def key(each: LoadedCandidate) -> tuple[float, ...]:
            if session is None:
                return _load_key(each)
            is_full = each.load.requests >= bound
            return (is_full, -affinity(session, each.candidate.rank))

        choices = estimate_all(shape, candidates)
        return _ordered(choices, [key(each) for each in candidates], draw, self._turns)

    def chosen(self, rank: RankId) -> None:
        self._turns.chosen(rank)


def named_policy(name: PolicyName) -> Policy:
    """A fresh policy of this name."""
    match name:
        case "kvlb":
            return LeastCost()
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "prefix_overlap":
            return PrefixOverlap()
        case "session":
            return SessionAffinity()
        case _:
            assert_never(name)


def seeded_draw(seed: int) -> TieBreak:
    """Draws that depend on `seed` (64 bits) and the rank only, not on the order of asking."""

    def draw(rank: RankId) -> float:
        return float(xxh3_64_intdigest(f"{rank.rank} {rank.instance}".encode(), seed))

    return draw


def _load_key(each: LoadedCandidate) -> tuple[float, float]:
    return (each.load.requests, each.load.queued_tokens)


def _held_tokens(each: LoadedCandidate) -> int:
    return max(each.candidate.overlap_tokens, each.candidate.predicted_tokens)
