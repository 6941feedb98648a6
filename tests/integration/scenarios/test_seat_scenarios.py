"""Engines that run so many requests at once, and no more: with short prompts nothing else holds up."""

from collections import Counter
from random import Random

from msgspec.structs import replace

from indexer.core.types import BlockKey
from kvlb.bench.calls import Call, KeyedPrompt
from kvlb.bench.clock import VirtualClock
from kvlb.bench.fleet import VirtualFleet
from kvlb.bench.play import Play
from kvlb.bench.run import policy_by_name
from kvlb.bench.workloads import WORKLOADS

SEATS, OUTPUT_TOKENS, PROMPT_TOKENS, BLOCK = 16, 500, 40, 64


def calls(rate: float, seconds: float) -> list[Call]:
    """Short prompts of nothing in common, at random moments, with long answers."""
    draw = Random(1)  # noqa: S311 - no secret
    at_s, made = 0.0, list[Call]()
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        first = (len(made) + 1) << 24
        keys = [BlockKey(first + each) for each in range((PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK)]
        made.append(
            Call(
                at_s=at_s,
                prompt=KeyedPrompt(PROMPT_TOKENS, [], BLOCK),
                keys=keys,
                output_tokens=OUTPUT_TOKENS,
                session=None,
                after=None,
            )
        )
    return made


def test_x4_nobody_waits_for_a_seat_while_another_engine_has_some() -> None:
    """An engine a little faster than the other is full, and its line costs what waiting in it takes."""
    engine = WORKLOADS["weka"].engine
    fleet = VirtualFleet(
        VirtualClock(),
        engines=[replace(engine, inter_token_ms=ms, max_num_seqs=SEATS) for ms in (10.0, 13.0)],
        policy=policy_by_name("kvlb"),
        seed=0,
    )

    outcomes = [each for each in Play(fleet, calls(3.5, 90.0)).run() if each.arrived_s > 20]

    waits_s = [each.first_s - each.arrived_s for each in outcomes]
    shares = Counter(each.rank for each in outcomes)
    assert len(shares) == 2
    assert sum(waits_s) / len(waits_s) < 0.5  # virtual; without the term it is 5.6
