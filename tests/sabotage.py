"""Breaks the code one line at a time, and expects the test that plays the fault to notice.

`tests/faults.toml` is the table: each fault with its test and a one-line sabotage.

    python tests/sabotage.py            every fault; some minutes
    python tests/sabotage.py F02 late   those whose names contain one of these
    python tests/sabotage.py --jobs 1   one after the other; otherwise as many at once as there are cores
    python tests/sabotage.py --page     the table as docs/faults.md

Each job has a copy of the tree and a folder for temporary files. Most of a row is pytest starting, or
waiting in vain. Verdicts come in the table's order, whichever job is done first.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests/faults.toml"
FAILED = 1
"""What pytest exits with if tests ran and failed, not if it could not run them."""
LONGEST_S = 180
RUN_PYTEST = """
import os, sys, pytest
code = pytest.main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""
"""A test that was ended in the middle may leave sockets for which the interpreter would wait for ever."""
NOTICED = "noticed"

INTRODUCTION = """\
# Faults

Every way in which a cache index, or a proxy of streams, is known to go wrong, what kvlb does about it, and the test that plays it. Names like
F01 are those used in tests and commits. Tests marked *both* run on the index in memory and on a real Redis; the others need one of them, or none.

*Sabotage* is one line of the code and what to make of it; the test then fails. `make sabotage` does so with each of them, in copies of
the tree, as many at once as there are cores; `python tests/sabotage.py F03 gap` with those whose names hold one of these words. This page is written by `make docs` from `tests/faults.toml`.

Where a simulated engine can spoil its own stream, the switch is in `simulator/core/event_faults.py`; a running one takes it by
`POST /simulator/faults`, for example `{"drop_every": 3, "replay": "silent"}`.

What several of them do together is played by random lives of a fleet, whose batches are lost, doubled and overtaken, whose replays stop or stay silent and
whose engines restart, compared after each step with a model that works every answer out from scratch:
`HYPOTHESIS_PROFILE=deep python -m pytest --timeout 3600 tests/conformance/index_lives` plays 300 lives of up to 40 steps in memory, as many in Redis and
as many over shared tables. On 2026-11-30 there was no difference in any of the three (five minutes). The run before it had found one in the model:
an engine that restarts, is asked twice in vain and publishes nothing loses its old blocks only when it is asked again.
"""

Fault = dict[str, Any]


def load_faults(table: Path = TABLE) -> list[Fault]:
    """Rows of the table, in its order."""
    rows: list[Fault] = tomllib.loads(table.read_text())["fault"]
    return rows


def render_page(faults: Sequence[Fault]) -> str:
    """The table as a page."""
    parts = [INTRODUCTION]
    section = None
    for fault in faults:
        if fault["section"] != section:
            section = fault["section"]
            parts.append(f"\n## {section}\n")
            parts.append("| fault | what goes wrong | what kvlb does | test | sabotage |")
            parts.append("| --- | --- | --- | --- | --- |")
        sabotage = f"`{fault['file']}`: {_code(fault['text'])} → {_code(fault['becomes'])}"
        cells = [
            fault["name"],
            fault["wrong"],
            fault["does"],
            _shown_test(fault),
            sabotage,
        ]
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(parts) + "\n"


def _shown_test(fault: Fault) -> str:
    """The test and the case that plays this fault, on whatever backend."""
    backend, _, case = fault.get("case", "").partition("-")
    notes = [*([case] if case else []), *(["both"] if backend == "memory" else [])]
    return f"`{fault['test']}`" + (f" ({', '.join(notes)})" if notes else "")


def _node_id(fault: Fault) -> str:
    case: str | None = fault.get("case")
    return f"{fault['test']}[{case}]" if case else str(fault["test"])


def _code(line: str) -> str:
    return f"`{line.strip()}`"


def copy_tree(folder: Path) -> None:
    """Everything that git knows, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def start_tests(
    folder: Path, tests: Sequence[str], patience_s: int, longest_s: int, *options: str
) -> tuple[int, str]:
    """Exit code and output of pytest in the copy. What is broken often shows as waiting in vain."""
    command = [sys.executable, "-c", RUN_PYTEST, "-q", "-p", "no:cacheprovider", *options]
    command += ["--basetemp", str(folder.parent / "temporary")]
    # Compiling everything anew would be more than half of what a row costs.
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    try:
        ended = subprocess.run(
            [*command, "--timeout", str(patience_s), *tests],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=longest_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return FAILED, ""  # it hangs where it did not before
    return ended.returncode, ended.stdout


def run_test(folder: Path, test: str, patience_s: int) -> int:
    """Exit code of one test."""
    return start_tests(folder, [test], patience_s, LONGEST_S, "-x")[0]


def find_passing(folder: Path, faults: Sequence[Fault]) -> set[str]:
    """Tests that pass while nothing is broken, all run by one pytest: starting it is most of the cost."""
    tests = sorted({_node_id(fault) for fault in faults})
    _, told = start_tests(folder, tests, 60, LONGEST_S * len(tests), "-rp")
    passed = "PASSED "
    return {line.removeprefix(passed) for line in told.splitlines() if line.startswith(passed)}


def sabotage(folder: Path, fault: Fault) -> bool:
    """Whether the fault's test fails once its line is broken."""
    path = folder / fault["file"]
    whole = path.read_text()
    _write(path, whole.replace(fault["text"], fault["becomes"]))
    try:
        return run_test(folder, _node_id(fault), 10) == FAILED
    finally:
        _write(path, whole)


def _write(path: Path, text: str) -> None:
    """Without what was compiled before: it is told apart by seconds and size only."""
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def judge(folder: Path, fault: Fault, *, passes: bool) -> str:
    """What came of breaking its line; `passes` if its test is known to pass otherwise."""
    if not passes and run_test(folder, _node_id(fault), 60) != 0:
        return "fails without any sabotage"
    return NOTICED if sabotage(folder, fault) else "NOT NOTICED"


def judge_all(faults: Sequence[Fault], folders: Sequence[Path]) -> Iterator[tuple[str, float]]:
    """Verdict and seconds of each fault, in order; as many at once as there are copies of the tree."""
    free: SimpleQueue[Path] = SimpleQueue()
    for folder in folders:
        free.put(folder)

    def judge_next(fault: Fault) -> tuple[str, float]:
        folder = free.get()
        started_s = time.monotonic()
        try:
            verdict = judge(folder, fault, passes=_node_id(fault) in passing)
        finally:
            free.put(folder)
        return verdict, time.monotonic() - started_s

    with ThreadPoolExecutor(len(folders)) as pool:
        shares = [faults[first :: len(folders)] for first in range(len(folders))]
        passing = set[str]().union(*pool.map(find_passing, folders, shares))
        _tell(f"{len(passing)} tests pass while nothing is broken")
        yield from pool.map(judge_next, faults)


def main() -> int:
    faults = load_faults()
    parser = _options()
    options = parser.parse_args()
    if options.page:
        sys.stdout.write(render_page(faults))
        return 0
    words = [word.lower() for word in options.words] or [""]
    wanted = [each for each in faults if any(word in each["name"].lower() for word in words)]
    if not wanted:
        parser.error("no fault has such a name")
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="kvlb-sabotage-") as name:
        jobs = range(max(1, min(options.jobs, len(wanted))))
        folders = [Path(name, str(job), "tree") for job in jobs]
        for folder in folders:
            copy_tree(folder)
        for number, (verdict, took_s) in enumerate(judge_all(wanted, folders), 1):
            unnoticed += verdict != NOTICED
            fault = wanted[number - 1]["name"]
            _tell(f"{number:3}/{len(wanted)}  {took_s:5.1f} s  {verdict:12}  {fault}")
    _tell(f"{len(wanted) - unnoticed} of {len(wanted)} noticed")
    return 1 if unnoticed else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Break a line per fault; its test is to notice.")
    parser.add_argument("words", nargs="*", help="only faults whose names contain one of these")
    parser.add_argument("--page", action="store_true", help="write the table as docs/faults.md")
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=cores, help="how many at once (%(default)s)")
    return parser


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
