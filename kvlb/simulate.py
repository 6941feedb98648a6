"""`kvlb simulate`: engines without a GPU, their addresses, and the line that balances over them."""

from dataclasses import dataclass

from rich.console import Console

from kvlb.errors import SettingsError
from kvlb.event_loop import run_command, stop_event
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.errors import SettingsError as SimulatorSettingsError
from simulator.core.settings import EngineSettings
from simulator.service import RunningFleet


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What the command line says of the engines."""

    base_port: int
    prefill_tokens_per_s: float
    inter_token_ms: float
    drop_every: int
    host: str = "127.0.0.1"


def simulate(fleet: str, options: SimulationOptions) -> None:
    """Run the engines until SIGINT or SIGTERM."""
    run_command(_simulate(fleet, options))


async def _simulate(text: str, options: SimulationOptions) -> None:
    spec = parse_fleet(text)
    try:
        settings = EngineSettings(
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            inter_token_ms=options.inter_token_ms,
        )
    except SimulatorSettingsError as error:
        raise SettingsError(str(error)) from error
    with stop_event() as stopped:
        async with simulated_fleet(
            spec, settings, host=options.host, base_port=options.base_port
        ) as fleet:
            for engine in fleet.engines:
                engine.drop_live_batches(options.drop_every or None)
            _show(fleet)
            await stopped.wait()


def _show(fleet: RunningFleet) -> None:
    console = Console(soft_wrap=True, highlight=False)
    columns = ("engine", "role", "address", "events", "replay")
    rows = [
        (each.name, each.role, each.url, each.events_endpoint, each.replay_endpoint or "-")
        for each in fleet.engines
    ]
    for row in (columns, *rows):
        console.print("{:<7} {:<8} {:<23} {:<22} {}".format(*row), markup=False)
    instances = " ".join(f"--instance {instance_option(engine)}" for engine in fleet.engines)
    console.print("\nBalance over them:", f"kvlb up {instances}", sep="\n")
    console.print("\nWatch one's cache:", f"kvlb events {fleet.engines[0].url}", sep="\n")
