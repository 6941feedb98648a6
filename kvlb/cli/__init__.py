"""The command line: names, options and help of every command. What they do is elsewhere.

Each command imports what it runs when it is called: `kvlb --help` should not load a web server,
and `kvlb demo` alone needs the optional `openai` package.
"""

from importlib.metadata import version as distribution_version
from typing import Annotated

import typer

from kvlb.cli.benching import bench
from kvlb.cli.checking import audit, doctor, record
from kvlb.cli.config_file import config
from kvlb.cli.looking import events, explain
from kvlb.cli.replaying import replay
from kvlb.cli.serving import balancer, indexer, up
from kvlb.cli.trying import demo, load, simulate

app = typer.Typer(
    name="kvlb",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvlb {distribution_version('kvlb')}")
        raise typer.Exit


@app.callback()
def kvlb(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """Cache-aware load balancer for fleets of stock `vllm serve` engines.

    New here? `kvlb demo` shows what it does, on this machine, without a GPU.

    With engines: `kvlb up --instance http://gpu1:8000 --instance http://gpu2:8000`
    """


# In the order in which `kvlb --help` lists them.
for command in (
    up,
    indexer,
    balancer,
    simulate,
    demo,
    load,
    replay,
    events,
    explain,
    doctor,
    record,
    audit,
):
    app.command()(command)
app.add_typer(config)
app.add_typer(bench)
