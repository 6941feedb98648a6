"""Whether a request to a decode instance is prefilled elsewhere first, and why.

Rules, the first that applies decides:

1. A mixed instance does everything itself.
2. An instance whose connector takes nothing without a prefill leg (`Connector.needs_prefill`) gets
   one, or no request, but for what it is certain to refuse (`core.routing.refusals`), which it is
   sent as it came. Everything below is for the others.
3. After prefill legs failed the decode instance does it all (the caller asked if that's allowed).
4. What two legs can't serve, an engine is likely to refuse anyway, or the instance's connector can't
   hand over (`Connector.carries`), isn't split.
5. The operator's `force: local`.
6. A prompt shorter than one block has nothing to hand over.
7. Once rates are known the estimated times decide (`core.routing.ways`), unless `decide: threshold` or
   `force: remote`, and if the prompt's tokens are known and someone could prefill it.
8. Else up to `local_prefill_max_tokens` uncached tokens run where the decode is, unless
   `force: remote`. An unscorable prompt's tokens are guessed from the body's size, all uncached.
9. Everything else takes a prefill leg. Where no prefill instance could ever hand over to this
   one (none there, or each with another connector) it runs where the decode is; where they are
   all down that has to be allowed (`allow_local_on_failure`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.load.ledger import Learning
from balancer.core.request import Endpoint
from balancer.core.routing.output_limits import whole_number
from balancer.core.routing.plan import Reason
from balancer.core.routing.refusals import Refusal
from balancer.core.settings.routing import PdSettings
from indexer.core.types import InstanceId


class SplitFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the decision reads of a request and its fleet; equal for all decode candidates."""

    prompt_tokens: int
    """Guessed if not `scored`."""
    scored: bool = True
    splittable: bool = True
    refusal: Refusal = Refusal.NO
    """Whether engines refuse what a prefill leg wouldn't show them."""
    block_size: int = 16
    """The largest among those who would hand over or receive."""
    prefill_failed: bool = False
    prefill_expected: frozenset[str] = frozenset()
    """Connectors of the fleet's prefill instances for the model, available or not."""
    prefill_full: bool = False
    """Some of them have no room. They are busy, not missing: nobody stands in for them."""
    unfit: frozenset[InstanceId] = frozenset()
    """Decode instances whose connector can't hand this request over."""
    bound: frozenset[InstanceId] = frozenset()
    """Decode instances that take no request without a prefill leg."""
    paired: frozenset[str] = frozenset()
    """Connectors that want both legs on ranks of the same number."""
    rates_known: bool = False
    """Prefill and transfer times are learned, so that they can be compared."""
    learning: Learning | None = None
    """Else what has been seen of them."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Run a prefill leg or not, and why."""

    reason: Reason
    remote: bool = False
    by_time: bool = False
    """Either way will do: the estimates decide. `reason` and `remote` are then of a prefill leg."""
    allowed: bool = True
    """False: a prefill leg is needed, its instances are down, and nobody may stand in."""
    learning: Learning | None = None
    """What has been seen of both ways' rates, if they would decide and it is too little."""


_AGGREGATED = Verdict(reason=Reason.AGGREGATED)


def decide(
    instance: Instance,
    uncached_tokens: int,
    has_prefill: bool,
    facts: SplitFacts,
    settings: PdSettings,
) -> Verdict:
    """Judge one decode candidate that lacks `uncached_tokens` of the prompt."""
    if instance.role is not Role.DECODE:
        return _AGGREGATED
    if instance.id in facts.bound:
        return _bound_verdict(instance, has_prefill, facts)
    if local := _local_reason(instance, facts, settings):
        return Verdict(reason=local)
    is_comparable = has_prefill and _compares_times(facts, settings)
    by_time = is_comparable and facts.rates_known
    learning = facts.learning if is_comparable else None
    is_little = settings.force != "remote" and uncached_tokens <= settings.local_prefill_max_tokens
    if is_little and not by_time:
        return Verdict(reason=_cheap_reason(facts, settings), learning=learning)
    if has_prefill:
        reason = _remote_reason(facts, settings)
        return Verdict(reason=reason, remote=True, by_time=by_time, learning=learning)
    return _without_prefill(instance.connector, facts, settings)


def _bound_verdict(instance: Instance, has_prefill: bool, facts: SplitFacts) -> Verdict:
    """For an engine that would wait for a hand-over, or take nothing for one."""
    if facts.refusal is Refusal.CERTAIN:
        return Verdict(reason=Reason.NOT_SPLITTABLE)
    if facts.prefill_failed:
        return Verdict(reason=Reason.PREFILL_FAILED, allowed=False)
    if not facts.splittable or instance.id in facts.unfit:
        return Verdict(reason=Reason.NOT_SPLITTABLE, allowed=False)
    if not has_prefill:
        return Verdict(reason=Reason.NO_PREFILL_INSTANCE, allowed=False)
    return Verdict(reason=Reason.REMOTE_PREFILL, remote=True)


def _without_prefill(connector: str, facts: SplitFacts, settings: PdSettings) -> Verdict:
    """Nobody can prefill for this candidate: because they are down, or because nobody ever could."""
    if connector in facts.prefill_expected:
        is_allowed = settings.allow_local_on_failure and not facts.prefill_full
        return Verdict(reason=Reason.NO_PREFILL_INSTANCE, allowed=is_allowed)
    if facts.prefill_expected:
        return Verdict(reason=Reason.CONNECTOR_MISMATCH)
    return Verdict(reason=Reason.NO_PREFILL_INSTANCE)


def _local_reason(instance: Instance, facts: SplitFacts, settings: PdSettings) -> Reason | None:
    if facts.prefill_failed:
        return Reason.PREFILL_FAILED
    if not facts.splittable or facts.refusal or instance.id in facts.unfit:
        return Reason.NOT_SPLITTABLE
    if settings.force == "local":
        return Reason.FORCED_LOCAL
    if facts.prompt_tokens < facts.block_size:
        return Reason.SHORT_PROMPT if facts.scored else Reason.UNSCORABLE
    return None


def _compares_times(facts: SplitFacts, settings: PdSettings) -> bool:
    """Whether it does so as soon as rates are known."""
    if settings.force != "auto" or settings.decide != "time":
        return False
    return facts.scored


def _cheap_reason(facts: SplitFacts, settings: PdSettings) -> Reason:
    if not facts.scored:
        return Reason.UNSCORABLE
    if facts.prompt_tokens <= settings.local_prefill_max_tokens:
        return Reason.SHORT_PROMPT
    return Reason.DECODE_HAS_CACHE


def _remote_reason(facts: SplitFacts, settings: PdSettings) -> Reason:
    if settings.force == "remote":
        return Reason.FORCED_REMOTE
    return Reason.REMOTE_PREFILL if facts.scored else Reason.UNSCORABLE


def is_splittable(body: Mapping[str, Any], prompts: int, endpoint: Endpoint) -> bool:
    """Whether two legs can serve this request.

    `prompts` is how many prompts were found; 0 if they are unknown.
    """
    if prompts > 1 or (not prompts and _names_several_prompts(body.get("prompt"))):
        return False  # only the first prompt's transfer parameters come back
    if _wants_several_answers(body):
        return False  # later ones would read what the prefill leg's one child left (NIXL)
    if _wants_logprobs_of_prompt(body, endpoint):
        return False  # the decode engine would compute the whole prompt again
    return body.get("prompt_embeds") is None


def _names_several_prompts(prompt: object) -> bool:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or len(prompt) < 2:
        return False
    return not isinstance(prompt[0], int)  # a look at each of millions would hold up the loop


def _wants_several_answers(body: Mapping[str, Any]) -> bool:
    """Engines make a child request of each; a hand-over serves one."""
    if body.get("use_beam_search"):
        return True
    counts = (body.get("n"), body.get("best_of"))
    return any(count is not None and whole_number(count) != 1 for count in counts)


def _wants_logprobs_of_prompt(body: Mapping[str, Any], endpoint: Endpoint) -> bool:
    """By their name, or by `echo`: of a completion with `logprobs`, of a chat in any case."""
    if body.get("prompt_logprobs") is not None:
        return True
    is_chat = endpoint is Endpoint.CHAT
    return bool(body.get("echo")) and (is_chat or body.get("logprobs") is not None)
