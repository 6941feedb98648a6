"""One measurement: one router before fresh engines, one workload, one repetition.

Rules:

1. Times are divided by the slowdown, so they read as those of engines at full speed; what routers
   and this machine add is divided with them, for all alike.
2. Cached tokens and each engine's work are from the engines' own counters.
3. A cell is valid if client and engines kept up: 99 % of what they did was at most `MOST_LATE_S` late, which
   is two steps of an engine. What isn't valid is shown and not compared.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import uvloop

from benchmarks.overhead.proxies import Proxy, free_port, started
from benchmarks.peers.engines import EngineProcess
from benchmarks.peers.play import NOT_SENT, Script, play
from kvlb.bench.figures import SLACK_S, SLOWEST_ITL, Figures
from kvlb.demo.report import EngineCounts
from kvlb.replay.core.outcomes import Outcome, spread
from simulator.core.settings import EngineSettings

SETTLE_S = 1.0
"""For event subscriptions, of which no router says when they stand."""
MOST_LATE_S = 0.02
"""Of engines at full speed, like all times here."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What one measurement came to."""

    router: str
    workload: str
    repeat: int
    figures: Figures
    failed: dict[str, int]
    """Calls that weren't answered whole, by kind."""
    late_p99_s: float
    """Of the client's sending."""
    engines_late_p99_s: float
    """Of the engine that kept up worst."""
    busy: float
    """Share of the machine's cores in use, whoever used them."""
    took_s: float

    @property
    def is_valid(self) -> bool:
        return max(self.late_p99_s, self.engines_late_p99_s) <= MOST_LATE_S


def slowed(settings: EngineSettings, slowdown: float) -> EngineSettings:
    """Such an engine, slower, and without a topic, which is vLLM's default.

    vllm-router 0.1.17 takes events with another one, and never finds a prefix in them.
    """
    return msgspec.structs.replace(
        settings,
        topic="",
        prefill_tokens_per_s=settings.prefill_tokens_per_s / slowdown,
        inter_token_ms=settings.inter_token_ms * slowdown,
    )


def measure(
    router: Proxy,
    engines: Sequence[EngineProcess],
    settings: EngineSettings,
    script: Script,
    *,
    workload: str,
    repeat: int,
) -> Cell:
    """Run one. Raises RuntimeError if the router doesn't start."""
    for each in engines:
        each.restart(slowed(settings, script.slowdown))
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        addresses = [each.address for each in engines]
        with started(router, Path(name) / "run", port, addresses):
            time.sleep(SETTLE_S)
            before = _cpu_times()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                outcomes = runner.run(play(f"http://127.0.0.1:{port}", script))
            busy = _busy_share(before, _cpu_times())
    slowdown = script.slowdown
    late = spread([each.late_s / slowdown for each in outcomes if each.error != NOT_SENT])
    counts = [each.counts() for each in engines]
    return Cell(
        router=router.name,
        workload=workload,
        repeat=repeat,
        figures=summarize(outcomes, script, settings, counts),
        failed=_failures(outcomes),
        late_p99_s=late.p99 if late else 0.0,
        engines_late_p99_s=max(each.late_p99_s() for each in engines) / slowdown,
        busy=busy,
        took_s=time.monotonic() - begun_s,
    )


def summarize(
    outcomes: Sequence[Outcome],
    script: Script,
    settings: EngineSettings,
    counts: Sequence[EngineCounts],
) -> Figures:
    """`settings`: of the engines at full speed, by which promises go."""
    whole = [each for each in outcomes if each.error is None]
    slowdown = script.slowdown
    ttft = spread([each.ttft_s / slowdown for each in whole])
    e2e = spread([each.e2e_s / slowdown for each in whole])
    if ttft is None or e2e is None:
        raise RuntimeError("no call was answered")
    prompt_tokens = sum(each.prompt_tokens for each in counts)
    work = [each.prefilled_tokens for each in counts]
    return Figures(
        ttft_mean=ttft.mean,
        ttft_p50=ttft.p50,
        ttft_p90=ttft.p90,
        ttft_p99=ttft.p99,
        e2e_mean=e2e.mean,
        e2e_p99=e2e.p99,
        goodput=sum(_is_good(each, script, settings) for each in whole) / len(outcomes),
        cached=1 - sum(work) / prompt_tokens,
        most_over_mean=max(work) / fmean(work),
        calls=len(outcomes),
    )


def _is_good(each: Outcome, script: Script, settings: EngineSettings) -> bool:
    call = script.calls[each.line]
    promised_s = SLACK_S + call.prompt.tokens / settings.prefill_tokens_per_s
    slowest_s = SLOWEST_ITL * settings.inter_token_ms / 1000 * (call.output_tokens - 1)
    decoded_s = (each.e2e_s - each.ttft_s) / script.slowdown
    return each.ttft_s / script.slowdown <= promised_s and decoded_s <= slowest_s


def _failures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    failed: dict[str, int] = {}
    for each in outcomes:
        if each.error is not None:
            failed[each.error] = failed.get(each.error, 0) + 1
    return failed


def _cpu_times() -> tuple[int, int]:
    """Ticks spent idle, and in all."""
    ticks = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return ticks[3] + ticks[4], sum(ticks)


def _busy_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    idle, total = after[0] - before[0], after[1] - before[1]
    return 1 - idle / total if total else 0.0
