"""Rules of the audit about other requests and engines: transfers, drafts, leaders, late events."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvlb.audit.forecast import Forecast, Step
from kvlb.audit.rules import (
    Evidence,
    concurrent,
    drafting_drops_block,
    events_lost,
    late_event,
    remote_load,
)
from kvlb.audit.rules import windows_unnamed as windows_unnamed_rule
from kvlb.audit.sent import Sent

Sending = Callable[..., Sent]
Forecasting = Callable[..., Forecast]
Evident = Callable[..., Evidence]

PROMPT = tuple(range(100, 165))
"""65 tokens: four full blocks, all of which may be cached."""


def test_a_decode_engine_counts_what_prefill_saved(sent: Sending, forecast: Forecasting) -> None:
    """The prompt another engine computed before is loaded, up to its last full block."""
    saved = sent(i=0, t0=8.0, t1=9.0)
    evidence = Evidence(sent=sent(), forecast=forecast(16), loads_remote=True, producers=[saved])

    assert remote_load(evidence) == (64,)


def test_an_engine_that_saves_finds_its_own_blocks_again(
    sent: Sending, forecast: Forecasting
) -> None:
    """Shared storage gives back what the GPU has evicted."""
    own = sent(i=0, t0=8.0, t1=9.0)
    evidence = Evidence(
        sent=sent(), forecast=forecast(0), loads_remote=True, saves_remote=True, neighbours=[own]
    )

    assert remote_load(evidence) == (64,)


@pytest.mark.parametrize(
    ("loads_remote", "saved_t0"),
    [
        pytest.param(False, 8.0, id="engine-loads-nothing"),
        pytest.param(True, 12.0, id="saved-only-later"),
    ],
)
def test_nothing_is_loaded_that_was_not_saved(
    loads_remote: bool, saved_t0: float, sent: Sending, forecast: Forecasting
) -> None:
    """A load needs an engine that loads and somebody who saved before."""
    saved = sent(i=0, t0=saved_t0, t1=saved_t0 + 1)
    evidence = Evidence(
        sent=sent(), forecast=forecast(0), loads_remote=loads_remote, producers=[saved]
    )

    assert not remote_load(evidence)


def test_a_neighbour_of_a_consumer_saves_nothing(sent: Sending, forecast: Forecasting) -> None:
    """An engine that only loads does not find what it computed itself."""
    own = sent(i=0, t0=8.0, t1=9.0)
    evidence = Evidence(sent=sent(), forecast=forecast(0), loads_remote=True, neighbours=[own])

    assert not remote_load(evidence)


def test_a_transfer_counts_as_cached(sent: Sending, forecast: Forecasting) -> None:
    """A decode leg reports the transferred prompt, its last token or block computed anew."""
    body = {"kv_transfer_params": {"do_remote_prefill": True}}

    assert remote_load(Evidence(sent=sent(body=body), forecast=forecast(0))) == (64, 64, 65)


def test_a_transfer_that_tells_the_prefill_figure_reports_that(
    sent: Sending, forecast: Forecasting
) -> None:
    """Since 0.31 the prefill leg's own cached tokens are passed on."""
    body = {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": 48}}

    assert remote_load(Evidence(sent=sent(body=body), forecast=forecast(0))) == (48,)


def test_a_prefill_leg_loads_nothing(sent: Sending, forecast: Forecasting) -> None:
    """Transfer parameters alone are no load."""
    body = {"kv_transfer_params": {"do_remote_decode": True}}

    assert not remote_load(Evidence(sent=sent(body=body), forecast=forecast(0)))


def test_drafting_computes_the_last_block_of_a_hit_anew(
    sent: Sending, forecast: Forecasting
) -> None:
    """One block less than held."""
    assert drafting_drops_block(Evidence(sent=sent(), forecast=forecast(48), drafts=True)) == (32,)


@pytest.mark.parametrize(("drafts", "held"), [(False, 48), (True, 0)])
def test_without_draft_or_hit_no_block_is_dropped(
    drafts: bool, held: int, sent: Sending, forecast: Forecasting
) -> None:
    """Nothing to drop, or nobody to drop it."""
    evidence = Evidence(sent=sent(), forecast=forecast(held), drafts=drafts)

    assert not drafting_drops_block(evidence)


def test_a_follower_hits_what_a_leader_is_storing(sent: Sending, forecast: Forecasting) -> None:
    """Up to the blocks both share, more than was known when it was sent."""
    leader = sent(i=0, t0=9.5, t1=10.5, tokens=PROMPT[:50])
    evidence = Evidence(sent=sent(), forecast=forecast(16), neighbours=[leader])

    assert set(concurrent(evidence)) == {32, 48}


def test_a_follower_may_find_blocks_displaced_while_it_waited(
    sent: Sending, forecast: Forecasting
) -> None:
    """Only what the rank held at some moment before the answer, and less than predicted."""
    other = sent(i=0, t0=9.5, t1=10.5, tokens=PROMPT[:20])
    steps = [Step(10.2, 64), Step(10.5, 16), Step(11.5, 0)]
    evidence = Evidence(sent=sent(), forecast=forecast(48, steps=steps), neighbours=[other])

    assert set(concurrent(evidence)) == {16}


@pytest.fixture
def other(request: pytest.FixtureRequest, sent: Sending) -> Sent:
    """A request with these fields."""
    return sent(i=0, **request.param)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"t0": 8.0, "t1": 9.9}, id="answered-before"),
        pytest.param({"t0": 11.1, "t1": 12.0}, id="sent-after-the-answer"),
        pytest.param({"tokens": PROMPT[:15]}, id="shares-less-than-a-block"),
        pytest.param({"salt": "b"}, id="another-tenant"),
    ],
    indirect=True,
)
def test_only_a_request_that_overlaps_and_shares_is_concurrent(
    other: Sent, sent: Sending, forecast: Forecasting
) -> None:
    """Time alone or tokens alone explain nothing."""
    evidence = Evidence(
        sent=sent(), forecast=forecast(0, steps=[Step(10.5, 64)]), neighbours=[other]
    )

    assert not concurrent(evidence)


@pytest.fixture
def late_store(sent: Sending, forecast: Forecasting) -> Evident:
    """Blocks that an earlier request stored become known only half a second after sending."""

    def make(**changes: Any) -> Evidence:
        earlier = sent(i=0, t0=8.0, t1=9.0)
        evidence = Evidence(
            sent=sent(), forecast=forecast(0, steps=[Step(10.5, 64)]), neighbours=[earlier]
        )
        return replace(evidence, **changes)

    return make


def test_an_event_that_came_late_explains_what_it_brought(late_store: Evident) -> None:
    """With it applied the prediction is exact."""
    assert set(late_event(late_store())) == {64}


def test_own_blocks_are_no_late_event(late_store: Evident) -> None:
    """Blocks appear after every request; nobody had stored them before."""
    assert not late_event(late_store(neighbours=[]))


def test_blocks_dropped_since_the_earlier_request_are_no_late_event(
    forecast: Forecasting, late_store: Evident
) -> None:
    """The earlier request's events had come: its blocks were seen to go again."""
    known = forecast(0, steps=[Step(10.5, 64)], missing_since=9.5)

    assert not late_event(late_store(forecast=known))


def test_more_than_the_earlier_request_had_is_no_late_event(
    sent: Sending, late_store: Evident
) -> None:
    """What appears beyond the common beginning was stored by the request itself."""
    assert not late_event(late_store(neighbours=[sent(i=0, t0=8.0, t1=9.0, tokens=PROMPT[:50])]))


def test_a_removal_that_came_late_explains_what_it_took(
    sent: Sending, forecast: Forecasting
) -> None:
    """A block had gone before the answer, unheard."""
    evidence = Evidence(sent=sent(), forecast=forecast(64, steps=[Step(10.5, 32)]))

    assert set(late_event(evidence)) == {32}


def test_a_removal_after_the_answer_explains_nothing(sent: Sending, forecast: Forecasting) -> None:
    """It was published after the engine had answered."""
    evidence = Evidence(sent=sent(), forecast=forecast(64, steps=[Step(11.5, 32)]))

    assert not late_event(evidence)


def test_windows_without_a_name_may_end_a_hit_early(sent: Sending, forecast: Forecasting) -> None:
    """Every whole block below the prediction, never more than it."""
    evidence = Evidence(sent=sent(), forecast=forecast(48, windows_unnamed=True))

    assert list(windows_unnamed_rule(evidence)) == [0, 16, 32]


def test_named_windows_end_hits_where_predicted(sent: Sending, forecast: Forecasting) -> None:
    """Since 0.22 the index checks them."""
    assert not windows_unnamed_rule(Evidence(sent=sent(), forecast=forecast(48)))


@pytest.mark.parametrize(
    ("tokens", "body", "figures"),
    [
        pytest.param(PROMPT[:40], {"max_tokens": 1}, [0, 16, 32], id="its-prompt"),
        pytest.param(PROMPT[:40], {"max_tokens": 9}, [0, 16, 32, 48], id="and-its-answer"),
        pytest.param(PROMPT[:40], {}, [0, 16, 32, 48, 64], id="and-an-answer-of-any-length"),
        pytest.param((*PROMPT[:20], 7), {}, [0, 16], id="what-is-shared"),
    ],
)
def test_lost_batches_may_have_told_of_what_others_left(
    tokens: tuple[int, ...],
    body: dict[str, Any],
    figures: list[int],
    sent: Sending,
    forecast: Forecasting,
) -> None:
    """No more than that, and nothing where none was lost."""
    other = sent(i=0, t0=8.0, t1=9.0, tokens=tokens, body=body)
    evidence = Evidence(
        sent=sent(), forecast=replace(forecast(0), events_lost=True), neighbours=[other]
    )

    assert list(events_lost(evidence)) == figures
    assert not events_lost(replace(evidence, forecast=forecast(0)))


def test_lost_batches_may_have_told_that_blocks_went(sent: Sending, forecast: Forecasting) -> None:
    """Any part of what was credited."""
    evidence = Evidence(sent=sent(), forecast=replace(forecast(48), events_lost=True))

    assert list(events_lost(evidence)) == [0, 16, 32]
