"""Entry of the `kvlb` command: runs it, and turns its deliberate errors into one line, exit 2."""

import sys

from rich.console import Console
from rich.markup import escape

from kvlb.cli import app
from kvlb.errors import KvlbError


def main() -> None:
    """Run the command line."""
    try:
        app()
    except KvlbError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]kvlb:[/] {escape(str(error))}")
        sys.exit(2)


if __name__ == "__main__":
    main()
