"""`benchmarks.peers`: what is sent, what a measurement comes to, and what the tables claim."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from benchmarks.peers.cells import Cell, summarize
from benchmarks.peers.play import Script, play, write_script
from benchmarks.peers.report import render
from benchmarks.peers.routers import OURS, routers
from benchmarks.peers.sizes import first_calls
from indexer.core.types import BlockKey
from kvlb.bench.calls import Call, KeyedPrompt
from kvlb.bench.figures import Figures
from kvlb.demo.report import EngineCounts
from kvlb.replay.core.outcomes import Outcome
from simulator.core.settings import EngineSettings

ENGINE = EngineSettings(block_size=16, prefill_tokens_per_s=1000.0, inter_token_ms=10.0)


def call(
    at_s: float,
    *,
    session: str | None = None,
    after: int | None = None,
    keys: tuple[int, ...] = (7, 8),
) -> Call:
    block_keys = tuple(map(BlockKey, keys))
    return Call(
        at_s=at_s,
        prompt=KeyedPrompt(16 * len(keys) + 5, block_keys, 16),
        keys=block_keys,
        output_tokens=3,
        session=session,
        after=after,
    )


def script(*calls: Call, takes_ids: bool = True) -> Script:
    return write_script(calls, model="m", block_size=16, takes_ids=takes_ids, seed=1, slowdown=2.0)


def figures(**changes: float) -> Figures:
    names = ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "e2e_mean", "e2e_p99", "goodput")
    values = dict.fromkeys((*names, "cached", "most_over_mean"), 1.0) | changes
    return Figures(**values, calls=10)


def cell(router: str, repeat: int, *, late_p99_s: float = 0.0, **changes: float) -> Cell:
    return Cell(
        router=router,
        workload="chat",
        repeat=repeat,
        figures=figures(**changes),
        failed={"cut": 2} if router == "other" else {},
        late_p99_s=0.0,
        engines_late_p99_s=late_p99_s,
        busy=0.5,
        took_s=1.0,
    )


def test_first_calls_are_the_first_in_time() -> None:
    """Where nobody waits for anybody."""
    calls = [call(3.0), call(1.0), call(2.0)]

    assert [each.at_s for each in first_calls(calls, 2)] == [1.0, 2.0]


def test_sessions_are_taken_whole() -> None:
    """Those that begin first; who waits for whom is told by the new places."""
    calls = [
        call(5.0, session="late"),
        call(1.0, session="a"),
        call(2.0, session="b"),
        call(0.1, session="a", after=1),
        call(0.2, session="b", after=2),
    ]

    picked = first_calls(calls, 4)

    assert [each.session for each in picked] == ["a", "b", "a", "b"]
    assert [each.after for each in picked] == [None, None, 0, 1]
    assert len(first_calls(calls, 1)) == 2


def test_calls_with_equal_keys_send_equal_prompts_up_to_their_ends() -> None:
    """What is behind the last full block is each call's own."""
    written = script(call(0.0), call(1.0)).written
    left, right = (msgspec.json.decode(each.body)["prompt"] for each in written)

    assert len(left) == len(right) == 37
    assert left[:32] == right[:32]
    assert left[32:] != right[32:]


def test_router_that_takes_no_ids_is_sent_text() -> None:
    """A byte for a token, which is what simulated engines make of it."""
    (written,) = script(call(0.0), takes_ids=False).written

    assert len(msgspec.json.decode(written.body)["prompt"]) == 37


def test_times_are_those_of_engines_at_full_speed() -> None:
    """Goodput goes by a promise of the prompt's own length; what failed wasn't good."""
    good = Outcome(line=0, session=None, at_s=0.0, ttft_s=0.2, e2e_s=0.3)
    late = replace(good, line=1, ttft_s=1.1, e2e_s=1.2)
    slow = replace(good, line=2, e2e_s=0.6)
    outcomes = [good, late, slow, replace(good, line=3, error="cut")]
    counts = [EngineCounts(prompt_tokens=100, prefilled_tokens=each) for each in (30, 10)]

    found = summarize(outcomes, script(*[call(0.0)] * 4), ENGINE, counts)

    assert found.ttft_mean == pytest.approx(0.25)
    assert found.e2e_p99 == pytest.approx(0.6, abs=0.02)
    assert (found.goodput, found.cached, found.most_over_mean) == (0.25, 0.8, 1.5)


async def test_calls_that_take_too_long_are_given_up() -> None:
    """Each one is accounted for: under way, or never sent."""
    gone = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client leaves
        writer.close()
        gone.set()

    async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        outcomes = await play(url, script(call(0.0), call(0.0, after=0)), limit_s=0.2)
        await gone.wait()

    assert [each.error for each in outcomes] == ["stopped", "not_sent"]


def test_nothing_answered_is_no_measurement() -> None:
    """The router is left out, with the reason."""
    failed = Outcome(line=0, session=None, at_s=0.0, error="cut")

    with pytest.raises(RuntimeError, match="no call was answered"):
        summarize([failed], script(call(0.0)), ENGINE, [])


def test_difference_is_told_with_its_interval() -> None:
    """Better or worse only where it leaves out 0; more goodput is better."""
    cells = [
        *(cell(OURS, repeat, ttft_mean=1.0 + repeat / 100) for repeat in range(3)),
        *(cell("other", repeat, ttft_mean=2.0, goodput=1.5 + repeat / 100) for repeat in range(3)),
    ]

    text = render(cells, {"gone": "no wheel"}, ["a note"])

    assert "-0.990 ± 0.025, **better**" in text
    assert "-0.510 ± 0.025, **worse**" in text
    assert "+0.000 ± 0.000, level" in text
    assert "- gone: left out, no wheel" in text
    assert "- a note" in text


def test_late_cells_are_shown_and_not_compared() -> None:
    """A machine that didn't keep up has measured itself."""
    cells = [cell(OURS, 0), cell("other", 0, late_p99_s=0.2)]

    text = render(cells, {}, [])

    assert "| other | - | - |" in text
    assert "0 of 1" in text
    assert f"{OURS} less" not in text


def test_one_repetition_has_no_interval() -> None:
    """A difference alone."""
    text = render([cell(OURS, 0, ttft_p50=0.5), cell("other", 0)], {}, [])

    assert "| other | +0.000 | -0.500 |" in text


def test_routers_that_go_by_text_are_asked_with_text() -> None:
    """Ours first; the others with ids."""
    found = routers("m", 64)

    assert found[0].name == OURS
    assert all("cache_aware" in each.name for each in found if not each.takes_ids)
    assert sum(not each.takes_ids for each in found) == 3
