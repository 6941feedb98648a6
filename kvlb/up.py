"""`kvlb up`: indexer and balancer in one process, and with `--simulate` the engines too."""

import os
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from kvlb.errors import NoEnginesError, SettingsError
from kvlb.event_loop import run_command, spare_startup_objects, stop_event
from kvlb.logs import configure_logs
from kvlb.reload import surviving_hangup
from kvlb.running import ConfigFile, RunningKvlb, run_kvlb
from kvlb.settings import KvlbSettings, Overrides, load_fleet
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

TRY_OUT = "try it out with --simulate 2p2d"
UNKNOWN_MODEL = "YOUR-MODEL"
ONE_PROCESS = (
    "`workers`: `kvlb up` is one process, since the index is in its memory; leave it at 1, or run "
    "`kvlb indexer` and `kvlb balancer --workers N` around a Redis (`redis.url`)"
)


def up(overrides: Overrides, *, config: Path | None, simulate: str | None) -> None:
    """Run until SIGINT or SIGTERM, then finish what runs."""
    configure_logs()
    run_command(_up(overrides, config, simulate))


async def _up(overrides: Overrides, config: Path | None, simulate: str | None) -> None:
    started_s = time.monotonic()
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stop_event())
        stack.enter_context(surviving_hangup(config))
        model = UNKNOWN_MODEL
        if simulate is not None:
            engines = EngineSettings()
            model = engines.model
            fleet = await stack.enter_async_context(simulated_fleet(parse_fleet(simulate), engines))
            simulated = [instance_option(engine) for engine in fleet.engines]
            overrides = replace(overrides, instances=(*simulated, *overrides.instances))
        try:
            settings = load_fleet(config, overrides, os.environ)
        except NoEnginesError as error:
            raise SettingsError(f"{error}; or {TRY_OUT}") from error

        if settings.workers > 1:
            raise SettingsError(ONE_PROCESS)

        def listening(running: RunningKvlb) -> None:
            _greet(running, settings, model, started_s)
            spare_startup_objects()

        file = ConfigFile.of(config, overrides)
        await run_kvlb(settings, stop=stop, on_listening=listening, file=file)


def _greet(running: RunningKvlb, settings: KvlbSettings, model: str, started_s: float) -> None:
    console = Console(soft_wrap=True, highlight=False)
    elapsed_s = time.monotonic() - started_s
    console.print(
        f"[bold]kvlb {version('kvlb')}[/] listens on [bold]{running.url}[/] "
        f"(policy {settings.routing.policy}, up in {elapsed_s:.1f} s)\n"
    )
    for each in settings.instances:
        console.print(f"  {each.name:<10} {each.role.value:<8} {each.id}", markup=False)
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    console.print(
        "\nTry it:",
        f"  curl -i {running.url}/v1/chat/completions -H 'content-type: application/json' \\",
        f"    -d '{body}'",
        f"\nLook:  {running.url}/status  /metrics  /docs",
        f"Why:   kvlb explain --url {running.url} '{body}'\n",
        sep="\n",
        markup=False,
    )
