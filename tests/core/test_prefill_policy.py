"""Whether a prefill leg is run, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.load.ledger import Learning
from balancer.core.routing.plan import Reason
from balancer.core.routing.prefill_policy import SplitFacts, Verdict, decide
from balancer.core.routing.refusals import Refusal
from balancer.core.settings.routing import PdSettings
from indexer.core.types import InstanceId

AUTO = PdSettings()
LONG = SplitFacts(prompt_tokens=1000)
NIXL = frozenset({"nixl"})


def instance(role: Role = Role.DECODE) -> Instance:
    return Instance(id=InstanceId("http://e:8000"), alias="e", role=role, connector="nixl")


def verdict(
    uncached_tokens: int,
    facts: SplitFacts = LONG,
    settings: PdSettings = AUTO,
    *,
    has_prefill: bool = True,
) -> Verdict:
    return decide(instance(), uncached_tokens, has_prefill, facts, settings)


def test_a_mixed_instance_does_everything() -> None:
    """Whatever else is true."""
    assert decide(instance(Role.MIXED), 10**6, True, LONG, PdSettings(force="remote")) == Verdict(
        reason=Reason.AGGREGATED
    )


@pytest.mark.parametrize(
    ("uncached", "reason", "remote"),
    [
        pytest.param(256, Reason.DECODE_HAS_CACHE, False, id="at-the-limit"),
        pytest.param(257, Reason.REMOTE_PREFILL, True, id="one-over"),
    ],
)
def test_the_local_limit_decides(uncached: int, reason: Reason, remote: bool) -> None:
    """Up to the limit the decode instance computes what it lacks."""
    assert verdict(uncached) == Verdict(reason=reason, remote=remote)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        pytest.param(256, Reason.SHORT_PROMPT, id="short"),
        pytest.param(257, Reason.REMOTE_PREFILL, id="one-over"),
    ],
)
def test_a_short_prompt_is_named_so(tokens: int, reason: Reason) -> None:
    """No cache was needed for the skip."""
    assert verdict(tokens, SplitFacts(prompt_tokens=tokens)).reason is reason


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        pytest.param(31, Reason.SHORT_PROMPT, id="less-than-a-block"),
        pytest.param(32, Reason.FORCED_REMOTE, id="a-block"),
    ],
)
def test_less_than_a_block_is_never_handed_over(tokens: int, reason: Reason) -> None:
    """Not even when forced."""
    facts = SplitFacts(prompt_tokens=tokens, block_size=32)

    assert verdict(tokens, facts, PdSettings(force="remote")).reason is reason


def test_what_the_connector_cant_carry_is_not_split() -> None:
    """Not even when forced; others of the fleet may have another connector."""
    facts = SplitFacts(prompt_tokens=1000, unfit=frozenset({instance().id}))

    forced = verdict(1000, facts, PdSettings(force="remote"))

    assert forced == Verdict(reason=Reason.NOT_SPLITTABLE)


@pytest.mark.parametrize("refusal", [Refusal.LIKELY, Refusal.CERTAIN])
def test_no_prompt_is_computed_for_what_engines_may_refuse(refusal: Refusal) -> None:
    """Not even when forced (F32)."""
    facts = SplitFacts(prompt_tokens=1000, refusal=refusal)

    assert verdict(1000, facts, PdSettings(force="remote")) == Verdict(reason=Reason.NOT_SPLITTABLE)


BOUND = frozenset({instance().id})


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param(
            SplitFacts(prompt_tokens=3, bound=BOUND),
            Verdict(reason=Reason.REMOTE_PREFILL, remote=True),
            id="however-short",
        ),
        pytest.param(
            SplitFacts(prompt_tokens=1000, bound=BOUND, splittable=False),
            Verdict(reason=Reason.NOT_SPLITTABLE, allowed=False),
            id="not-splittable",
        ),
        pytest.param(
            SplitFacts(prompt_tokens=1000, bound=BOUND, refusal=Refusal.LIKELY),
            Verdict(reason=Reason.REMOTE_PREFILL, remote=True),
            id="likely-to-be-refused",
        ),
        pytest.param(
            SplitFacts(
                prompt_tokens=1000,
                bound=BOUND,
                refusal=Refusal.CERTAIN,
                splittable=False,
                prefill_failed=True,
            ),
            Verdict(reason=Reason.NOT_SPLITTABLE),
            id="refused-whatever-else-is",
        ),
        pytest.param(
            SplitFacts(prompt_tokens=1000, bound=BOUND, unfit=BOUND),
            Verdict(reason=Reason.NOT_SPLITTABLE, allowed=False),
            id="not-carried",
        ),
        pytest.param(
            SplitFacts(prompt_tokens=1000, bound=BOUND, prefill_failed=True),
            Verdict(reason=Reason.PREFILL_FAILED, allowed=False),
            id="after-a-failure",
        ),
    ],
)
def test_an_instance_that_takes_nothing_else_gets_a_prefill_leg_or_nothing(
    facts: SplitFacts, expected: Verdict
) -> None:
    """Whatever it holds and whatever the operator forces: alone it would wait, or invent.

    What it refuses without a look at its blocks is the exception.
    """
    settings = PdSettings(force="local", allow_local_on_failure=True)

    assert verdict(0, facts, settings) == expected


def test_nobody_stands_in_for_a_missing_prefill_of_a_bound_instance() -> None:
    """Not even where that is allowed."""
    facts = SplitFacts(prompt_tokens=1000, bound=BOUND)
    settings = PdSettings(allow_local_on_failure=True)

    assert verdict(1000, facts, settings, has_prefill=False) == Verdict(
        reason=Reason.NO_PREFILL_INSTANCE, allowed=False
    )


def test_force_remote_sends_what_is_cached_too() -> None:
    """The operator wants to see prefill legs."""
    assert verdict(1, settings=PdSettings(force="remote")) == Verdict(
        reason=Reason.FORCED_REMOTE, remote=True
    )


def test_force_local_runs_no_prefill_leg() -> None:
    """However long the prompt is."""
    assert verdict(10**6, settings=PdSettings(force="local")).reason is Reason.FORCED_LOCAL


@pytest.mark.parametrize(
    ("guessed", "remote"), [(256, False), (257, True)], ids=["small-body", "large-body"]
)
def test_an_unscorable_prompt_goes_by_its_guessed_length(guessed: int, remote: bool) -> None:
    """The reason says that tokens are unknown; the length is taken as all uncached."""
    facts = SplitFacts(prompt_tokens=guessed, scored=False)

    assert verdict(guessed, facts) == Verdict(reason=Reason.UNSCORABLE, remote=remote)


def test_an_unscorable_prompt_below_a_block_stays_local() -> None:
    """Its prefill leg would have nothing to hand over."""
    facts = SplitFacts(prompt_tokens=300, scored=False, block_size=512)

    assert verdict(300, facts) == Verdict(reason=Reason.UNSCORABLE)


KNOWN = SplitFacts(prompt_tokens=1000, rates_known=True)


LEARNING = Learning(prefills=3, hand_overs=2, needed=3)
UNKNOWN = SplitFacts(prompt_tokens=1000, learning=LEARNING)


@pytest.mark.parametrize(
    ("uncached", "reason"), [(200, Reason.DECODE_HAS_CACHE), (5000, Reason.REMOTE_PREFILL)]
)
def test_what_keeps_times_from_being_compared_is_told(uncached: int, reason: Reason) -> None:
    """Where they would be: both ways are open, and the limit decides until rates are known."""
    decided = verdict(uncached, UNKNOWN)

    assert (decided.reason, decided.learning) == (reason, LEARNING)


@pytest.mark.parametrize(
    ("facts", "settings", "has_prefill"),
    [
        pytest.param(UNKNOWN, PdSettings(decide="threshold"), True, id="threshold"),
        pytest.param(UNKNOWN, PdSettings(force="remote"), True, id="forced"),
        pytest.param(UNKNOWN, AUTO, False, id="nobody-prefills"),
        pytest.param(
            SplitFacts(prompt_tokens=1000, scored=False, learning=LEARNING), AUTO, True, id="text"
        ),
        pytest.param(SplitFacts(prompt_tokens=10, learning=LEARNING), AUTO, True, id="short"),
    ],
)
def test_rates_are_not_missing_where_they_would_not_decide(
    facts: SplitFacts, settings: PdSettings, has_prefill: bool
) -> None:
    """Another rule does."""
    assert verdict(200, facts, settings, has_prefill=has_prefill).learning is None


@pytest.mark.parametrize("uncached", [1, 256, 5000])
def test_known_rates_decide_whatever_the_limit_says(uncached: int) -> None:
    """Either way is open; the estimates are compared later."""
    assert verdict(uncached, KNOWN) == Verdict(
        reason=Reason.REMOTE_PREFILL, remote=True, by_time=True
    )


@pytest.mark.parametrize(
    ("facts", "settings", "has_prefill", "reason"),
    [
        pytest.param(LONG, AUTO, True, Reason.DECODE_HAS_CACHE, id="rates-unknown"),
        pytest.param(
            KNOWN, PdSettings(decide="threshold"), True, Reason.DECODE_HAS_CACHE, id="threshold"
        ),
        pytest.param(KNOWN, PdSettings(force="remote"), True, Reason.FORCED_REMOTE, id="forced"),
        pytest.param(KNOWN, AUTO, False, Reason.DECODE_HAS_CACHE, id="nobody-prefills"),
        pytest.param(
            SplitFacts(prompt_tokens=1000, rates_known=True, scored=False),
            AUTO,
            True,
            Reason.UNSCORABLE,
            id="tokens-unknown",
        ),
        pytest.param(
            SplitFacts(prompt_tokens=1000, rates_known=True, splittable=False),
            AUTO,
            True,
            Reason.NOT_SPLITTABLE,
            id="not-splittable",
        ),
        pytest.param(
            SplitFacts(prompt_tokens=10, rates_known=True),
            AUTO,
            True,
            Reason.SHORT_PROMPT,
            id="short",
        ),
    ],
)
def test_times_are_compared_only_where_both_ways_are_open(
    facts: SplitFacts, settings: PdSettings, has_prefill: bool, reason: Reason
) -> None:
    """Everything else goes by its own rule."""
    decided = verdict(200, facts, settings, has_prefill=has_prefill)

    assert not decided.by_time
    assert decided.reason is reason


def test_an_unsplittable_request_stays_local() -> None:
    """Two legs can't serve it."""
    facts = SplitFacts(prompt_tokens=1000, splittable=False)

    assert verdict(1000, facts).reason is Reason.NOT_SPLITTABLE


def test_after_failed_prefill_the_decode_instance_does_it() -> None:
    """The caller asked whether that is allowed."""
    facts = SplitFacts(prompt_tokens=1000, prefill_failed=True)

    assert verdict(1000, facts).reason is Reason.PREFILL_FAILED


@pytest.mark.parametrize(
    ("expected", "full", "allow", "allowed"),
    [
        pytest.param(frozenset(), False, False, True, id="none-configured"),
        pytest.param(NIXL, False, False, False, id="all-down"),
        pytest.param(NIXL, False, True, True, id="all-down-but-allowed"),
        pytest.param(NIXL, True, True, False, id="all-full"),
    ],
)
def test_without_a_prefill_instance(
    expected: frozenset[str], full: bool, allow: bool, allowed: bool
) -> None:
    """A fleet that has none computes locally; one whose are down must be told to (F36)."""
    facts = SplitFacts(prompt_tokens=1000, prefill_expected=expected, prefill_full=full)
    settings = PdSettings(allow_local_on_failure=allow)

    assert verdict(1000, facts, settings, has_prefill=False) == Verdict(
        reason=Reason.NO_PREFILL_INSTANCE, allowed=allowed
    )


@pytest.mark.parametrize("full", [False, True])
def test_instance_whose_connector_nobody_shares_prefills_itself(full: bool) -> None:
    """Refusing the request would not mend the configuration; the reason names the fault."""
    facts = SplitFacts(prompt_tokens=1000, prefill_expected=frozenset({"other"}), prefill_full=full)

    assert verdict(1000, facts, has_prefill=False) == Verdict(reason=Reason.CONNECTOR_MISMATCH)


def test_what_the_decode_instance_holds_needs_no_prefill_instance() -> None:
    """All prefill instances may be down: this request doesn't care."""
    facts = SplitFacts(prompt_tokens=1000, prefill_expected=NIXL)

    assert verdict(10, facts, has_prefill=False) == Verdict(reason=Reason.DECODE_HAS_CACHE)


@given(
    uncached=st.integers(0, 5000),
    tokens=st.integers(1, 5000),
    limit=st.integers(0, 3000),
    scored=st.booleans(),
)
def test_a_prefill_leg_is_never_run_for_little(
    uncached: int, tokens: int, limit: int, scored: bool
) -> None:
    """Left to itself the policy keeps the limit exactly."""
    facts = SplitFacts(prompt_tokens=tokens, scored=scored, block_size=1)
    settings = PdSettings(local_prefill_max_tokens=limit)

    assert verdict(uncached, facts, settings).remote == (uncached > limit)
