"""`kvlb simulate`: engines without a GPU, their addresses, and the line that balances over them."""

from dataclasses import dataclass

from rich.console import Console

from kvlb.errors import SettingsError
from kvlb.event_loop import run_command, stop_event
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet, tells_its_sources
from simulator.core.errors import SettingsError as SimulatorSettingsError
from simulator.core.settings import ConnectorName, EncoderConnectorName, EngineSettings
from simulator.service import RunningEngine, RunningFleet


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What the command line says of the engines."""

    base_port: int
    prefill_tokens_per_s: float
    inter_token_ms: float
    drop_every: int
    host: str = "127.0.0.1"
    ranks: int = EngineSettings().dp_size
    block_size: int = EngineSettings().block_size
    cache_blocks: int = EngineSettings().num_blocks
    release: str = EngineSettings().version
    adapters: tuple[str, ...] = ()
    connector: ConnectorName | None = None
    """Also of mixed engines; the others have one anyway."""
    ec_connector: EncoderConnectorName | None = None
    """Of all; a fleet with encode engines has one anyway."""

    def engine(self) -> EngineSettings:
        """What every engine is started with. Raises SettingsError."""
        names = (EngineSettings().model, *self.adapters)
        if len(set(names)) < len(names) or "" in names:
            raise SettingsError(f"--adapter: each needs a name of its own; {names[0]} is the model")
        try:
            return EngineSettings(
                prefill_tokens_per_s=self.prefill_tokens_per_s,
                inter_token_ms=self.inter_token_ms,
                dp_size=self.ranks,
                block_size=self.block_size,
                num_blocks=self.cache_blocks,
                version=self.release,
                adapters=self.adapters,
                kv_connector=self.connector,
                ec_connector=self.ec_connector,
            )
        except SimulatorSettingsError as error:
            raise SettingsError(str(error)) from error


def simulate(fleet: str, options: SimulationOptions) -> None:
    """Run the engines until SIGINT or SIGTERM."""
    run_command(_simulate(fleet, options))


async def _simulate(text: str, options: SimulationOptions) -> None:
    spec = parse_fleet(text)
    settings = options.engine()
    with stop_event() as stopped:
        async with simulated_fleet(
            spec, settings, host=options.host, base_port=options.base_port
        ) as fleet:
            for engine in fleet.engines:
                engine.drop_live_batches(options.drop_every or None)
            _show(fleet, options.connector)
            await stopped.wait()


def _show(fleet: RunningFleet, connector: str | None) -> None:
    console = Console(soft_wrap=True, highlight=False)
    columns = ("engine", "role", "address", "events", "replay")
    rows = [
        (each.name, each.role, each.url, each.events_endpoint, each.replay_endpoint or "-")
        for each in fleet.engines
    ]
    for row in (columns, *rows):
        console.print("{:<7} {:<8} {:<23} {:<22} {}".format(*row), markup=False)
    options = (instance_option(engine, connector) for engine in fleet.engines)
    instances = " ".join(f"--instance {option}" for option in options)
    console.print("\nBalance over them:", f"kvlb up {instances}", sep="\n")
    console.print("\nWatch one's cache:", f"kvlb events {_watched(fleet.engines[0])}", sep="\n")


def _watched(engine: RunningEngine) -> str:
    """How `kvlb events` finds the first rank of `engine`."""
    if tells_its_sources(engine):
        return engine.url
    return f"{engine.events_endpoint} --replay {engine.replay_endpoint}"
