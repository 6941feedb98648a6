"""What the index promised of a leg, held against what the engine reported."""

from typing import Any

import pytest

from balancer.core.record import LegRecord
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.findings import Findings
from balancer.core.routing.forecast import Finding, Forecast, conclude, incomparable_reason
from indexer.core.hashing import Namespace
from indexer.core.index import PrefixMatch, Prompt
from indexer.core.reports import CacheReport, RankTally, aged
from indexer.core.types import InstanceId, RankId, Tier, Trust

RANK = RankId(InstanceId("http://e0:8000"), 0)
OTHER = RankId(InstanceId("http://e1:8000"), 0)
SIZE = 16
PROMPT = Prompt(Namespace(model="m"), range(10 * SIZE + 1))
KEYS = PROMPT.keys(SIZE)


def request(**body: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        endpoint=Endpoint.COMPLETIONS,
        body=body,
        raw_body=b"",
        headers=(),
        model="m",
        base_model="m",
        lora=None,
    )


def match(blocks: int = 0, **changed: Any) -> PrefixMatch:
    known: dict[str, Any] = {
        "tokens_by_tier": {Tier.GPU: blocks * SIZE} if blocks else {},
        "block_size": SIZE,
        "trust": Trust.EXACT,
        "epoch": 7,
    }
    return PrefixMatch(**known | changed)


def forecast(blocks: int = 0, **changed: Any) -> Forecast:
    known: dict[str, Any] = {
        "rank": RANK,
        "model": "m",
        "matched_s": 100.0,
        "prompt": PROMPT,
        "match": match(blocks),
    }
    return Forecast(**known | changed)


def leg(cached_tokens: int | None = 0, **changed: Any) -> LegRecord:
    known: dict[str, Any] = {
        "kind": "decode",
        "alias": "a",
        "overlap_tokens": 0,
        "started_s": 0.0,
        "prompt_tokens": PROMPT.tokens,
        "cached_tokens": cached_tokens,
    }
    return LegRecord(**known | changed)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, None),
        ({"n": 1, "best_of": None, "logprobs": 3}, None),
        ({"chat": 1, "logprobs": True}, None),
        ({"n": 2}, "several_answers"),
        ({"best_of": 3}, "several_answers"),
        ({"use_beam_search": True}, "several_answers"),
        ({"prompt_logprobs": 0}, "no_cache_read"),
        ({"echo": True, "logprobs": 0}, "no_cache_read"),
        ({"echo": True, "logprobs": False}, None),
        ({"echo": True}, None),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
    ],
)
def test_requests_that_say_nothing_of_the_index(body: dict[str, Any], reason: str | None) -> None:
    """The engine's figure is of something else, or it doesn't look at its cache."""
    view = PromptView(prompts=(PROMPT,))

    assert incomparable_reason(request(**body), view, is_after_transfer=False) == reason


def test_prompts_and_legs_that_say_nothing_of_the_index() -> None:
    """Unknown tokens, several prompts, and what was sent over (F35)."""
    assert incomparable_reason(request(), PromptView(), is_after_transfer=False) == "unscorable"
    two = PromptView(prompts=(PROMPT, PROMPT))
    assert incomparable_reason(request(), two, is_after_transfer=False) == "several_prompts"
    one = PromptView(prompts=(PROMPT,))
    assert incomparable_reason(request(), one, is_after_transfer=True) == "after_transfer"


@pytest.mark.parametrize(
    ("promised", "told", "outcome"),
    [
        (forecast(), leg(error="stream_cut"), "failed"),
        (forecast(incomparable="several_answers"), leg(), "several_answers"),
        (forecast(prompt=None), leg(), "unscorable"),
        (forecast(), leg(prompt_tokens=3), "other_prompt"),
        (forecast(match=None), leg(), "no_index"),
        (forecast(match=match(trust=Trust.LOAD_ONLY)), leg(), "no_index"),
        (forecast(), leg(None, prompt_tokens=None), "usage_unknown"),
        (forecast(4), leg(4 * SIZE), "exact"),
        (forecast(4), leg(2 * SIZE), "over"),
        (forecast(4), leg(6 * SIZE), "under"),
    ],
)
def test_every_leg_has_one_outcome(promised: Forecast, told: LegRecord, outcome: str) -> None:
    """It is a metric's label."""
    assert conclude(promised, told).outcome == outcome


def test_too_much_promised_names_the_first_block_that_was_missing() -> None:
    """With what the indexer needs to weigh it."""
    finding = conclude(forecast(4), leg(2 * SIZE))

    assert finding.report == CacheReport(
        rank=RANK,
        epoch=7,
        age_s=0.0,
        block_size=SIZE,
        predicted_tokens=4 * SIZE,
        cached_tokens=2 * SIZE,
        key=KEYS[2],
    )
    assert finding.report.is_over
    assert not finding.report.is_one_block_short


def test_too_little_promised_names_the_last_block_that_was_there() -> None:
    """Whatever lies above it was there, too."""
    report = conclude(forecast(1), leg(3 * SIZE)).report

    assert report is not None
    assert report.key == KEYS[2]
    assert not report.is_over


def test_less_than_a_block_too_much_is_one_block_too_little() -> None:
    """Engines with a cache of their own beside the blocks tell such figures."""
    report = conclude(forecast(0), leg(5)).report

    assert report is not None
    assert (report.key, report.is_over) == (KEYS[0], False)


def test_figure_counts_up_to_what_could_have_been_predicted() -> None:
    """A transfer from elsewhere may make the whole prompt cached."""
    finding = conclude(forecast(10), leg(PROMPT.tokens))

    assert (finding.outcome, finding.has_agreed) == ("exact", True)


def test_agreeing_on_nothing_is_no_agreement() -> None:
    """It proves little."""
    assert not conclude(forecast(0), leg(0)).has_agreed


def test_leg_that_computes_a_whole_block_makes_the_engine_publish() -> None:
    """The last token alone doesn't; without a figure the index is believed."""
    assert conclude(forecast(0), leg(0)).has_computed
    assert conclude(forecast(0), leg(None)).has_computed
    assert not conclude(forecast(10), leg(10 * SIZE)).has_computed
    assert not conclude(forecast(10), leg(None)).has_computed


def test_unknown_block_size_takes_a_long_prompt() -> None:
    """No event has told it yet, and blocks may be large."""
    long = Prompt(Namespace(model="m"), range(3000))
    unknown = match(block_size=None)

    assert conclude(forecast(match=unknown, prompt=long), leg(0, prompt_tokens=3000)) == Finding(
        outcome="no_index", has_computed=True
    )
    assert not conclude(forecast(match=unknown), leg(0)).has_computed


def test_contradictions_are_sent_one_by_one_and_the_rest_counted() -> None:
    """With their ages, by model; what was taken is not sent again."""
    findings = Findings()
    for promised, told in [
        (forecast(4), leg(4 * SIZE)),
        (forecast(4, matched_s=103.0), leg(4 * SIZE)),
        (forecast(4, matched_s=101.0), leg(0)),
        (forecast(0, rank=OTHER, model="n"), leg(0)),
        (forecast(match=None), leg(0)),
        (forecast(10), leg(10 * SIZE)),
    ]:
        findings.add(promised, conclude(promised, told))

    taken = findings.take(105.0)

    tally, report = taken["m"]
    assert tally == RankTally(
        rank=RANK,
        epoch=7,
        agreed=3,
        computing_legs=3,
        age_s=2.0,
        agreed_keys=(KEYS[3], KEYS[3], KEYS[9]),
    )
    assert isinstance(report, CacheReport)
    assert (report.age_s, report.cached_tokens) == (4.0, 0)
    assert taken["n"] == [RankTally(rank=OTHER, epoch=7, computing_legs=1, age_s=5.0)]
    assert findings.take(106.0) == {}


def test_count_of_an_earlier_epoch_is_dropped() -> None:
    """Nobody asks for it any more."""
    findings = Findings()
    for epoch in (7, 8):
        promised = forecast(match=match(4, epoch=epoch))
        findings.add(promised, conclude(promised, leg(4 * SIZE)))

    (tally,) = findings.take(100.0)["m"]

    assert isinstance(tally, RankTally)
    assert (tally.epoch, tally.agreed) == (8, 1)


def test_only_so_many_contradictions_are_kept() -> None:
    """The oldest are lost, and counted."""
    findings = Findings(max_reports=2)
    for cached in (0, 1, 2):
        findings.add(forecast(4), conclude(forecast(4), leg(cached * SIZE)))

    reports = findings.take(100.0)["m"]

    assert findings.lost == 1
    kept = [each.cached_tokens for each in reports if isinstance(each, CacheReport)]
    assert kept == [SIZE, 2 * SIZE]


def test_waiting_makes_a_report_older() -> None:
    """Whatever kind it is of."""
    tally = RankTally(rank=RANK, epoch=7, age_s=1.0)

    assert [each.age_s for each in aged([tally], 0.5)] == [1.5]
