"""`kvlb record` and `kvlb audit` as commands."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvlb.cli import app
from simulator.core.settings import EngineSettings

ENGINE = EngineSettings(inter_token_ms=1.0, prefill_tokens_per_s=200_000)


def run_kvlb(*arguments: str) -> Result:
    """The command in this thread."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def test_commands_record_and_audit(
    engines_beside: Callable[..., list[str]], tmp_path: Path
) -> None:
    """One after the other, by the name of the recording; and both at once."""
    name = str(tmp_path / "run")
    (option,) = engines_beside("1", ENGINE)
    said = run_kvlb("record", "--instance", option, "--out", name, "--requests", "8")
    audited = run_kvlb("audit", name, "--format", "json")
    live = run_kvlb(
        "audit", "--live", "--instance", option, "--minutes", "0.02", "--format", "json"
    )

    assert said.exit_code == 0, said.output
    assert "9 requests" in said.stdout
    assert audited.exit_code == 0
    assert json.loads(audited.stdout)["phases"]["serial"]["exact"] == 8
    assert live.exit_code == 0
    assert json.loads(live.stdout)["unexplained"] == 0


def test_recording_stops_somewhere_if_nobody_says_when(
    engines_beside: Callable[..., list[str]], tmp_path: Path
) -> None:
    """64 requests, and the one that shows the stream to be live."""
    (option,) = engines_beside("1", ENGINE)
    said = run_kvlb(
        "record", "--instance", option, "--out", str(tmp_path / "run"), "--concurrency", "8"
    )

    assert "65 requests" in said.stdout


def test_port_that_can_not_be_listened_on_is_said(
    engines_beside: Callable[..., list[str]], tmp_path: Path
) -> None:
    """By the option's name, before or after the engines were asked."""
    (option,) = engines_beside("1", ENGINE)
    taken = option.partition(",")[0].rpartition(":")[2]
    recording = ("record", "--instance", option, "--out", str(tmp_path / "run"), "--listen")

    assert "--listen" in str(run_kvlb(*recording, "nonsense").exception)
    assert "--listen" in str(run_kvlb(*recording, taken).exception)


@pytest.mark.parametrize("arguments", [[], ["run", "--live"]])
def test_audit_is_of_a_recording_or_live(arguments: list[str]) -> None:
    """One of them."""
    refused = run_kvlb("audit", *arguments)

    assert refused.exit_code == 2
    assert "--live" in refused.output


def test_audit_watches_the_balancer_that_is_named() -> None:
    """Nobody is there: the error says where."""
    refused = run_kvlb("audit", "--live", "--url", "http://127.0.0.1:9/")

    assert "http://127.0.0.1:9 (" in str(refused.exception)
