"""`kvlb doctor` as a command: what it prints, and how it exits."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import yaml
from typer.testing import CliRunner, Result

from kvlb.cli import app
from simulator.core.settings import EngineSettings

WELL = EngineSettings(inter_token_ms=1.0)

IDLE_S = 0.1
"""Our pool's keep-alive in these tests: as long as a healthy engine is waited for."""


def run_kvlb(*arguments: str) -> Result:
    """The command in this thread."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def test_command_prints_findings_and_exits_1(
    engines_beside: Callable[..., list[str]], tmp_path: Path
) -> None:
    """As a table for people, as JSON for programs."""
    options = [
        *engines_beside("1", msgspec.structs.replace(WELL, events=False)),
        *engines_beside("1"),
    ]
    config = tmp_path / "kvlb.yaml"
    instances = [{"url": each.partition(",")[0]} for each in options]
    keep_alive = {"keep_alive_s": IDLE_S}
    config.write_text(yaml.safe_dump({"instances": instances, "dataplane": keep_alive}))
    table = run_kvlb("doctor", "--config", str(config))
    printed = run_kvlb("doctor", "--config", str(config), "--format", "json")

    read = json.loads(printed.stdout)
    assert (table.exit_code, printed.exit_code, read["errors"]) == (1, 1, 1)
    assert [each["name"] for each in read["findings"]] == ["events_off"]
    assert "events_off" in table.stdout
    assert "--kv-events-config" in table.stdout


def test_command_exits_0_if_all_is_well(engines_beside: Callable[..., list[str]]) -> None:
    """And says what it looked at; a warning alone is no failure."""
    well = run_kvlb("doctor", "--instance", *engines_beside("1"))
    warned = run_kvlb(
        "doctor", "--instance", *engines_beside("1", msgspec.structs.replace(WELL, replay=False))
    )

    assert (well.exit_code, well.stdout.strip()) == (0, "1 instance: m0. Nothing to change.")
    assert (warned.exit_code, "no_replay" in warned.stdout) == (0, True)


def test_command_without_engines_says_what_to_name() -> None:
    """Something to change before anything can be looked at."""
    assert "--instance" in str(run_kvlb("doctor").exception)
