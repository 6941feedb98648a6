"""Commands about the configuration file: `config reference`."""

# ruff: noqa: PLC0415 - see `kvlb.cli`

from typing import Annotated

import typer

config = typer.Typer(
    name="config", no_args_is_help=True, help="What can stand in the configuration file."
)


@config.callback()
def _group() -> None:
    """Keep `reference` a command of its own while there is no other."""


@config.command()
def reference(
    section: Annotated[
        str | None,
        typer.Argument(metavar="SECTION", help="Only this key of the top of the file: `redis`."),
    ] = None,
) -> None:
    """Print every key with type, default and meaning, as Markdown: docs/configuration.md.

    For example:

    - `kvlb config reference`
    - `kvlb config reference routing`
    """
    from kvlb.reference.page import render_page, render_section

    typer.echo(render_page() if section is None else render_section(section), nl=False)
