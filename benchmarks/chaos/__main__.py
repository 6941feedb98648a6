"""`python -m benchmarks.chaos`, or `make chaos`: a run per seed, a table, exit code 1 if anything is wrong."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import get_args

from benchmarks.chaos.report import render, render_complaints
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.stage import Run, play
from simulator.core.settings import ConnectorName


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="runs (10)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=2000, help="of each run (2000)")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second (20)")
    parser.add_argument("--connector", choices=get_args(ConnectorName), help="for all seeds")
    parser.add_argument(
        "--usual", action="store_true", help="retries and their budget as they are unless set"
    )
    parser.add_argument("--keep", type=Path, help="folder for settings and logs of balancers")
    return parser.parse_args()


async def _play_all(arguments: argparse.Namespace, folder: Path) -> list[Run]:
    runs = []
    first = arguments.first_seed
    for seed in range(first, first + arguments.seeds):
        scenario = Scenario.of(
            seed,
            requests=arguments.requests,
            rate_per_s=arguments.rate,
            connector=arguments.connector,
            is_usual=arguments.usual,
        )
        run = await play(scenario, folder)
        runs.append(run)
        if run.verdict.complaints:
            print(render_complaints(run), flush=True)
        print(f"seed {seed} took {run.took_s:.0f} s", file=sys.stderr, flush=True)
    return runs


def main() -> int:
    """Play every seed; 0 if nothing is to be complained of."""
    arguments = _read_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        runs = asyncio.run(_play_all(arguments, folder))
    print(render(runs))
    return 1 if any(run.verdict.complaints for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
