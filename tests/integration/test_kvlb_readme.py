"""What the README tells a newcomer to type is something the program knows."""

import json
import re
from pathlib import Path

import typer.main

from kvlb.cli import app
from kvlb.instance_option import parse_instance

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_instances_are_options_we_read() -> None:
    """Every `--instance` of the page is accepted as it stands."""
    options = re.findall(r"--instance (http[^\s`]+)", README)

    assert len(options) >= 5
    assert all(parse_instance(option)["url"] for option in options)


def test_commands_exist() -> None:
    """Every `kvlb command` of the page is one of the program's, and none is left out."""
    named = set(re.findall(r"\bkvlb ([a-z]+)\b(?=[`\s])", README))
    group = typer.main.get_command(app)

    assert set(group.commands) <= named  # type: ignore[attr-defined]
    told = set(re.findall(r"`kvlb ([a-z]+)`", README))
    assert told <= set(group.commands)  # type: ignore[attr-defined]


def test_make_targets_exist() -> None:
    """Every `make target` of the page stands in the Makefile."""
    named = set(re.findall(r"`?make ([a-z-]+)\b(?=\s+#|`)", README))
    makefile = (ROOT / "Makefile").read_text()

    assert {"demo", "test", "test-engine"} <= named
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_engine_flags_are_valid_json() -> None:
    """The events configuration can be pasted, and names what recovery needs."""
    found = re.search(r"--kv-events-config \\\n\s+'(\{.*?\})'", README)

    assert found
    assert json.loads(found.group(1)).keys() >= {"endpoint", "replay_endpoint", "publisher"}
