"""Each rule of the audit: the case it names, and the nearest case it must leave alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlb.audit.forecast import Forecast
from kvlb.audit.rules import (
    RULES,
    Evidence,
    explain,
    later_child,
    no_cache_read,
    report_mode_full,
    reset_seen_late,
    restart_seen_late,
    salt_unpublished,
)
from kvlb.audit.sent import Sent

Sending = Callable[..., Sent]
Forecasting = Callable[..., Forecast]
Evident = Callable[..., Evidence]

PROMPT = tuple(range(100, 165))
"""65 tokens: four full blocks, all of which may be cached."""


@pytest.fixture
def asking(sent: Sending, forecast: Forecasting) -> Evident:
    """A request with this body."""

    def make(body: Mapping[str, Any], path: str = "/v1/completions") -> Evidence:
        return Evidence(sent=sent(body=body, path=path), forecast=forecast(64))

    return make


@pytest.mark.parametrize(
    ("body", "path"),
    [
        pytest.param({"prompt_logprobs": 1}, "/v1/completions", id="prompt-logprobs"),
        pytest.param({"prompt_logprobs": 0}, "/v1/completions", id="prompt-logprobs-0-is-asked"),
        pytest.param({"echo": True, "logprobs": 1}, "/v1/completions", id="echo-and-logprobs"),
        pytest.param({"prompt_logprobs": 2}, "/v1/chat/completions", id="chat-prompt-logprobs"),
        pytest.param({"echo": True}, "/v1/chat/completions", id="chat-echo-has-default-0"),
    ],
)
def test_prompt_logprobs_read_nothing_from_the_cache(
    body: Mapping[str, Any], path: str, asking: Evident
) -> None:
    """An engine that must answer logprobs of the prompt computes all of it."""
    assert no_cache_read(asking(body, path)) == (0,)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        pytest.param({}, "/v1/completions", id="plain"),
        pytest.param({"logprobs": 1}, "/v1/completions", id="logprobs-of-the-answer"),
        pytest.param({"echo": True}, "/v1/completions", id="echo-alone"),
        pytest.param({"prompt_logprobs": None}, "/v1/completions", id="null"),
        pytest.param(
            {"echo": True, "top_logprobs": None}, "/v1/chat/completions", id="chat-echo-null"
        ),
    ],
)
def test_other_logprobs_leave_the_cache_in_use(
    body: Mapping[str, Any], path: str, asking: Evident
) -> None:
    """Only logprobs of the prompt keep the engine from its cache."""
    assert not no_cache_read(asking(body, path))


@pytest.mark.parametrize("body", [{"n": 2}, {"best_of": 3}, {"n": 1, "best_of": 2}])
def test_of_several_answers_the_later_one_finds_the_prompt(
    body: Mapping[str, Any], sent: Sending, forecast: Forecasting
) -> None:
    """The figure is the last child's, for which the first computed every full block."""
    cold = Evidence(sent=sent(body=body), forecast=forecast(0))

    assert later_child(cold) == (64,)


@pytest.mark.parametrize("body", [{}, {"n": 1}, {"n": None}])
def test_a_single_answer_has_no_later_child(
    body: Mapping[str, Any], sent: Sending, forecast: Forecasting
) -> None:
    """One answer reports its own lookup."""
    assert not later_child(Evidence(sent=sent(body=body), forecast=forecast(0)))


def test_a_reset_that_nobody_heard_of_empties_the_cache(
    sent: Sending, forecast: Forecasting
) -> None:
    """The clear is published with the step of the request that met it."""
    assert reset_seen_late(Evidence(sent=sent(), forecast=forecast(64, cleared=True))) == (0,)


def test_without_a_clear_there_was_no_reset(sent: Sending, forecast: Forecasting) -> None:
    """A miss alone is no reset."""
    assert not reset_seen_late(Evidence(sent=sent(), forecast=forecast(64, restarted=True)))


def test_a_restart_that_nobody_heard_of_empties_the_cache(
    sent: Sending, forecast: Forecasting
) -> None:
    """A new process says so with its first batch, after the request was sent."""
    assert restart_seen_late(Evidence(sent=sent(), forecast=forecast(64, restarted=True))) == (0,)


def test_without_a_new_process_there_was_no_restart(sent: Sending, forecast: Forecasting) -> None:
    """A clear is no restart."""
    assert not restart_seen_late(Evidence(sent=sent(), forecast=forecast(64, cleared=True)))


@pytest.mark.parametrize("version", [None, (0, 26), (0, 33)])
def test_reannounced_blocks_are_held_once(
    version: tuple[int, int] | None, sent: Sending, forecast: Forecasting
) -> None:
    """Counting a report as a copy keeps a block that has gone."""
    known = forecast(64, counted_once_tokens=0)

    assert report_mode_full(Evidence(sent=sent(), forecast=known, version=version)) == (0,)


def test_before_report_mode_existed_nothing_was_reannounced(
    sent: Sending, forecast: Forecasting
) -> None:
    """The same argument is ignored by older engines, and every store was a copy."""
    known = forecast(64, counted_once_tokens=0)

    assert not report_mode_full(Evidence(sent=sent(), forecast=known, version=(0, 25)))


def test_without_reannounced_blocks_report_mode_explains_nothing(
    sent: Sending, forecast: Forecasting
) -> None:
    """Nobody asked for a report on this rank."""
    assert not report_mode_full(Evidence(sent=sent(), forecast=forecast(64)))


@pytest.fixture
def salted(sent: Sending, forecast: Forecasting) -> Evident:
    """A request with salt `a`, after one of the same tokens; events know the tokens as plain."""

    def make(version: tuple[int, int], *, first_salt: str | None) -> Evidence:
        earlier = sent(i=0, t0=1.0, t1=2.0, salt=first_salt, tokens=PROMPT[:40])
        return Evidence(
            sent=sent(salt="a"),
            forecast=forecast(0, unsalted_tokens=64),
            version=version,
            neighbours=[earlier],
        )

    return make


def test_a_salt_that_events_do_not_carry_hides_what_its_tenant_stored(salted: Evident) -> None:
    """Before 0.17: as many blocks as the tenant's earlier request had, and the rank still holds."""
    assert salt_unpublished(salted((0, 16), first_salt="a")) == (32,)


def test_another_tenant_s_blocks_stay_out_of_reach(salted: Evident) -> None:
    """The same tokens under another salt are no hit."""
    assert salt_unpublished(salted((0, 16), first_salt="b")) == (0,)


def test_plain_tokens_may_be_a_tenant_s(sent: Sending, forecast: Forecasting) -> None:
    """Before 0.17: what looks plain in the events was stored under a salt, so no plain hit."""
    tenant = sent(i=0, t0=1.0, t1=2.0, salt="a")
    plain = Evidence(
        sent=sent(),
        forecast=forecast(64, unsalted_tokens=64),
        version=(0, 16),
        neighbours=[tenant],
    )

    assert salt_unpublished(plain) == (0,)


def test_since_events_carry_salts_nothing_is_hidden(salted: Evident) -> None:
    """0.17 publishes extra keys."""
    assert not salt_unpublished(salted((0, 17), first_salt="a"))


def test_an_unknown_version_excuses_nothing(salted: Evident) -> None:
    """Only a known old release publishes no salts."""
    evidence = replace(salted((0, 16), first_salt="a"), version=None)

    assert not salt_unpublished(evidence)


def test_without_salts_there_is_nothing_to_publish(sent: Sending, forecast: Forecasting) -> None:
    """Before 0.17, but nobody used a salt."""
    evidence = Evidence(
        sent=sent(),
        forecast=forecast(0, unsalted_tokens=0),
        version=(0, 16),
        neighbours=[sent(i=0, t0=1.0, t1=2.0)],
    )

    assert not salt_unpublished(evidence)


def test_the_first_rule_that_fits_names_the_cause(sent: Sending, forecast: Forecasting) -> None:
    """A cause that needs no other request comes before concurrency."""
    leader = sent(i=0, t0=9.5, t1=10.5)
    evidence = Evidence(sent=sent(body={"n": 2}), forecast=forecast(0), neighbours=[leader])

    assert explain(evidence, 64) == "later_child"
    assert explain(evidence, 48) == "concurrent"


def test_a_rule_that_fits_another_figure_does_not_name_the_cause(
    sent: Sending, forecast: Forecasting
) -> None:
    """A restart would have left nothing cached, not half of it."""
    evidence = Evidence(sent=sent(), forecast=forecast(64, restarted=True))

    assert explain(evidence, 32) is None


def test_a_rank_that_never_published_has_no_blocks_to_count(sent: Sending) -> None:
    """Without a block size no number of blocks can be named."""
    unheard = Forecast(tokens=0, missing_since=0.0, unsalted_tokens=0, counted_once_tokens=0)
    evidence = Evidence(sent=sent(), forecast=unheard, neighbours=[sent(i=0)])

    assert explain(evidence, 64) is None


@given(st.integers(min_value=0, max_value=64), st.integers(min_value=0, max_value=64))
def test_a_plain_request_alone_is_never_excused(
    sent: Sending, forecast: Forecasting, predicted: int, reported: int
) -> None:
    """No neighbour, nothing special asked, no later event: whatever differs is our fault."""
    evidence = Evidence(sent=sent(), forecast=forecast(predicted), version=(0, 32))

    assert explain(evidence, reported) is None


def test_rules_have_distinct_names() -> None:
    """A name is one cause."""
    assert len({rule.name for rule in RULES}) == len(RULES)


@given(
    st.lists(st.integers(min_value=0, max_value=3), max_size=12).map(tuple),
    st.lists(st.integers(min_value=0, max_value=3), max_size=12).map(tuple),
)
def test_shared_tokens_are_the_common_beginning(
    sent: Sending, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    """Equal up to there, different or at an end after it."""
    shared = sent(tokens=left).shared_tokens(sent(tokens=right))

    assert left[:shared] == right[:shared]
    assert shared in (len(left), len(right)) or left[shared] != right[shared]
