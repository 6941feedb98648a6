"""`kvlb demo`: the same conversations through kvlb and through round robin, each on cold caches.

Round robin does what the example proxies of vLLM do: the next prefill engine, then the next decode
engine, for every request. Each policy gets a fresh simulated 2P2D fleet of its own.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from balancer.core.settings.control import TokensSettings
from balancer.core.settings.routing import PdSettings, PolicyName, RoutingSettings
from indexer.core.types import Trust
from kvlb.demo.counters import count_fleet
from kvlb.demo.report import DemoReport, EngineCounts, PolicyRun, judge
from kvlb.demo.stage import Stage, set_stage
from kvlb.demo.tables import show_report
from kvlb.errors import MissingExtraError, PeerError
from kvlb.event_loop import run_command
from kvlb.logs import configure_logs
from kvlb.running import RunningKvlb, running_kvlb
from kvlb.settings import KvlbSettings, Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.service import RunningFleet
from simulator.workload import Conversation
from simulator.workload import conversations as write_conversations

FLEET = "2p2d"
READY_S = 15.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says."""

    seed: int
    conversations: int
    turns: int


def demo(options: DemoOptions, *, as_json: bool) -> int:
    """Run both policies, print the comparison; 0 if every criterion holds, else 1."""
    configure_logs(logging.ERROR)
    try:
        import openai  # noqa: F401, PLC0415 - an optional extra
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "the demo talks through the `openai` package; install it with: pip install 'kvlb[demo]'"
        ) from error
    stage = set_stage(options.conversations, options.turns)
    return print_report(run_command(run_demo(options.seed, stage)), as_json=as_json)


def print_report(report: DemoReport, *, as_json: bool) -> int:
    """Print both runs and the verdict, which is also the exit code."""
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        show_report(report, Console())
    return 0 if report.passed else 1


async def run_demo(seed: int, stage: Stage) -> DemoReport:
    """Play the workload once per policy."""
    script = write_conversations(seed, stage.shape)
    progress = Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        total = stage.shape.conversations * stage.shape.turns
        bars = {name: progress.add_task(name, total=total, start=False) for name in POLICIES}
        runs = []
        for name in POLICIES:
            progress.start_task(bars[name])
            advance = _advance(progress, bars[name])
            runs.append(await run_policy(name, script, stage, on_answer=advance))
    ours, theirs = runs
    return judge(ours, theirs)


POLICIES: tuple[PolicyName, ...] = ("kvlb", "round_robin")


async def run_policy(
    policy: PolicyName,
    script: Sequence[Conversation],
    stage: Stage,
    *,
    on_answer: Callable[[], None],
) -> PolicyRun:
    """Play `script` over a fresh fleet."""
    from kvlb.demo.play import play  # noqa: PLC0415 - needs the optional extra

    async with simulated_fleet(parse_fleet(FLEET), stage.engine) as fleet:
        async with running_kvlb(_settings(policy, fleet)) as kvlb:
            await wait_until_ready(kvlb, engines=len(fleet.engines))
            started_s = time.monotonic()
            requests = await play(
                kvlb.url, script, stage=stage, clock=time.monotonic, on_answer=on_answer
            )
            duration_s = time.monotonic() - started_s
        counts = await _count(fleet)
    return PolicyRun(policy=policy, requests=requests, counts=counts, duration_s=duration_s)


def _settings(policy: PolicyName, fleet: RunningFleet) -> KvlbSettings:
    instances = tuple(instance_option(engine) for engine in fleet.engines)
    settings = load_settings(None, Overrides(instances=instances, port=0), {})
    pd = PdSettings(force="remote") if policy == "round_robin" else PdSettings()
    return msgspec.structs.replace(
        settings,
        routing=RoutingSettings(policy=policy),
        pd=pd,
        # Engines, balancer and clients share one process here, and /tokenize is one of them.
        tokens=TokensSettings(deadline_s=1.0),
    )


async def wait_until_ready(kvlb: RunningKvlb, *, engines: int, deadline_s: float = READY_S) -> None:
    """Both halves know the whole fleet: instances are healthy, events are followed."""
    try:
        async with asyncio.timeout(deadline_s), httpx.AsyncClient(trust_env=False) as http:
            while True:
                answer = await http.get(f"{kvlb.url}/ready")
                body = answer.json()
                followed = [each for each in kvlb.indexer.status() if each.trust is Trust.EXACT]
                if body["ready"] and not body["reasons"] and len(followed) == engines:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise PeerError(f"the simulated fleet was not ready within {deadline_s:g} s") from error


async def _count(fleet: RunningFleet) -> EngineCounts:
    answering: list[str] = []
    others: list[str] = []
    async with httpx.AsyncClient(trust_env=False) as http:
        for engine in fleet.engines:
            text = (await http.get(f"{engine.url}/metrics")).text
            (others if engine.role == "prefill" else answering).append(text)
    return count_fleet(answering, others)


def _advance(progress: Progress, bar: TaskID) -> Callable[[], None]:
    return lambda: progress.advance(bar)
