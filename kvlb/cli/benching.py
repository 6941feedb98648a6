"""Commands that measure: `bench routing`, `bench overload`, `bench decisions`."""

# ruff: noqa: PLC0415, PLR0913 - see `kvlb.cli`; and an option is an argument

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvlb.cli.options import Format, FormatOption

bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure, without engines.")


@bench.callback()
def _group() -> None:
    """Measure, without engines."""


class WorkloadName(StrEnum):
    """What is sent."""

    CONVERSATION = "conversation"
    ARXIV = "arxiv"
    WEKA = "weka"
    SWE = "swe"
    CHAT = "chat"
    AGENTS = "agents"


class BenchPolicy(StrEnum):
    """Our policies, and other balancers' formulas."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    SESSION = "session"
    PREFIX_OVERLAP = "prefix_overlap"
    KVLB = "kvlb"
    UNCACHED_1 = "uncached_1"
    UNCACHED_4 = "uncached_4"
    MATCHED_LOAD = "matched_load"
    CACHE_AWARE = "cache_aware"


OWN = tuple(BenchPolicy)[:5]
LOADS = (40, 70, 85)
FLEETS = (4, 8, 16)


@bench.command()
def routing(
    *,
    workload: Annotated[
        list[WorkloadName] | None, typer.Option(help="What is sent; all if not said. Repeatable.")
    ] = None,
    engines: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Engines in the fleet; 4, 8 and 16. Repeatable."),
    ] = None,
    load: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=200, metavar="PERCENT", help="Of saturation; 40, 70 and 85. Repeatable."
        ),
    ] = None,
    policy: Annotated[
        list[BenchPolicy] | None,
        typer.Option(help="Our five if not said; the others are formulas of peers. Repeatable."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with other times and ties.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0)] = 0,
    one_slow: Annotated[
        bool, typer.Option("--one-slow", help="One engine takes four times as long.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two workloads, four engines, 85 %, two seeds.")
    ] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="One per core if not said.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Writes tables, JSON and plots there.")
    ] = None,
    oracle_moves: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of the search for the best placement: smallest fleet, highest load; 0: none.",
        ),
    ] = 2000,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Find anew what 100 % is, print it, and stop.")
    ] = False,
) -> None:
    """Compare policies on public traces and synthetic workloads, in virtual time.

    The balancer's own router, ledger and index decide; simulated engines serve. Nothing is
    measured on this machine but figures of that simulation, so it may be as slow as it likes.

    For example:

    - `kvlb bench routing --quick`
    - `kvlb bench routing --workload weka --engines 4 --load 85 --seeds 10`
    - `kvlb bench routing --out results`
    """
    import os
    import sys

    from rich.console import Console

    from kvlb.bench import command

    options = command.BenchOptions(
        workloads=workload or (("weka", "chat") if quick else tuple(WorkloadName)),
        engines=engines or ((4,) if quick else FLEETS),
        loads=load or ((85,) if quick else LOADS),
        policies=policy or OWN,
        seeds=2 if quick else seeds,
        first_seed=first_seed,
        processes=processes or os.cpu_count() or 1,
        one_slow=one_slow,
        oracle_moves=0 if quick else oracle_moves,
        out=out,
        command=" ".join(("kvlb", *command.without_out(sys.argv[1:]))),
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=command.FILE_WIDTH)
    if calibrate:
        command.calibrate(options, console)
    else:
        command.bench(options, console)


@bench.command()
def overload(
    *,
    workload: Annotated[
        list[WorkloadName] | None,
        typer.Option(help="What is sent; all if not said. Repeatable."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 3,
    promise: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="`admission.promise_s`, and what counts as good. Default: its."
        ),
    ] = None,
    streamed: Annotated[
        int, typer.Option(min=0, max=100, help="Per cent of the calls that are streamed.")
    ] = 100,
    processes: Annotated[int | None, typer.Option(min=1, help="One per core if not said.")] = None,
) -> None:
    """What is left of a fleet's goodput when more comes than it can serve, in virtual time.

    With the balancer's line and without, on four engines, at 70 to 200 % of saturation. Exit status 1 if
    with the line less than 90 % of the goodput at 100 % is left at 150 %.

    For example:

    - `kvlb bench overload --workload arxiv --seeds 1`
    """
    import os

    from msgspec.structs import replace
    from rich.console import Console

    from kvlb.bench import command
    from kvlb.bench.overload import OverloadOptions, bench_overload
    from kvlb.bench.workloads import WORKLOADS

    options = OverloadOptions(
        workloads=workload or tuple(WORKLOADS),
        seeds=seeds,
        processes=processes or os.cpu_count() or 1,
        streamed=streamed,
    )
    if promise is not None:
        options = replace(options, promise_s=promise)
    console = Console()
    if not console.is_terminal:
        console = Console(width=command.FILE_WIDTH)
    if not bench_overload(options, console):
        raise typer.Exit(1)


@bench.command()
def decisions(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="A file with what `/explain/recent?limit=100` answered, or one decision a line; `-` for stdin.",
        ),
    ],
    *,
    weight: Annotated[
        list[str] | None,
        typer.Option(metavar="TERM=FACTOR", help="Times its recorded seconds. Repeatable."),
    ] = None,
    format: FormatOption = Format.TEXT,  # noqa: A002 - the option's name
) -> None:
    """Make recorded decisions again with other weights: which terms decide, and what would move.

    Each for itself, with what was known then: a log doesn't tell what later requests would have found.

    For example:

    - `curl -s http://127.0.0.1:8080/explain/recent?limit=100 | kvlb bench decisions -`
    - `kvlb bench decisions log.json --weight delay=2 --weight recent=0`
    """
    from rich.console import Console

    from kvlb.bench.decisions import decide_again

    decide_again(log, weight or (), as_json=format is Format.JSON, console=Console())
