"""A request with everything its decision reads: asked once, kept for a second prefill leg."""

from collections.abc import Mapping

import msgspec

from balancer.connectors.contract import Connector, HandOver
from balancer.core.fleet.snapshot import Role
from balancer.core.load.ledger import Learning, LegWork
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.candidates import (
    Pool,
    PromptMatches,
)
from balancer.core.routing.cost import RequestShape, uncached_tokens
from balancer.core.routing.forecast import Forecast, incomparable_reason
from balancer.core.routing.plan import Candidate, Choice
from balancer.core.routing.prefill_policy import SplitFacts, is_splittable
from balancer.core.routing.refusals import find_refusal
from balancer.core.settings.routing import RoutingSettings
from indexer.core.types import InstanceId, RankId

CACHE_SHARE_BELIEVED = 0.5
"""Of a rank's cache: new prompt tokens after which what was computed before them may be evicted.
Their answers take room, too, and nobody counts those as they grow."""


class Question(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request with everything its decision reads, kept for a second prefill leg."""

    request: GenerateRequest
    prompt: PromptView
    matches: PromptMatches
    shape: RequestShape
    settings: RoutingSettings
    connectors: Mapping[str, Connector]
    matched_s: float
    """When the index was asked."""

    def facts(
        self,
        pool: Pool,
        *,
        context_tokens: int | None,
        prefill_failed: bool,
        prefill_full: bool,
        learning: Learning | None,
    ) -> SplitFacts:
        """Of a fleet with decode instances; elsewhere nobody asks.

        `context_tokens` is the longest context that one of them has, as far as they tell.
        """
        block_sizes = [
            self.matches.block_size(rank)
            for instance in (*pool.prefill, *pool.answering)
            for rank in instance.rank_ids()
        ]
        return SplitFacts(
            prompt_tokens=self.shape.prompt_tokens,
            scored=bool(self.prompt.prompts),
            splittable=is_splittable(
                self.request.body, len(self.prompt.prompts), self.request.endpoint
            ),
            refusal=find_refusal(
                self.request.body,
                self.request.endpoint,
                prompt_tokens=self.prompt.prompt_tokens,
                context_tokens=context_tokens,
            ),
            block_size=max(block_sizes),
            prefill_failed=prefill_failed,
            prefill_expected=pool.prefill_expected,
            prefill_full=prefill_full,
            unfit=self._unfit(pool, frozenset(block_sizes)),
            bound=frozenset(
                each.id
                for each in pool.answering
                if each.connector in self.connectors
                and self.connectors[each.connector].needs_prefill(each)
            ),
            paired=frozenset(name for name in pool.prefill_expected if self.pairs_ranks(name)),
            rates_known=learning is None,
            learning=learning,
        )

    def pairs_ranks(self, connector: str) -> bool:
        """Whether both legs should run on ranks of the same number."""
        return connector in self.connectors and self.connectors[connector].pairs_ranks

    def _unfit(self, pool: Pool, block_sizes: frozenset[int]) -> frozenset[InstanceId]:
        """Decode instances that can't use what another one computes of this request."""
        asked = HandOver(
            prompt_tokens=self.prompt.prompt_tokens,
            block_sizes=block_sizes,
            has_adapter=self.request.lora is not None,
            has_salt=self.request.body.get("cache_salt") is not None,
        )
        return frozenset(
            each.id
            for each in pool.answering
            if each.role is Role.DECODE
            and each.connector in self.connectors
            and not self.connectors[each.connector].carries(asked, each)
        )

    def forecast(self, rank: RankId, *, is_after_transfer: bool) -> Forecast:
        """What the index alone promised of `rank`."""
        prompts, by_rank = self.prompt.prompts, self.matches.by_rank
        return Forecast(
            rank=rank,
            model=self.request.base_model,
            matched_s=self.matched_s,
            prompt=prompts[0] if prompts else None,
            match=by_rank[0].get(rank) if by_rank else None,
            incomparable=incomparable_reason(
                self.request, self.prompt, is_after_transfer=is_after_transfer
            ),
        )

    def leg(self, choice: Choice, kind: str) -> LegWork:
        """What booking `choice` means for its rank."""
        candidate = choice.candidate
        is_confirmed = self.matches.is_confirmed(candidate)
        settings, is_one = self.settings, len(self.matches.prompts) == 1
        return LegWork(
            rank=candidate.rank,
            kind=kind,
            prompt_tokens=self.shape.prompt_tokens,
            uncached_tokens=uncached_tokens(self.shape, candidate),
            work_s=choice.terms.get("work", 0.0),
            keys=self.matches.keys(candidate.rank),
            chain_ends=self.matches.chain_ends(candidate.rank),
            streamed=kind == "prefill" or self.request.stream,
            believed_s=settings.confirm_s if is_confirmed else settings.approximate_ttl_s,
            believed_tokens=_believed_tokens(candidate) if is_confirmed else 0,
            remembered_s=0.0 if is_confirmed else settings.approximate_ttl_s,
            block_size=self.matches.block_size(candidate.rank) if is_one else 0,
            cache_tokens=candidate.instance.rank_cache_tokens or 0,
        )


def _believed_tokens(candidate: Candidate) -> int:
    return int(CACHE_SHARE_BELIEVED * (candidate.instance.rank_cache_tokens or 0))
