"""The table of faults: its page, its tests and its sabotages are what they say."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FAULTS: list[dict[str, Any]] = tomllib.loads((ROOT / "tests/faults.toml").read_text())["fault"]


@cache
def functions_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_fault_has_a_test_and_a_line_to_break(fault: dict[str, Any]) -> None:
    """Whether the test notices is tried by `make sabotage`."""
    path, _, name = fault["test"].partition("::")
    lines = (ROOT / fault["file"]).read_text()

    assert name in functions_in(ROOT / path)
    assert lines.count(fault["text"]) == 1, f"{fault['file']} has another text by now"
    assert fault["becomes"] != fault["text"]


def test_every_record_is_in_the_table() -> None:
    """F01 to F20, F31 to F54, and names that are only used once."""
    names = [fault["name"] for fault in FAULTS]
    wanted = [f"F{number:02}" for number in (*range(1, 21), *range(31, 55))]

    assert [each for each in wanted if not any(each in name for name in names)] == []
    assert len(set(names)) == len(names)


def test_page_is_written_from_the_table() -> None:
    """`make docs` writes it."""
    page = subprocess.run(
        [sys.executable, ROOT / "tests/sabotage.py", "--page"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert (ROOT / "docs/faults.md").read_text() == page
