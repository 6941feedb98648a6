"""Checks that look at one engine's answers over HTTP.

Rules:

1. A check returns the findings of one fault and knows nothing of the others, but for faults that
   make its own facts meaningless.
2. What to change is said in the words of `vllm serve` or of our configuration file.
"""

from collections.abc import Iterator

from kvlb.doctor.core.facts import FleetFacts, InstanceFacts, Probed, Version
from kvlb.doctor.core.findings import Finding, Level

FIRST_RELEASE: Version = (0, 9)
LAST_RELEASE: Version = (0, 33)
"""docs/supported-versions.md."""
_ALWAYS_TELLS_CACHED: Version = (0, 26)
"""Before, an answer without cached tokens has no details at all."""

FAULTS = {
    "unreachable": "start the engine, or correct `url`; a firewall may be in between",
    "unauthorized": "give kvlb the engine's --api-key: `api_key_env` of the instance, or the "
    "variable KVLB_ENGINE_API_KEY",
    "not_vllm": "name the address of a `vllm serve`; /v1/models there must list a base model",
}


def instance_fault(facts: InstanceFacts) -> Iterator[Finding]:
    """It doesn't answer, wants another key, or is something else."""
    if facts.fault is not None:
        yield _finding(facts, facts.fault, facts.detail, FAULTS[facts.fault])


def unhealthy(facts: InstanceFacts) -> Iterator[Finding]:
    """`/health` is not 200: the engine behind the server is dead, or it drains."""
    status = facts.health_status
    if facts.fault is None and status is not None and status != 200:
        yield _finding(
            facts,
            "unhealthy",
            f"/health answered {status}",
            "read the engine's log and restart it; until /health answers 200 it gets no requests",
        )


def release_too_old(facts: InstanceFacts) -> Iterator[Finding]:
    """Releases before 0.9 publish no events that we know."""
    if facts.version is not None and facts.version < FIRST_RELEASE:
        yield _finding(
            facts,
            "release_too_old",
            f"vLLM {_text(facts.version)}",
            f"upgrade to vLLM {_text(FIRST_RELEASE)} or newer",
        )


def release_untested(facts: InstanceFacts) -> Iterator[Finding]:
    """A release that came after this version of kvlb."""
    if facts.version is not None and facts.version > LAST_RELEASE:
        yield _finding(
            facts,
            "release_untested",
            f"vLLM {_text(facts.version)}; kvlb was tested up to {_text(LAST_RELEASE)}",
            "nothing if the other checks find nothing; look for a newer kvlb",
            level=Level.INFO,
        )


def wrong_model(facts: InstanceFacts) -> Iterator[Finding]:
    """The file names a base model that the engine doesn't serve under this name."""
    wanted, models = facts.told.model, facts.models
    if wanted is not None and models is not None and wanted != models.base:
        served = ", ".join(sorted(models.aliases))
        yield _finding(
            facts,
            "wrong_model",
            f"`model: {wanted}`, but /v1/models lists {served}",
            f"set `model: {models.base}` or leave `model` out, or correct `url`; the first name "
            "given to --served-model-name counts",
        )


def prefix_caching_off(facts: InstanceFacts) -> Iterator[Finding]:
    """Nothing is kept, so there is nothing to route by."""
    if facts.metrics.has_prefix_caching is False:
        yield _finding(
            facts,
            "prefix_caching_off",
            "vllm:cache_config_info says enable_prefix_caching=False",
            "start the engine without --no-enable-prefix-caching (some models need "
            "--enable-prefix-caching)",
        )


def token_details_off(facts: InstanceFacts) -> Iterator[Finding]:
    """Answers don't say what was cached, so mispredictions stay unseen."""
    is_old = facts.version is None or facts.version < _ALWAYS_TELLS_CACHED
    if is_old and facts.metrics.has_prefix_caching is False:
        return
    answered = [probed for probed in _probes(facts) if probed.problem is None]
    if answered and not any(probed.tells_cached for probed in answered):
        yield _finding(
            facts,
            "token_details_off",
            "usage has no prompt_tokens_details.cached_tokens",
            "start the engine with --enable-prompt-tokens-details",
            level=Level.WARNING,
        )


def request_failed(facts: InstanceFacts) -> Iterator[Finding]:
    """It is there, but doesn't answer a request of one token."""
    problems = [probed.problem for probed in _probes(facts) if probed.problem is not None]
    if problems:
        yield _finding(
            facts,
            "request_failed",
            f"a completion of one token: {problems[0]}",
            "send it one by hand and read the engine's log",
        )


def tokenizer_differs(facts: InstanceFacts) -> Iterator[Finding]:
    """Our tokens of a text are not the engine's: every prediction is for another prompt."""
    tokenized = facts.tokenized
    if tokenized is not None and tokenized.differs_at is not None:
        yield _finding(
            facts,
            "tokenizer_differs",
            f"{tokenized.differs_at}: {tokenized.ours} tokens by {tokenized.directory}, "
            f"{tokenized.theirs} by the engine, or other ones",
            f"point `tokens.models` at the tokenizer and chat template the engine was started "
            f"with, or remove {facts.model} from it: engines are asked then",
        )


def keep_alive_too_short(fleet: FleetFacts) -> Iterator[Finding]:
    """The engine closes idle connections before our pool does: a request may meet a closed one."""
    for facts in fleet.instances:
        if facts.idle_closed_s is not None and facts.idle_closed_s <= fleet.keep_alive_s:
            yield _finding(
                facts,
                "keep_alive_too_short",
                f"closed an idle connection after {facts.idle_closed_s:.1f} s; kvlb keeps them for "
                f"{fleet.keep_alive_s:g} s",
                "set VLLM_HTTP_TIMEOUT_KEEP_ALIVE of the engine above `dataplane.keep_alive_s`, or "
                "lower that",
                level=Level.WARNING,
            )


def not_probed(fleet: FleetFacts) -> Iterator[Finding]:
    """Without requests only half can be seen."""
    if not fleet.is_probed:
        yield Finding(
            name="not_probed",
            level=Level.INFO,
            instance="fleet",
            seen="no requests were sent (--no-probe)",
            change="run without --no-probe to have events, usage and transfers checked, too",
        )


def _probes(facts: InstanceFacts) -> Iterator[Probed]:
    for probed in (facts.probed, *(stream.probed for stream in facts.streams)):
        if probed is not None:
            yield probed


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _finding(
    facts: InstanceFacts, name: str, seen: str, change: str, *, level: Level = Level.ERROR
) -> Finding:
    return Finding(name=name, level=level, instance=facts.name, seen=seen, change=change)
