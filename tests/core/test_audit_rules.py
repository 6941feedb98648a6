"""Each rule of the audit: the case it names, and the nearest case it must leave alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.hashing import Namespace
from indexer.core.types import InstanceId, RankId
from kvlb.audit.forecast import Forecast, Step
from kvlb.audit.rules import (
    RULES,
    Evidence,
    concurrent,
    drafting_drops_block,
    explain,
    late_event,
    later_child,
    no_cache_read,
    remote_load,
    report_mode_full,
    reset_seen_late,
    restart_seen_late,
    salt_unpublished,
)
from kvlb.audit.rules import windows_unnamed as windows_unnamed_rule
from kvlb.audit.sent import Sent

BLOCK = 16
RANK = RankId(InstanceId("w0"), 0)
PROMPT = tuple(range(100, 165))
"""65 tokens: four full blocks, all of which may be cached."""


def sent(
    *,
    i: int = 1,
    tokens: tuple[int, ...] = PROMPT,
    t0: float = 10.0,
    t1: float = 11.0,
    body: Mapping[str, Any] | None = None,
    path: str = "/v1/completions",
    salt: str | None = None,
) -> Sent:
    return Sent(
        position=i,
        rank=RANK,
        path=path,
        body=body or {},
        namespace=Namespace(model="tiny", cache_salt=salt),
        tokens=tokens,
        t0=t0,
        t1=t1,
    )


def forecast(
    tokens: int,
    *,
    steps: Sequence[Step] = (),
    missing_since: float = float("-inf"),
    unsalted_tokens: int = 0,
    counted_once_tokens: int | None = None,
    cleared: bool = False,
    restarted: bool = False,
    windows_unnamed: bool = False,
) -> Forecast:
    return Forecast(
        tokens=tokens,
        missing_since=missing_since,
        unsalted_tokens=unsalted_tokens,
        counted_once_tokens=tokens if counted_once_tokens is None else counted_once_tokens,
        block_size=BLOCK,
        limit_tokens=64,
        steps=list(steps),
        cleared=cleared,
        restarted=restarted,
        windows_unnamed=windows_unnamed,
    )


def asking(body: Mapping[str, Any], path: str = "/v1/completions") -> Evidence:
    return Evidence(sent=sent(body=body, path=path), forecast=forecast(64))


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
def test_prompt_logprobs_read_nothing_from_the_cache(body: Mapping[str, Any], path: str) -> None:
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
def test_other_logprobs_leave_the_cache_in_use(body: Mapping[str, Any], path: str) -> None:
    """Only logprobs of the prompt keep the engine from its cache."""
    assert not no_cache_read(asking(body, path))


@pytest.mark.parametrize("body", [{"n": 2}, {"best_of": 3}, {"n": 1, "best_of": 2}])
def test_of_several_answers_the_later_one_finds_the_prompt(body: Mapping[str, Any]) -> None:
    """The figure is the last child's, for which the first computed every full block."""
    cold = Evidence(sent=sent(body=body), forecast=forecast(0))

    assert later_child(cold) == (64,)


@pytest.mark.parametrize("body", [{}, {"n": 1}, {"n": None}])
def test_a_single_answer_has_no_later_child(body: Mapping[str, Any]) -> None:
    """One answer reports its own lookup."""
    assert not later_child(Evidence(sent=sent(body=body), forecast=forecast(0)))


def test_a_reset_that_nobody_heard_of_empties_the_cache() -> None:
    """The clear is published with the step of the request that met it."""
    assert reset_seen_late(Evidence(sent=sent(), forecast=forecast(64, cleared=True))) == (0,)


def test_without_a_clear_there_was_no_reset() -> None:
    """A miss alone is no reset."""
    assert not reset_seen_late(Evidence(sent=sent(), forecast=forecast(64, restarted=True)))


def test_a_restart_that_nobody_heard_of_empties_the_cache() -> None:
    """A new process says so with its first batch, after the request was sent."""
    assert restart_seen_late(Evidence(sent=sent(), forecast=forecast(64, restarted=True))) == (0,)


def test_without_a_new_process_there_was_no_restart() -> None:
    """A clear is no restart."""
    assert not restart_seen_late(Evidence(sent=sent(), forecast=forecast(64, cleared=True)))


@pytest.mark.parametrize("version", [None, (0, 26), (0, 33)])
def test_reannounced_blocks_are_held_once(version: tuple[int, int] | None) -> None:
    """Counting a report as a copy keeps a block that has gone."""
    known = forecast(64, counted_once_tokens=0)

    assert report_mode_full(Evidence(sent=sent(), forecast=known, version=version)) == (0,)


def test_before_report_mode_existed_nothing_was_reannounced() -> None:
    """The same argument is ignored by older engines, and every store was a copy."""
    known = forecast(64, counted_once_tokens=0)

    assert not report_mode_full(Evidence(sent=sent(), forecast=known, version=(0, 25)))


def test_without_reannounced_blocks_report_mode_explains_nothing() -> None:
    """Nobody asked for a report on this rank."""
    assert not report_mode_full(Evidence(sent=sent(), forecast=forecast(64)))


def salted(version: tuple[int, int], *, first_salt: str | None) -> Evidence:
    """A request with salt `a`, after one of the same tokens; events know the tokens as plain."""
    earlier = sent(i=0, t0=1.0, t1=2.0, salt=first_salt, tokens=PROMPT[:40])
    return Evidence(
        sent=sent(salt="a"),
        forecast=forecast(0, unsalted_tokens=64),
        version=version,
        neighbours=[earlier],
    )


def test_a_salt_that_events_do_not_carry_hides_what_its_tenant_stored() -> None:
    """Before 0.17: as many blocks as the tenant's earlier request had, and the rank still holds."""
    assert salt_unpublished(salted((0, 16), first_salt="a")) == (32,)


def test_another_tenant_s_blocks_stay_out_of_reach() -> None:
    """The same tokens under another salt are no hit."""
    assert salt_unpublished(salted((0, 16), first_salt="b")) == (0,)


def test_plain_tokens_may_be_a_tenant_s() -> None:
    """Before 0.17: what looks plain in the events was stored under a salt, so no plain hit."""
    tenant = sent(i=0, t0=1.0, t1=2.0, salt="a")
    plain = Evidence(
        sent=sent(),
        forecast=forecast(64, unsalted_tokens=64),
        version=(0, 16),
        neighbours=[tenant],
    )

    assert salt_unpublished(plain) == (0,)


def test_since_events_carry_salts_nothing_is_hidden() -> None:
    """0.17 publishes extra keys."""
    assert not salt_unpublished(salted((0, 17), first_salt="a"))


def test_an_unknown_version_excuses_nothing() -> None:
    """Only a known old release publishes no salts."""
    evidence = replace(salted((0, 16), first_salt="a"), version=None)

    assert not salt_unpublished(evidence)


def test_without_salts_there_is_nothing_to_publish() -> None:
    """Before 0.17, but nobody used a salt."""
    evidence = Evidence(
        sent=sent(),
        forecast=forecast(0, unsalted_tokens=0),
        version=(0, 16),
        neighbours=[sent(i=0, t0=1.0, t1=2.0)],
    )

    assert not salt_unpublished(evidence)


def test_a_decode_engine_counts_what_prefill_saved() -> None:
    """The prompt another engine computed before is loaded, up to its last full block."""
    saved = sent(i=0, t0=8.0, t1=9.0)
    evidence = Evidence(sent=sent(), forecast=forecast(16), loads_remote=True, producers=[saved])

    assert remote_load(evidence) == (64,)


def test_an_engine_that_saves_finds_its_own_blocks_again() -> None:
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
def test_nothing_is_loaded_that_was_not_saved(loads_remote: bool, saved_t0: float) -> None:
    """A load needs an engine that loads and somebody who saved before."""
    saved = sent(i=0, t0=saved_t0, t1=saved_t0 + 1)
    evidence = Evidence(
        sent=sent(), forecast=forecast(0), loads_remote=loads_remote, producers=[saved]
    )

    assert not remote_load(evidence)


def test_a_neighbour_of_a_consumer_saves_nothing() -> None:
    """An engine that only loads does not find what it computed itself."""
    own = sent(i=0, t0=8.0, t1=9.0)
    evidence = Evidence(sent=sent(), forecast=forecast(0), loads_remote=True, neighbours=[own])

    assert not remote_load(evidence)


def test_a_transfer_counts_as_cached() -> None:
    """A decode leg reports the transferred prompt, its last token or block computed anew."""
    body = {"kv_transfer_params": {"do_remote_prefill": True}}

    assert remote_load(Evidence(sent=sent(body=body), forecast=forecast(0))) == (64, 64, 65)


def test_a_transfer_that_tells_the_prefill_figure_reports_that() -> None:
    """Since 0.31 the prefill leg's own cached tokens are passed on."""
    body = {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": 48}}

    assert remote_load(Evidence(sent=sent(body=body), forecast=forecast(0))) == (48,)


def test_a_prefill_leg_loads_nothing() -> None:
    """Transfer parameters alone are no load."""
    body = {"kv_transfer_params": {"do_remote_decode": True}}

    assert not remote_load(Evidence(sent=sent(body=body), forecast=forecast(0)))


def test_drafting_computes_the_last_block_of_a_hit_anew() -> None:
    """One block less than held."""
    assert drafting_drops_block(Evidence(sent=sent(), forecast=forecast(48), drafts=True)) == (32,)


@pytest.mark.parametrize(("drafts", "held"), [(False, 48), (True, 0)])
def test_without_draft_or_hit_no_block_is_dropped(drafts: bool, held: int) -> None:
    """Nothing to drop, or nobody to drop it."""
    evidence = Evidence(sent=sent(), forecast=forecast(held), drafts=drafts)

    assert not drafting_drops_block(evidence)


def test_a_follower_hits_what_a_leader_is_storing() -> None:
    """Up to the blocks both share, more than was known when it was sent."""
    leader = sent(i=0, t0=9.5, t1=10.5, tokens=PROMPT[:50])
    evidence = Evidence(sent=sent(), forecast=forecast(16), neighbours=[leader])

    assert set(concurrent(evidence)) == {32, 48}


def test_a_follower_may_find_blocks_displaced_while_it_waited() -> None:
    """Only what the rank held at some moment before the answer, and less than predicted."""
    other = sent(i=0, t0=9.5, t1=10.5, tokens=PROMPT[:20])
    steps = [Step(10.2, 64), Step(10.5, 16), Step(11.5, 0)]
    evidence = Evidence(sent=sent(), forecast=forecast(48, steps=steps), neighbours=[other])

    assert set(concurrent(evidence)) == {16}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(sent(i=0, t0=8.0, t1=9.9), id="answered-before"),
        pytest.param(sent(i=0, t0=11.1, t1=12.0), id="sent-after-the-answer"),
        pytest.param(sent(i=0, tokens=PROMPT[:15]), id="shares-less-than-a-block"),
        pytest.param(sent(i=0, salt="b"), id="another-tenant"),
    ],
)
def test_only_a_request_that_overlaps_and_shares_is_concurrent(other: Sent) -> None:
    """Time alone or tokens alone explain nothing."""
    evidence = Evidence(
        sent=sent(), forecast=forecast(0, steps=[Step(10.5, 64)]), neighbours=[other]
    )

    assert not concurrent(evidence)


def late_store(**changes: Any) -> Evidence:
    """Blocks that an earlier request stored become known only half a second after sending."""
    earlier = sent(i=0, t0=8.0, t1=9.0)
    evidence = Evidence(
        sent=sent(), forecast=forecast(0, steps=[Step(10.5, 64)]), neighbours=[earlier]
    )
    return replace(evidence, **changes)


def test_an_event_that_came_late_explains_what_it_brought() -> None:
    """With it applied the prediction is exact."""
    assert set(late_event(late_store())) == {64}


def test_own_blocks_are_no_late_event() -> None:
    """Blocks appear after every request; nobody had stored them before."""
    assert not late_event(late_store(neighbours=[]))


def test_blocks_dropped_since_the_earlier_request_are_no_late_event() -> None:
    """The earlier request's events had come: its blocks were seen to go again."""
    known = forecast(0, steps=[Step(10.5, 64)], missing_since=9.5)

    assert not late_event(late_store(forecast=known))


def test_more_than_the_earlier_request_had_is_no_late_event() -> None:
    """What appears beyond the common beginning was stored by the request itself."""
    assert not late_event(late_store(neighbours=[sent(i=0, t0=8.0, t1=9.0, tokens=PROMPT[:50])]))


def test_a_removal_that_came_late_explains_what_it_took() -> None:
    """A block had gone before the answer, unheard."""
    evidence = Evidence(sent=sent(), forecast=forecast(64, steps=[Step(10.5, 32)]))

    assert set(late_event(evidence)) == {32}


def test_a_removal_after_the_answer_explains_nothing() -> None:
    """It was published after the engine had answered."""
    evidence = Evidence(sent=sent(), forecast=forecast(64, steps=[Step(11.5, 32)]))

    assert not late_event(evidence)


def test_windows_without_a_name_may_end_a_hit_early() -> None:
    """Every whole block below the prediction, never more than it."""
    evidence = Evidence(sent=sent(), forecast=forecast(48, windows_unnamed=True))

    assert list(windows_unnamed_rule(evidence)) == [0, 16, 32]


def test_named_windows_end_hits_where_predicted() -> None:
    """Since 0.22 the index checks them."""
    assert not windows_unnamed_rule(Evidence(sent=sent(), forecast=forecast(48)))


def test_the_first_rule_that_fits_names_the_cause() -> None:
    """A cause that needs no other request comes before concurrency."""
    leader = sent(i=0, t0=9.5, t1=10.5)
    evidence = Evidence(sent=sent(body={"n": 2}), forecast=forecast(0), neighbours=[leader])

    assert explain(evidence, 64) == "later_child"
    assert explain(evidence, 48) == "concurrent"


def test_a_rule_that_fits_another_figure_does_not_name_the_cause() -> None:
    """A restart would have left nothing cached, not half of it."""
    evidence = Evidence(sent=sent(), forecast=forecast(64, restarted=True))

    assert explain(evidence, 32) is None


def test_a_rank_that_never_published_has_no_blocks_to_count() -> None:
    """Without a block size no number of blocks can be named."""
    unheard = Forecast(tokens=0, missing_since=0.0, unsalted_tokens=0, counted_once_tokens=0)
    evidence = Evidence(sent=sent(), forecast=unheard, neighbours=[sent(i=0)])

    assert explain(evidence, 64) is None


@given(st.integers(min_value=0, max_value=64), st.integers(min_value=0, max_value=64))
def test_a_plain_request_alone_is_never_excused(predicted: int, reported: int) -> None:
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
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    """Equal up to there, different or at an end after it."""
    shared = sent(tokens=left).shared_tokens(sent(tokens=right))

    assert left[:shared] == right[:shared]
    assert shared in (len(left), len(right)) or left[shared] != right[shared]
