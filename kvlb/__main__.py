"""Entry of the `kvlb` command: runs it, and turns its deliberate errors into one line, exit 2."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from kvlb.cli import app
from kvlb.errors import KvlbError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the process's own if no arguments are given."""
    try:
        app(arguments)
    except KvlbError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]kvlb:[/] {escape(str(error))}")
        sys.exit(2)


if __name__ == "__main__":
    main()
