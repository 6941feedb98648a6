"""`kvlb doctor`, `kvlb record` and `kvlb audit` on one real engine."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine(start_engines: Callable[..., Any]) -> Iterator[Any]:
    with start_engines("m0") as running:
        yield running["m0"]


def kvlb(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    command = [sys.executable, "-m", "kvlb", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_what_was_recorded_audits_without_an_open_question(engine: Any, tmp_path: Path) -> None:
    """One request at a time: nearly all are predicted exactly, and the rest has a cause."""
    name = str(tmp_path / "run")
    recorded = kvlb("record", "--instance", engine.url, "--out", name, "--requests", "60")
    audited = kvlb("audit", name, "--format", "json")

    assert recorded.returncode == 0, recorded.stderr
    report = json.loads(audited.stdout)
    sys.stdout.write(f"record and audit, serial: {report['exact']} of {report['requests']} exact\n")
    assert audited.returncode == 0, report
    assert report["requests"] == 61
    assert report["exact"] >= 0.95 * report["requests"], report


def test_requests_under_way_at_once_are_recorded_whole(engine: Any, tmp_path: Path) -> None:
    """No message is lost, every request is comparable."""
    name = str(tmp_path / "load")
    recorded = kvlb(
        "record", "--instance", engine.url, "--out", name, "--requests", "60", "--concurrency", "6"
    )
    report = json.loads(kvlb("audit", name, "--format", "json").stdout)

    assert recorded.returncode == 0, recorded.stderr
    sys.stdout.write(
        f"record and audit, 6 at once: {report['exact']} of {report['requests']} exact\n"
    )
    assert report["not_comparable"] == {}
    assert report["events"].get("lost", 0) == 0


def test_doctor_finds_nothing_wrong(engine: Any, model: Path, tmp_path: Path) -> None:
    """Events, replay, usage, keep-alive and the tokenizer with its chat template are all right."""
    config = tmp_path / "kvlb.yaml"
    config.write_text(
        yaml.safe_dump(
            {"instances": [{"url": engine.url}], "tokens": {"models": {"tiny": str(model)}}}
        )
    )
    looked = kvlb("doctor", "--config", str(config), "--format", "json")

    assert json.loads(looked.stdout)["findings"] == [], looked.stdout
    assert looked.returncode == 0


def test_doctor_finds_what_a_real_engine_was_started_wrongly_with(
    start_engines: Callable[..., Any], free_port: Callable[[], int]
) -> None:
    """An endpoint that vLLM connects to, no replay socket, answers that tell nothing of the cache."""
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://0.0.0.0:{free_port()}"}
    flags = ("--kv-events-config", json.dumps(events), "--no-enable-prompt-tokens-details")
    with start_engines("m0", flags=flags) as running:
        looked = kvlb("doctor", "--instance", running["m0"].url, "--format", "json")

    found = {each["name"]: each["change"] for each in json.loads(looked.stdout)["findings"]}
    assert looked.returncode == 1
    assert set(found) == {"publisher_connects", "no_replay", "token_details_off"}
    assert '"endpoint": "tcp://*:' in found["publisher_connects"]
    assert "--enable-prompt-tokens-details" in found["token_details_off"]


def test_doctor_finds_prefix_caching_off_on_a_real_engine(
    start_engines: Callable[..., Any],
) -> None:
    """By the engine's own metric; it is not called silent as well."""
    with start_engines("m0", flags=("--no-enable-prefix-caching",)) as running:
        looked = kvlb("doctor", "--instance", running["m0"].url, "--format", "json")

    found = [each["name"] for each in json.loads(looked.stdout)["findings"]]
    assert (looked.returncode, found) == (1, ["prefix_caching_off"])
