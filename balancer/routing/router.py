"""`Router`: asks the index, plans, and books before anyone else can plan.

Rules:

1. Cache knowledge is advice. An index that is slow or fails costs the overlap, never the request.
2. Choice and booking happen in one step of the event loop: the next decision sees them.
3. A `Route` holds what was booked until its `with` block ends; an exception that leaves the block
   withdraws the predicted blocks of every leg that still runs.
4. Candidates come from the fleet snapshot alone. Ranks that the index knows and the fleet doesn't
   are ignored and counted.
5. A rank whose epoch in the index is another than last time has restarted: its predictions and
   learned rates end before the next decision. If only its cache was emptied, predictions do.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from balancer.connectors.contract import Connector
from balancer.core.errors import PrefillFailedError
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.load.ledger import LoadLedger
from balancer.core.prompt.limits import find_model_tokens
from balancer.core.reliability.vetting import NoVetting, Vetting
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.candidates import (
    NOT_INDEXED,
    CandidateSource,
    PromptMatches,
    find_pool,
    first_block,
    request_shape,
)
from balancer.core.routing.cost import TieBreak
from balancer.core.routing.known_ranks import KnownRanks
from balancer.core.routing.plan import Candidate, RoutePlan
from balancer.core.routing.planner import Planner
from balancer.core.routing.policies import Policy, UnreadPolicy, seeded_draw
from balancer.core.routing.unread import (
    UNREAD,
    Sampling,
    unread_pool,
    unread_work,
    with_room,
)
from balancer.core.settings.routing import PdSettings, RoutingSettings
from balancer.routing.lookups import Lookups
from balancer.routing.question import Question
from balancer.routing.route import Route, UnreadRoute
from balancer.tracing import NoTracing, Tracing
from indexer.core.index import PrefixLookup, PrefixMatch
from indexer.core.types import RankId, Trust


class Router:
    """Decides for every request of a process."""

    def __init__(  # noqa: PLR0913 - built in one place, which hands everything down
        self,
        *,
        index: PrefixLookup,
        ledger: LoadLedger,
        policy: Policy,
        settings: RoutingSettings,
        random: Callable[[], float],
        clock: Callable[[], float],
        pd: PdSettings | None = None,
        connectors: Mapping[str, Connector] | None = None,
        on_lookup: Callable[[str, float], None] | None = None,
        tracing: Tracing | None = None,
        vetting: Vetting | None = None,
    ) -> None:
        """`on_lookup` is told the outcome (ok, timeout, failed, skipped) and its seconds."""
        self.lookups = Lookups(
            index,
            clock=clock,
            timeout_s=lambda: self._settings.lookup_timeout_s,
            on_lookup=on_lookup,
        )
        self._ledger = ledger
        self._connectors = connectors or {}
        self._pulling = frozenset(name for name, each in self._connectors.items() if each.pulls)
        self.set_settings(settings, pd or PdSettings(), policy)
        self._random = random
        self._clock = clock
        self._tracing = tracing or NoTracing()
        self._vetting = vetting or NoVetting()
        self._ranks = KnownRanks()

    @property
    def known_ranks(self) -> KnownRanks:
        """What the index last said of each rank: for looking at only."""
        return self._ranks

    @property
    def max_requests_per_rank(self) -> int:
        """As set now; 0: no limit."""
        return self._settings.max_requests_per_rank

    @property
    def unknown_ranks(self) -> int:
        """Ranks in the index's answers that the fleet doesn't have, summed over lookups."""
        return self._ranks.unknown

    @property
    def silent_ranks(self) -> int:
        """Ranks whose indexer has stopped."""
        return self._ranks.silent

    @property
    def index_problem(self) -> str | None:
        """What keeps cache knowledge from being exact, beside what streams do; None: nothing."""
        if self.lookups.problem is not None or not self.silent_ranks:
            return self.lookups.problem
        return (
            f"no indexer keeps what the index says of {self.silent_ranks} rank(s) up to date:"
            " is one running?"
        )

    def trust(self, rank: RankId) -> Trust:
        """How far what is known of a rank's cache can be believed, as of the last lookups.

        While they fail nothing is known by events, whatever was told before.
        """
        is_told = self.lookups.problem is None
        known = self._ranks.trusts.get(rank, Trust.LOAD_ONLY) if is_told else Trust.LOAD_ONLY
        is_guessed = known is Trust.LOAD_ONLY and self._ledger.has_guesses(rank)
        return Trust.APPROXIMATE if is_guessed else known

    def belief(self, rank: RankId) -> tuple[Trust, str | None]:
        """The same, and why it isn't exact where somebody said."""
        trust, reason = self.trust(rank), self.lookups.reason or self._ranks.reasons.get(rank)
        is_known = trust in {Trust.EXACT, Trust.DEGRADED}
        return trust, reason if reason or is_known else NOT_INDEXED

    def set_settings(self, settings: RoutingSettings, pd: PdSettings, policy: Policy) -> None:
        """Decide by these from the next request on."""
        self._settings = settings
        self._tier_weights = settings.tier_weights()
        self._pd = pd
        self._policy = policy
        self._unread = policy if isinstance(policy, UnreadPolicy) else None
        self._sampling = Sampling(settings.observe_share)
        self._planner = Planner(policy=policy, pd=pd, transfer=self._ledger.transfer)

    def reads_prompt(self, fleet: Fleet, model: str) -> bool:
        """Whether the tokens of a request are wanted; else it is routed as `UNREAD`.

        To be asked once per request. Raises ModelNotFoundError or NoInstanceError.
        """
        if self._unread is None or unread_pool(fleet, model, self._pulling) is None:
            return True
        return self._sampling.is_due()

    async def route(
        self,
        fleet: Fleet,
        request: GenerateRequest,
        prompt: PromptView,
        *,
        exclude: frozenset[RankId] = frozenset(),
        prefill_failed: bool = False,
    ) -> Route:
        """Choose and book. `exclude`: ranks that already failed this request.

        `prefill_failed` asks for a plan without a prefill leg, after all attempts at one. Raises
        ModelNotFoundError, NoInstanceError, OverloadedError or PrefillFailedError.
        """
        if prompt is UNREAD:
            unread = self.route_unread(fleet, request, exclude)
            if unread is not None:
                return unread
        if prefill_failed and not self._pd.allow_local_on_failure:
            raise PrefillFailedError("prefill failed, and decode instances may not stand in")
        question = await self._ask(fleet, request, prompt)
        if self._tracing.is_on:
            with self._tracing.step("plan") as step:
                plan = self._plan(fleet, question, exclude, prefill_failed=prefill_failed)
                step.note("kvlb.reason", plan.reason.value)
        else:
            plan = self._plan(fleet, question, exclude, prefill_failed=prefill_failed)
        self._policy.chosen(plan.decode.candidate.rank)
        if plan.prefill:
            self._policy.chosen(plan.prefill.candidate.rank)
        return Route(question, plan, self._ledger)

    def route_unread(
        self, fleet: Fleet, request: GenerateRequest, exclude: frozenset[RankId] = frozenset()
    ) -> Route | None:
        """Choose and book without the prompt; None: by now it is wanted.

        Raises ModelNotFoundError, NoInstanceError or OverloadedError.
        """
        policy = self._unread
        pool = unread_pool(fleet, request.model, self._pulling) if policy is not None else None
        if policy is None or pool is None:
            return None
        ledger, settings = self._ledger, self._settings
        usable = self._vetting.usable(pool.answering, exclude)
        all_usable = len(usable) == len(pool.answering)
        candidates: Sequence[Candidate] = pool.candidates
        if exclude or not all_usable:
            candidates = pool.among(usable, exclude)
        if not candidates or settings.max_requests_per_rank:
            candidates = with_room(candidates, ledger, settings.max_requests_per_rank)
        rank = policy.next_of(candidates, ledger.busy, self._any_draw).rank
        plan = pool.plans[rank]
        if not all_usable:
            plan = self._with_held_back(plan, pool.answering, usable)
        policy.chosen(rank)
        return UnreadRoute(plan, ledger.hold(unread_work(request, rank, ledger, settings)))

    def _any_draw(self, rank: RankId) -> float:  # noqa: ARG002 - of any rank
        return self._random()

    async def explain(
        self, fleet: Fleet, request: GenerateRequest, prompt: PromptView
    ) -> RoutePlan:
        """The plan `route` would make now. Books nothing."""
        question = await self._ask(fleet, request, prompt)
        return self._plan(fleet, question, frozenset(), prefill_failed=False)

    async def cached_share(
        self, fleet: Fleet, request: GenerateRequest, prompt: PromptView
    ) -> float:
        """Of the prompt, the most that any rank that could take it holds or is about to; 0: not known.

        Raises ModelNotFoundError or NoInstanceError.
        """
        pool = find_pool(fleet, request.model)
        tokens = sum(each.tokens for each in prompt.prompts)
        if not tokens:
            return 0.0
        matches = (await self._ask(fleet, request, prompt)).matches
        candidates = (
            matches.candidate(rank, instance, self._ledger)
            for instance in (*pool.prefill, *pool.answering)
            for rank in instance.rank_ids()
        )
        most = max(max(each.overlap_tokens, each.predicted_tokens) for each in candidates)
        return most / tokens

    def replace_prefill(
        self,
        fleet: Fleet,
        route: Route,
        failed: BaseException,
        exclude: frozenset[RankId] = frozenset(),
    ) -> bool:
        """The prefill leg of `route` failed: withdraw it and book another rank's.

        `exclude` are ranks that failed before; the one that failed now is excluded anyway. The
        decode leg stays booked where it is. False if attempts or ranks have run out: then leave
        the route with the error and ask for `route(prefill_failed=True)`.
        """
        route.drop_prefill(failed)
        question = route.question
        if route.plan.prefill is None or route.prefill_attempts >= self._pd.prefill_attempts:
            return False
        exclude |= {route.plan.prefill.candidate.rank}
        pool = find_pool(fleet, question.request.model)
        usable = self._vetting.usable(pool.prefill, exclude)
        sources, _ = self._source(question).load(usable, exclude)
        connector = route.plan.decode.candidate.instance.connector
        plan = self._planner.replace_prefill(
            route.plan,
            question.shape,
            sources,
            self._draw(question),
            paired=question.pairs_ranks(connector),
        )
        if plan is None or plan.prefill is None:
            return False
        route.plan = plan
        route.hold_prefill(plan.prefill)
        self._policy.chosen(plan.prefill.candidate.rank)
        return True

    async def _ask(self, fleet: Fleet, request: GenerateRequest, prompt: PromptView) -> Question:
        matched_s = self._clock()
        if self._tracing.is_on:
            with self._tracing.step("match") as step:
                by_rank, outcome = await self.lookups.match(prompt.prompts)
                step.note("kvlb.lookup", outcome)
        else:
            by_rank, outcome = await self.lookups.match(prompt.prompts)
        if by_rank:
            self.learn(fleet, by_rank[0])
        matches = PromptMatches(
            prompts=prompt.prompts,
            by_rank=by_rank,
            unanswered=self.lookups.lack(outcome),
            block_sizes=self._ranks.block_sizes,
            trusts=self._ranks.trusts,
            tier_weights=self._tier_weights,
        )
        return Question(
            request=request,
            prompt=prompt,
            matches=matches,
            shape=request_shape(request, prompt, matches, self._settings.session_header),
            settings=self._settings,
            connectors=self._connectors,
            matched_s=matched_s,
        )

    def _plan(
        self,
        fleet: Fleet,
        question: Question,
        exclude: frozenset[RankId],
        *,
        prefill_failed: bool,
    ) -> RoutePlan:
        pool = find_pool(fleet, question.request.model)
        source, draw = self._source(question), self._draw(question)
        answering = self._vetting.usable(pool.answering, exclude)
        prefilling = self._vetting.usable(pool.prefill, exclude) if pool.prefill else ()
        decode = source.load_answering(answering, exclude)
        if pool.has_decode and question.request.endpoint.is_split:
            prefill, some_full = source.load(prefilling, exclude)
            facts = question.facts(
                pool,
                context_tokens=find_model_tokens(fleet, question.request.model),
                prefill_failed=prefill_failed,
                prefill_full=some_full and not prefill,
                learning=self._ledger.learning,
            )
            plan = self._planner.plan(question.shape, facts, decode, prefill, draw)
        else:
            scored = bool(question.prompt.prompts)
            plan = self._planner.plan_whole(question.shape, decode, draw, scored=scored)
        everybody, usable = (*pool.answering, *pool.prefill), (*answering, *prefilling)
        if len(usable) == len(everybody):
            return plan
        return self._with_held_back(plan, everybody, usable)

    def _with_held_back(
        self, plan: RoutePlan, everybody: Sequence[Instance], usable: Sequence[Instance]
    ) -> RoutePlan:
        """With those that weren't considered, and why."""
        reasons = {each.alias: self._vetting.reason(each.id) for each in everybody}
        for each in usable:
            del reasons[each.alias]
        return msgspec.structs.replace(
            plan, held_back={name: why or "" for name, why in reasons.items()}
        )

    def _source(self, question: Question) -> CandidateSource:
        return CandidateSource(
            matches=question.matches,
            ledger=self._ledger,
            max_requests_per_rank=self._settings.max_requests_per_rank,
        )

    def _draw(self, question: Question) -> TieBreak:
        """Siblings draw alike, also in processes that haven't heard of each other's yet.

        Few decisions come to a draw: what it depends on is looked up by the first one.
        """
        drawn: TieBreak | None = None

        def draw(rank: RankId) -> float:
            nonlocal drawn
            if drawn is None:
                begin = first_block(question.matches)
                seed = int(self._random() * 2**53) if begin is None else int(begin)
                drawn = seeded_draw(seed)
            return drawn(rank)

        return draw

    def learn(self, fleet: Fleet, answer: Mapping[RankId, PrefixMatch]) -> None:
        """Remember what is needed when the index is silent; forget what a restart or clear made void."""
        voided = self._ranks.learn(fleet.ranks, answer)
        for rank in voided.restarted:
            self._ledger.forget(rank)
        for rank in voided.emptied:
            self._ledger.empty(rank)
