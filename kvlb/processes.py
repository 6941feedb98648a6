"""`kvlb indexer` and `kvlb balancer`: the two halves of `kvlb up` around one Redis."""

import os
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from kvlb.event_loop import run_command, spare_startup_objects, stop_event
from kvlb.logs import configure_logs
from kvlb.reload import surviving_hangup
from kvlb.running import ConfigFile, new_registry, run_balancer, run_indexer
from kvlb.settings import KvlbSettings, Overrides, load_fleet
from kvlb.workers.processes import run_workers


def indexer(overrides: Overrides, *, config: Path | None) -> None:
    """Run until SIGINT or SIGTERM."""
    configure_logs()
    run_command(_indexer(overrides, config))


def balancer(overrides: Overrides, *, config: Path | None) -> None:
    """Run until SIGINT or SIGTERM, then finish what runs."""
    configure_logs()
    run_command(_balancer(overrides, config))


async def _indexer(overrides: Overrides, config: Path | None) -> None:
    with stop_event() as stop, surviving_hangup(config):
        settings = load_fleet(config, overrides, os.environ)
        await run_indexer(
            settings,
            stop=stop,
            on_listening=lambda url: _greet("indexer", url, settings),
            file=ConfigFile.of(config, overrides),
        )


async def _balancer(overrides: Overrides, config: Path | None) -> None:
    with stop_event() as stop, surviving_hangup(config):
        settings = load_fleet(config, overrides, os.environ)

        if settings.workers > 1:
            await run_workers(
                settings,
                overrides=overrides,
                config=config,
                registry=new_registry(),
                stop=stop,
                on_listening=lambda url: _greet("balancer", url, settings),
            )
            return

        def listening(url: str) -> None:
            _greet("balancer", url, settings)
            spare_startup_objects()

        await run_balancer(
            settings, stop=stop, on_listening=listening, file=ConfigFile.of(config, overrides)
        )


def _greet(command: str, url: str, settings: KvlbSettings) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]kvlb {command} {version('kvlb')}[/] listens on [bold]{url}[/]")
    redis = settings.redis.url if settings.redis else "-"  # it holds no password
    console.print(f"  {'redis':<10} {redis}", markup=False)
    for each in settings.instances:
        console.print(f"  {each.name:<10} {each.role.value:<8} {each.id}", markup=False)
    paths = "/status  /metrics  /ready" + ("  /docs" if command == "balancer" else "")
    console.print(f"\nLook:  {url}{paths}", markup=False)
