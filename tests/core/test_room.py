"""When a rank has room for one more request."""

from typing import Any

import pytest
from msgspec.structs import replace

from balancer.core.load.ledger import RankLoad, RankRates
from balancer.core.routing.room import RankLimits, RankState, has_room
from balancer.core.settings.admission import AdmissionSettings

SETTINGS = AdmissionSettings(promise_s=2, prefill_share=0.65, memory_share=0.9, least_requests=4)
RATES = RankRates(prefill_s_per_token=0.001, fixed_s=0.0, stalled_share=0.5)


def busy(**fields: Any) -> RankLoad:
    known: dict[str, Any] = {"requests": 4, "rates": RATES}
    return RankLoad(**(known | fields))


def room(
    load: RankLoad,
    *,
    decodes: bool = True,
    memory_tokens: int | None = 1000,
    settings: AdmissionSettings | None = SETTINGS,
    max_requests: int | None = None,
) -> bool:
    state = RankState(load=load, decodes=decodes, memory_tokens=memory_tokens, block_size=16)
    return has_room(state, RankLimits(settings=settings, max_requests=max_requests))


def queued(tokens: int, requests: int = 4) -> RankLoad:
    return busy(requests=requests, queued_tokens=tokens, oldest_queued_s=0.0, head_tokens=tokens)


@pytest.mark.parametrize(
    ("load", "is_there"),
    [
        (busy(), True),
        (queued(1999), True),
        (queued(2000), False),
        (busy(work_share=0.64), True),
        (busy(work_share=0.65), False),
        (busy(active_blocks=50, output_tokens=99), True),
        (busy(active_blocks=50, output_tokens=100), False),
    ],
    ids=["busy", "short-queue", "long-queue", "some-prefill", "all-prefill", "memory", "full"],
)
def test_a_busy_rank_is_full_for_one_of_three_reasons(load: RankLoad, is_there: bool) -> None:
    """A long queue, too much prefill beside its answers, or memory that is nearly taken."""
    assert room(load) is is_there


@pytest.mark.parametrize(("stalled_share", "is_there"), [(0.14, True), (0.15, False)])
def test_prompts_fill_a_rank_only_if_its_answers_show_it(
    stalled_share: float, is_there: bool
) -> None:
    """What a rank is sent per second says as much of our pace as of its own."""
    rates = replace(RATES, stalled_share=stalled_share)

    assert room(busy(work_share=1.0, rates=rates)) is is_there


def test_a_few_requests_are_no_overload() -> None:
    """However long they are: whoever waits in the balancer instead gains nothing."""
    assert room(queued(100_000, requests=3))
    assert not room(queued(100_000, requests=4))


def test_a_few_requests_may_take_all_memory() -> None:
    """Whoever comes then waits in the engine, behind answers, however few they are."""
    assert room(busy(requests=3, active_blocks=56))
    assert not room(busy(requests=3, active_blocks=57))


def test_a_prefill_rank_may_do_nothing_else() -> None:
    """It has no answers to slow down."""
    assert room(busy(work_share=0.99), decodes=False)


def test_what_is_not_known_or_not_wanted_fills_nothing() -> None:
    """Memory of an unknown size; limits that are turned off; loads that can't be judged yet."""
    any_share = AdmissionSettings(promise_s=2, prefill_share=1, memory_share=1, least_requests=4)

    assert room(busy(active_blocks=10_000), memory_tokens=None)
    assert room(busy(active_blocks=10_000, work_share=1.0), settings=any_share)
    assert room(queued(100_000), settings=None)


def test_a_limit_of_requests_counts_whatever_else() -> None:
    """`routing.max_requests_per_rank`."""
    assert room(busy(requests=1), settings=None, max_requests=2)
    assert not room(busy(requests=2), settings=None, max_requests=2)
