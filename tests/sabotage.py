"""Breaks the code one line at a time, and expects the test that plays the fault to notice.

`tests/faults.toml` is the table: each fault with its test and a one-line sabotage.

    python tests/sabotage.py            every fault, in a copy of the tree; a few minutes
    python tests/sabotage.py F02 late   those whose names contain one of these
    python tests/sabotage.py --page     the table as docs/faults.md
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests/faults.toml"
FAILED = 1
"""What pytest exits with if tests ran and failed, not if it could not run them."""
LONGEST_S = 180

INTRODUCTION = """\
# Faults

Every way in which a cache index, or a proxy of streams, is known to go wrong, what kvlb does about it, and the test that plays it. Names like
F01 are those used in tests and commits. Tests marked *both* run on the index in memory and on a real Redis; the others need one of them, or none.

*Sabotage* is one line of the code and what to make of it; the test then fails. `make sabotage` does so with each of them, in a copy of
the tree; `python tests/sabotage.py F03 gap` with those whose names hold one of these words. This page is written by `make docs` from `tests/faults.toml`.

Where a simulated engine can spoil its own stream, the switch is in `simulator/core/event_faults.py`; a running one takes it by
`POST /simulator/faults`, for example `{"drop_every": 3, "replay": "silent"}`.

What several of them do together is played by random lives of a fleet, whose batches are lost, doubled and overtaken, whose replays stop or stay silent and
whose engines restart, compared after each step with a model that works every answer out from scratch:
`HYPOTHESIS_PROFILE=deep python -m pytest --timeout 3600 tests/conformance/index_lives` plays 300 lives of up to 40 steps in memory, as many in Redis and
as many over shared tables. On 2026-11-30 there was no difference in any of the three (five minutes). The run before it had found one in the model:
an engine that restarts, is asked twice in vain and publishes nothing loses its old blocks only when it is asked again.

On that day, too, `make sabotage` had 85 of the first 86 rows noticed, up to those of instances that fail their requests (of what a fault does to the index: all);
the other one, an error inside a 200, was caught twice in its test's case by then, and has another case since.
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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
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
    path.write_text(whole.replace(fault["text"], fault["becomes"]))
    try:
        return run_test(folder, _node_id(fault), 10) == FAILED
    finally:
        path.write_text(whole)


def main(arguments: Sequence[str]) -> int:
    faults = load_faults()
    if arguments == ["--page"]:
        sys.stdout.write(render_page(faults))
        return 0
    wanted = [
        each
        for each in faults
        if not arguments or any(word.lower() in each["name"].lower() for word in arguments)
    ]
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="kvlb-sabotage-") as name:
        folder = Path(name)
        copy_tree(folder)
        passing = find_passing(folder, wanted)
        sys.stdout.write(f"{len(passing)} tests pass while nothing is broken\n")
        sys.stdout.flush()
        for number, fault in enumerate(wanted, 1):
            started_s = time.monotonic()
            verdict = "fails without any sabotage"
            test = _node_id(fault)
            if test in passing or run_test(folder, test, 60) == 0:
                verdict = "noticed" if sabotage(folder, fault) else "NOT NOTICED"
            unnoticed += verdict != "noticed"
            line = f"{number:3}/{len(wanted)}  {time.monotonic() - started_s:5.1f} s  {verdict:12}"
            sys.stdout.write(f"{line}  {fault['name']}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(wanted) - unnoticed} of {len(wanted)} noticed\n")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
