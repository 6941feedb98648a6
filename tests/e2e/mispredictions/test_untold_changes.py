"""What engines do and don't tell, or tell late: resets, blocks, everything."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from simulator.core.event_faults import EventFaults

Composed = Callable[..., AbstractAsyncContextManager[Any]]
MOST_REQUESTS = 20
MakeTokens = Callable[[int, int], list[int]]


async def test_reset_without_an_event_costs_one_wrong_guess(composed: Composed) -> None:
    """F03(b): the answer is right, the guess is counted as explained, and nothing else is wrong."""
    async with composed() as kvlb:
        await kvlb.fill_truly()
        await kvlb.agree()
        engine = kvlb.engines[0]
        answer = await kvlb.http.post(f"{engine.url}/reset_prefix_cache")
        assert answer.status_code == 200

        first, *others = kvlb.true_prompts
        answer = await kvlb.ask(first)

        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await kvlb.until(lambda: kvlb.is_counted("reset_seen_late"))
        assert [await kvlb.overlap(each) for each in others] == [0] * len(others)
        assert await kvlb.overlap(first) == 100


async def test_told_clear_ends_what_was_expected_of_requests_before_it(
    composed: Composed, tokens: MakeTokens
) -> None:
    """Prompts routed a moment ago are expected to be held, until events tell; the clear tells more."""
    prompts = [tokens(900 + number, 10) for number in range(6)]
    async with composed("1") as kvlb:
        for each in prompts:
            await kvlb.ask(each)
        await kvlb.until(lambda: kvlb.holds(prompts[-1], "m0"))
        await kvlb.http.post(f"{kvlb.engines[0].url}/reset_prefix_cache")
        await kvlb.ask(tokens(950, 10))  # the clear is told with what is computed next
        await kvlb.until(lambda: kvlb.lacks(prompts[-1], "m0"))

        answers = [await kvlb.ask(each) for each in prompts]

        assert [answer.headers["x-kvlb-overlap-tokens"] for answer in answers] == ["0"] * 6


async def test_reset_that_is_never_told_is_found_out_by_the_root(
    composed: Composed, tokens: MakeTokens
) -> None:
    """The event is lost for good: the first contradicted block takes its whole tree along."""
    branches = [[*tokens(800, 20), *tokens(801 + number, 20)] for number in range(5)]
    async with composed() as kvlb:
        engine = kvlb.engines[0]
        for each in branches:
            await kvlb.ask(each, url=engine.url)
        await kvlb.fill_truly()
        assert await kvlb.overlap(branches[-1]) == 40
        await kvlb.ask(branches[0])
        engine.set_event_faults(EventFaults(hides_clears=True))
        await kvlb.http.post(f"{engine.url}/reset_prefix_cache")

        await kvlb.ask(branches[0])

        await kvlb.until(lambda: kvlb.is_counted("ghost"))

        async def are_known() -> object:
            return [await kvlb.overlap(each) for each in branches] == [40, 20, 20, 20, 20]

        await kvlb.until(are_known)  # Redis has it a little later than it is counted


async def hide_stores(kvlb: Any, untold: list[list[int]]) -> None:
    """The engine computes them and tells nobody; three of them give it away, and it is told anew."""
    engine = kvlb.engines[0]
    await kvlb.fill_truly()
    engine.set_event_faults(EventFaults(hides_stores=True))
    for each in untold:
        await kvlb.ask(each, url=engine.url)
    engine.set_event_faults(EventFaults())
    for each in untold[:3]:
        await kvlb.ask(each)
    await kvlb.until(kvlb.was_rebuilt)


async def test_blocks_that_were_never_told_of_show_as_a_gap(
    composed: Composed, tokens: MakeTokens
) -> None:
    """The rank is told anew, in vain, and is not asked again; legs that agree take it back."""
    async with composed("1") as kvlb:
        untold = [tokens(number, 20) for number in range(200, 206)]
        await hide_stores(kvlb, untold)
        await kvlb.until(lambda: kvlb.has_trust("exact"))
        for each in untold[3:]:
            await kvlb.ask(each)
        await kvlb.until(lambda: kvlb.has_trust("degraded"))

        for _ in range(20):
            await kvlb.agree()

        await kvlb.until(lambda: kvlb.has_trust("exact"))
        assert await kvlb.metric("kvlb_epochs_total", instance="m0", reason="rebuilt") == 1
        assert await kvlb.metric("kvlb_mispredictions_total", cause="unseen") == 6


async def test_reused_blocks_that_were_never_told_of_are_announced_on_request(
    composed: Composed, tokens: MakeTokens
) -> None:
    """Where a replay doesn't help a sampled request asks for a full report; counts stay right."""
    async with composed("1", full_report_interval_s=0.2) as kvlb:
        untold = [tokens(number, 20) for number in range(200, 208)]
        await hide_stores(kvlb, untold)

        async def is_known() -> object:
            for each in untold:
                await kvlb.ask(each)
            return any([await kvlb.overlap(each) == 20 for each in untold])

        await kvlb.until(is_known)

        async def is_believed_again() -> object:
            await kvlb.agree()
            return await kvlb.trust() == "exact"

        await kvlb.until(is_believed_again)
        assert await kvlb.metric("kvlb_full_reports_total") >= 1


async def test_engine_that_computes_and_publishes_nothing_is_silent(
    composed: Composed, tokens: MakeTokens
) -> None:
    """Entries stay, but they are believed less; the next batch takes it back."""
    async with composed(indexer={"silent_after_s": 0.3}) as kvlb:
        await kvlb.fill_truly()
        for engine in kvlb.engines:
            engine.set_event_faults(EventFaults(is_silent=True))
        numbers = iter(range(100, 200))

        async def is_silent() -> object:
            await kvlb.ask(tokens(next(numbers), 4))
            return "degraded" in {await kvlb.trust("m0"), await kvlb.trust("m1")}

        await kvlb.until(is_silent)
        alias = "m0" if await kvlb.trust("m0") == "degraded" else "m1"
        assert await kvlb.overlap(kvlb.true_prompts[0]) == 100
        for engine in kvlb.engines:
            engine.set_event_faults(EventFaults())
            await kvlb.ask(tokens(300, 4), url=engine.url)

        await kvlb.until(lambda: kvlb.has_trust("exact", alias))


@pytest.mark.parametrize("asked_first", ["oldest", "any"])
async def test_untold_reset_of_many_prompts_is_found_out_by_a_few(
    composed: Composed, tokens: MakeTokens, asked_first: str
) -> None:
    """1,000 blocks of 50 prompts with nothing in common are gone; the stream tells them again and again.

    1,000 true ones that were stored later keep their credit, all but those asked for first.
    """
    ghosts = [tokens(1000 + number, 20) for number in range(50)]
    if asked_first == "any":
        random.Random(7).shuffle(ghosts)  # noqa: S311 - the same each time
    async with composed() as kvlb:
        engine = kvlb.engines[0]
        for each in sorted(ghosts):
            await kvlb.ask(each, url=engine.url)
        await kvlb.until(lambda: kvlb.holds(ghosts[-1], "m0"))
        engine.set_event_faults(EventFaults(hides_clears=True))
        await kvlb.http.post(f"{engine.url}/reset_prefix_cache")
        await kvlb.fill_truly()

        for each in ghosts[:MOST_REQUESTS]:
            await kvlb.ask(each)
            await asyncio.sleep(
                0.15
            )  # as long as it takes until the engine has told of it, and more

        credited = [await kvlb.overlap(each) for each in ghosts[MOST_REQUESTS:]]
        assert sum(map(bool, credited)) <= len(credited) // 10
        assert (
            await true_blocks(kvlb) >= 500
        )  # in order of storing more are doubted than in any other
        assert await kvlb.metric("kvlb_rank_doubted_blocks", instance="m0") >= 400

        for each in kvlb.true_prompts:
            await kvlb.ask(each)
            await asyncio.sleep(0.15)
        assert await true_blocks(kvlb) >= 900


async def test_untold_reset_is_found_out_though_requests_come_at_once(
    composed: Composed, tokens: MakeTokens
) -> None:
    """The ring tells all of it again while they are under way: what was found before is taken up."""
    ghosts = [tokens(1000 + number, 20) for number in range(60)]
    async with composed("1") as kvlb:
        engine = kvlb.engines[0]
        for each in ghosts:
            await kvlb.ask(each, url=engine.url)
        await kvlb.until(lambda: kvlb.holds(ghosts[-1], "m0"))
        engine.set_event_faults(EventFaults(hides_clears=True))
        await kvlb.http.post(f"{engine.url}/reset_prefix_cache")
        await kvlb.fill_truly()
        random.Random(3).shuffle(ghosts)  # noqa: S311 - the same each time

        for each in ghosts[:MOST_REQUESTS]:
            await kvlb.ask(each)

        async def are_doubted() -> object:
            credited = [await kvlb.overlap(each) for each in ghosts[MOST_REQUESTS:]]
            return sum(map(bool, credited)) <= len(credited) // 2

        await kvlb.until(are_doubted)
        await kvlb.until(lambda: kvlb.has_trust("degraded"))
        for each in ghosts[MOST_REQUESTS : 2 * MOST_REQUESTS]:
            await kvlb.ask(each)
        left = [await kvlb.overlap(each) for each in ghosts[2 * MOST_REQUESTS :]]
        assert sum(map(bool, left)) <= len(left) // 10


async def true_blocks(kvlb: Any) -> int:
    return sum([await kvlb.overlap(each) for each in kvlb.true_prompts])
