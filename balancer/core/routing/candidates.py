"""From a fleet snapshot and the index's answer to candidates: who could serve, holding what.

Rules:

1. Only available instances that serve the request's model are candidates, each rank for itself.
2. An unknown model is 404 or 503 as `core.fleet.model_lookup` says. A known model without an available instance is 503; all of them full is another 503.
3. Overlap is what events say; predicted overlap adds what is on its way there without a gap. A
   rank that isn't trusted (`load_only`) holds nothing by events; if blocks of earlier legs are
   guessed to be there it is `approximate`. Several prompts add up. A failed lookup
   costs the overlap, and trust for that request: `load_only`, or `approximate` where blocks are
   predicted, with the lookup as the reason. That the rank has events at all stays known.
4. What lies on slower tiers is held, and has to be loaded: a weight per tier says what it is worth.
5. The engine computes the last prompt token in any case: overlap is at most tokens - 1.

Cost: per rank one load and a binary search of predicted blocks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import msgspec

from balancer.core.errors import NoInstanceError, OverloadedError
from balancer.core.fleet.model_lookup import nobody_answers, unknown_model
from balancer.core.fleet.roster import Hold
from balancer.core.fleet.snapshot import NO_CONNECTOR, Fleet, Instance, Role
from balancer.core.load.ledger import LoadLedger, RankLoad
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.cost import LoadedCandidate, RequestShape
from balancer.core.routing.output_limits import output_limit
from balancer.core.routing.plan import Candidate
from balancer.core.routing.sessions import named_session, opening
from balancer.core.routing.terms import MemoryUse
from indexer.core.index import PrefixMatch, Prompt
from indexer.core.types import BlockKey, RankId, Tier, Trust

USUAL_BLOCK_SIZE = 16
"""Until some rank's events name another."""
BYTES_PER_TOKEN = 4
REFUSED_TOKENS = 1
"""Of an answer with a limit that engines refuse."""
_EVENTS_TELL: Final = frozenset({Trust.EXACT, Trust.DEGRADED})
NOT_INDEXED = "not_indexed"
"""Why nothing is known of a rank that the index is without: no events, not yet, or no more."""
MAX_GUESSED_TOKENS = 8192
"""A body of images or audio says little about its tokens."""


class PromptMatches(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known of a request's prompts on every rank."""

    prompts: tuple[Prompt, ...] = ()
    by_rank: tuple[Mapping[RankId, PrefixMatch], ...] = ()
    """One answer of the index per prompt; empty if it gave none."""
    unanswered: str | None = None
    """Why it gave none, though it was asked."""
    block_sizes: Mapping[RankId, int]
    """Last block size seen in each rank's events."""
    trusts: Mapping[RankId, Trust] = msgspec.field(default_factory=dict)
    """Last known trust of each rank, for when there is no answer."""
    tier_weights: Mapping[Tier, float] = msgspec.field(default_factory=dict)
    """What a held token is worth by its tier; 1 where nothing is said."""

    def block_size(self, rank: RankId) -> int:
        """The rank's, else any in the fleet, else the usual one."""
        known = self.block_sizes.get(rank)
        return known or next(iter(self.block_sizes.values()), USUAL_BLOCK_SIZE)

    def keys(self, rank: RankId) -> Sequence[BlockKey]:
        """Keys of all prompts, in this rank's block size."""
        size = self.block_size(rank)
        if len(self.prompts) == 1:
            return self.prompts[0].keys(size)
        return [key for prompt in self.prompts for key in prompt.keys(size)]

    def chain_ends(self, rank: RankId) -> tuple[int, ...]:
        """Where each prompt's keys end among `keys`; nothing if there is only one."""
        if len(self.prompts) <= 1:
            return ()
        size = self.block_size(rank)
        return tuple(accumulate(len(prompt.keys(size)) for prompt in self.prompts))

    def is_confirmed(self, candidate: Candidate) -> bool:
        """Whether events will tell what a leg leaves there."""
        if self.unanswered is None:
            return candidate.trust in _EVENTS_TELL
        return self.trusts.get(candidate.rank) in _EVENTS_TELL

    def candidate(self, rank: RankId, instance: Instance, ledger: LoadLedger) -> Candidate:
        """`rank` with what it holds of the prompts."""
        overlap_tokens = predicted_tokens = used_blocks = 0
        by_tier: Mapping[Tier, int] = {}
        # A rank that an answer leaves out has no events; a missing answer says nothing of it.
        silent = Trust.LOAD_ONLY
        is_told = bool(self.by_rank) or self.unanswered is not None
        trust = silent if is_told else self.trusts.get(rank, silent)
        reason = self.unanswered
        known_size = self.block_sizes.get(rank)
        size, by_rank = known_size or self.block_size(rank), self.by_rank
        for number, prompt in enumerate(self.prompts):
            match = by_rank[number].get(rank) if by_rank else None
            held_tokens = 0
            if match is not None and match.trust is not silent:
                trust, reason, more = match.trust, match.reason, match.tokens_by_tier
                held_tokens = sum(more.values())
                by_tier = Counter(by_tier) + Counter(more) if by_tier else more
            overlap_tokens += held_tokens
            held_blocks = held_tokens // size
            coming_blocks, used = ledger.promised_blocks(rank, prompt.keys(size), held_blocks)
            if not number:
                used_blocks = used
            if coming_blocks:
                limit_blocks = prompt.hit_limit_blocks(size)
                coming_tokens = min(held_blocks + coming_blocks, limit_blocks) * size
                held_tokens = max(held_tokens, coming_tokens)
            predicted_tokens += held_tokens
        if trust is silent:
            reason = reason or self._why_silent(rank)
            is_predicted = self.unanswered is not None and predicted_tokens > 0
            if is_predicted or ledger.has_guesses(rank):
                trust = Trust.APPROXIMATE
        return Candidate(
            rank=rank,
            instance=instance,
            overlap_tokens=overlap_tokens,
            predicted_tokens=predicted_tokens,
            tokens_by_tier=by_tier,
            loading_tokens=self._loading_tokens(by_tier) if by_tier else 0.0,
            trust=trust,
            trust_reason=reason,
            block_size=known_size,
            used_blocks=used_blocks,
        )

    def _why_silent(self, rank: RankId) -> str | None:
        """Why the index promises nothing of a rank."""
        if not self.by_rank:
            return None
        match = self.by_rank[0].get(rank)
        return NOT_INDEXED if match is None else match.reason

    def _loading_tokens(self, by_tier: Mapping[Tier, int]) -> float:
        weights, loading_tokens = self.tier_weights, 0.0
        for tier, tokens in by_tier.items():
            if tier in weights:
                loading_tokens += (1 - weights[tier]) * tokens
        return loading_tokens


_MISSED: Final = frozenset({None, Hold.SILENT})
"""Holds of instances that nobody took out: they are down, or have stopped registering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The instances of one fleet that matter to one model."""

    answering: tuple[Instance, ...]
    """Available, decode or mixed."""
    prefill: tuple[Instance, ...]
    """Available, prefill."""
    prefill_expected: frozenset[str]
    """Connectors of the enabled prefill instances that may serve the model, available or not."""
    has_decode: bool
    """Some answering instance may want a prefill leg; else they do everything themselves."""


def find_pool(fleet: Fleet, model: str) -> Pool:
    """Instances for `model`. Raises ModelNotFoundError or NoInstanceError."""
    known: Pool | None = fleet.found.get(("pool", model))
    if known is None:
        known = fleet.found["pool", model] = _find_pool(fleet, model)
    return known


def _find_pool(fleet: Fleet, model: str) -> Pool:
    serving = fleet.serving(model)
    if not serving:
        raise unknown_model(fleet, model)
    available = [instance for instance in serving if instance.is_available]
    answering = tuple(each for each in available if each.role.answers_clients)
    if not answering:
        raise nobody_answers(fleet, model)
    return Pool(
        answering=answering,
        prefill=tuple(each for each in available if each.role is Role.PREFILL),
        prefill_expected=frozenset(
            each.connector
            for each in fleet.instances
            if each.role is Role.PREFILL
            and each.connector != NO_CONNECTOR
            and each.enabled
            and each.hold in _MISSED
            and (each.models is None or each.models.serves(model))
        ),
        has_decode=any(each.role is Role.DECODE for each in answering),
    )


class CandidateSource(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Builds loaded candidates for one request."""

    matches: PromptMatches
    ledger: LoadLedger
    max_requests_per_rank: int = 0
    """Legs in flight at which a rank is full; 0: never."""

    def load(
        self, instances: Sequence[Instance], exclude: frozenset[RankId]
    ) -> tuple[list[LoadedCandidate], bool]:
        """Every rank of `instances` that isn't excluded and has room; True if one had none."""
        ledger, matches, most = self.ledger, self.matches, self.max_requests_per_rank
        found: list[LoadedCandidate] = []
        some_full = False
        for instance in instances:
            capacity = instance.rank_cache_tokens
            for rank in instance.own_ranks:
                if rank in exclude:
                    continue
                load = ledger.load(rank)
                if 0 < most <= load.requests:
                    some_full = True
                    continue
                candidate = matches.candidate(rank, instance, ledger)
                memory = None if capacity is None else self._memory(candidate, load, capacity)
                found.append(LoadedCandidate(candidate=candidate, load=load, memory=memory))
        return found, some_full

    def _memory(self, candidate: Candidate, load: RankLoad, capacity_tokens: int) -> MemoryUse:
        """KV memory there with this request."""
        rank, prompts = candidate.rank, self.matches.prompts
        size = candidate.block_size or self.matches.block_size(rank)
        keys = prompts[0].keys(size) if len(prompts) == 1 else self.matches.keys(rank)
        return MemoryUse(
            active_tokens=size * load.active_blocks + load.output_tokens,
            need_tokens=size * (len(keys) - candidate.used_blocks),
            capacity_tokens=capacity_tokens,
        )

    def load_answering(
        self, instances: Sequence[Instance], exclude: frozenset[RankId]
    ) -> list[LoadedCandidate]:
        """The same, where there has to be one. Raises NoInstanceError or OverloadedError."""
        found, some_full = self.load(instances, exclude)
        if not found and some_full:
            raise OverloadedError("every instance of this model is at its limit of requests")
        if not found:
            raise NoInstanceError("no other instance of this model is available")
        return found


def request_shape(
    request: GenerateRequest, prompt: PromptView, matches: PromptMatches, session_header: str
) -> RequestShape:
    """What weighing needs to know of the request."""
    most = output_limit(request.body, request.endpoint)
    tokens = prompt.prompt_tokens
    if tokens is None:
        tokens = guess_tokens(request)
    return RequestShape(
        prompt_tokens=tokens,
        max_output_tokens=REFUSED_TOKENS if most is None else most,
        session=(
            named_session(request, session_header.lower().encode())
            or first_block(matches)
            or (opening(request.body) if prompt.prompt_tokens is None else None)
        ),
        is_scored=prompt.prompt_tokens is not None,
    )


def guess_tokens(request: GenerateRequest) -> int:
    """How long a prompt is that nobody has read."""
    if request.ids is not None:
        return len(request.ids.ids)
    ids = request.body.get("prompt")
    if isinstance(ids, list) and ids and isinstance(ids[0], int):
        return len(ids)
    return min(len(request.raw_body) // BYTES_PER_TOKEN, MAX_GUESSED_TOKENS)


def first_block(matches: PromptMatches) -> str | None:
    """Names what prompts that begin alike have in common: they count as one session."""
    if not matches.prompts:
        return None
    sizes = matches.block_sizes.values()
    keys = matches.prompts[0].keys(min(sizes, default=USUAL_BLOCK_SIZE))
    return str(keys[0]) if keys else None
