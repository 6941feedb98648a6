"""The command line in this process: help, version, options handed on, errors as one line."""

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from typer.main import get_command
from typer.testing import CliRunner

from indexer.core.types import RankId, Trust
from kvlb import __main__ as entry
from kvlb.cli import app
from kvlb.demo.client import ask, open_client
from kvlb.demo.report import EngineCounts, PolicyRun, judge
from kvlb.demo.run import print_report, run_demo, wait_until_ready
from kvlb.demo.stage import Stage
from kvlb.errors import PeerError, SettingsError
from kvlb.events_view import EventsOptions, _watch
from kvlb.logs import configure_logs
from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_fleet, load_settings
from kvlb.simulate import SimulationOptions, _simulate
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from kvlb.up import _up
from simulator.core.settings import EngineSettings
from simulator.workload import WorkloadShape

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
CAPTURE = Path(__file__).parent.parent / "captures"
SIMULATION = SimulationOptions(
    base_port=0, prefill_tokens_per_s=8000, inter_token_ms=1, drop_every=2
)


def test_help_lists_every_command() -> None:
    """And what to type first."""
    shown = CliRunner().invoke(app, ["--help"]).output

    for word in (*COMMANDS, "kvlb demo", "--instance"):
        assert word in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    """With what it does, and its options."""
    result = CliRunner().invoke(app, [command, "--help"])

    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 5


def test_explain_wants_a_request_or_an_id() -> None:
    """One of them."""
    assert CliRunner().invoke(app, ["explain"]).exit_code == 2
    assert CliRunner().invoke(app, ["explain", "{}", "--request-id", "x"]).exit_code == 2


def test_version_is_the_distributions() -> None:
    """One word and a number."""
    result = CliRunner().invoke(app, ["--version"])

    assert result.output.startswith("kvlb 0.")


def test_audit_prints_json_for_programs() -> None:
    """Exit code 0: everything sent alone is exact or explained."""
    files = [str(CAPTURE / f"h-lora.{kind}.jsonl.gz") for kind in ("events", "requests")]
    result = CliRunner().invoke(app, ["audit", *files, "--format", "json"])

    assert result.exit_code == 0
    assert json.loads(result.output)["unexplained"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["up"], id="up"),
        pytest.param(["simulate", "2x"], id="simulate"),
        pytest.param(["simulate", "1", "--base-port", "65535"], id="base-port"),
        pytest.param(["simulate", "1", "--host", "256.0.0.1"], id="host"),
        pytest.param(["events", "nowhere"], id="events"),
        pytest.param(["explain", "{"], id="explain"),
    ],
)
def test_deliberate_error_is_one_line_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever command it comes from."""
    with pytest.raises(SystemExit) as caught:
        entry.main(arguments)

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("kvlb: ")


@pytest.mark.parametrize("command", [["explain", "{}"], ["load"]], ids=["explain", "load"])
def test_balancer_with_an_impossible_port_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it is asked: the client would take the port modulo 65536."""
    with pytest.raises(SystemExit):
        entry.main([*command, "--url", "http://127.0.0.1:99999"])

    assert "write http://host:port" in capsys.readouterr().err


async def until_printed(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    printed = ""
    async with asyncio.timeout(20):
        while text not in printed:
            printed += capsys.readouterr().out
            await asyncio.sleep(0.01)
    return printed


async def test_up_runs_until_a_signal(capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated engines, a banner, and an end in peace."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_up(Overrides(port=0, policy="session"), None, "1p1d"))
        shown = await until_printed("kvlb explain", capsys)
        os.kill(os.getpid(), signal.SIGTERM)
        await running

    assert "policy session" in shown
    assert "p0" in shown


async def test_simulate_runs_until_a_signal(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the line that balances over its engines."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_simulate("1p1d", SIMULATION))
        shown = await until_printed("kvlb events", capsys)
        os.kill(os.getpid(), signal.SIGINT)
        await running

    assert "role=prefill,alias=p0 --instance" in shown


async def test_simulate_refuses_a_rate_that_cannot_be() -> None:
    """The engine's own word, as a setting to change."""
    impossible = SimulationOptions(
        base_port=0, prefill_tokens_per_s=0, inter_token_ms=1, drop_every=0
    )

    with pytest.raises(SettingsError, match="prefill_tokens_per_s"):
        await _simulate("1", impossible)


async def test_events_run_until_a_signal(capsys: pytest.CaptureFixture[str]) -> None:
    """A stream that is idle ends as well."""
    async with simulated_fleet(parse_fleet("1"), EngineSettings()) as fleet:
        options = EventsOptions(
            engine=fleet.engines[0].url, replay=None, start=None, limit=None, as_json=True
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(_watch(options))
            shown = await until_printed("fresh", capsys)
            os.kill(os.getpid(), signal.SIGTERM)
            await running

    assert [json.loads(line)["what"] for line in shown.splitlines()] == ["following", "trust"]


async def test_demo_judges_two_runs() -> None:
    """Two small runs, one verdict of five criteria. Whether it passes is for the real sizes."""
    stage = Stage(
        engine=EngineSettings(prefill_tokens_per_s=60_000.0),
        shape=WorkloadShape(conversations=2, turns=2, answer_tokens=4, think_s=0.0),
        answer_allowance_s=0.1,
    )

    report = await run_demo(1, stage)

    assert [len(run.requests) for run in (report.ours, report.theirs)] == [4, 4]
    assert len(report.criteria) == 5


def test_logs_are_json_lines_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody watches a pipe; standard output stays for results."""
    configure_logs()
    structlog.get_logger().info("instance_ready", instance="d0")

    printed = capsys.readouterr()
    assert printed.out == ""
    assert json.loads(printed.err)["event"] == "instance_ready"


async def test_demo_fails_if_a_request_fails() -> None:
    """A demo that hides errors shows nothing."""
    async with (
        simulated_fleet(parse_fleet("1"), EngineSettings()) as fleet,
        open_client(fleet.engines[0].url) as client,
    ):
        with pytest.raises(PeerError, match="a request of the demo failed"):
            await ask(
                client,
                model="absent",
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=1,
                clock=time.monotonic,
            )


async def test_fleet_that_is_never_ready_is_told() -> None:
    """With the time that was waited."""
    async with simulated_fleet(parse_fleet("1"), EngineSettings()) as fleet:
        options = (instance_option(fleet.engines[0]),)
        settings = load_settings(None, Overrides(instances=options, port=0), {})
        async with running_kvlb(settings) as kvlb:
            with pytest.raises(PeerError, match="not ready"):
                await wait_until_ready(kvlb, engines=2, deadline_s=0.2)


def test_demo_prints_its_report_and_its_verdict_is_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1 if a criterion fails, for people and programs alike."""
    empty = PolicyRun(
        policy="kvlb",
        requests=(),
        counts=EngineCounts(prompt_tokens=0, prefilled_tokens=0),
        duration_s=0,
    )
    report = judge(empty, empty)

    assert print_report(report, as_json=False) == 1
    assert "FAIL" in capsys.readouterr().out
    assert print_report(report, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


@pytest.mark.parametrize(
    ("command", "says"),
    [
        pytest.param("up", ("connector=", "rank_base="), id="up"),
        pytest.param("explain", ("/tokenize",), id="explain"),
        pytest.param("demo", ("about 40 seconds",), id="demo"),
        pytest.param("load", ("--wait",), id="load"),
    ],
)
def test_help_names_what_matters(command: str, says: tuple[str, ...]) -> None:
    """Parts of an engine's line, where prompts may go, how long it takes."""
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output

    for words in says:
        assert words in shown


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        pytest.param({"adapters": ("a", "a")}, "--adapter", id="twice"),
        pytest.param({"adapters": ("sim",)}, "--adapter", id="the-model"),
        pytest.param({"release": "newest"}, "not a release", id="release"),
    ],
)
def test_engine_that_cannot_be_simulated_is_refused(changed: dict[str, Any], says: str) -> None:
    """Before a port is taken."""
    with pytest.raises(SettingsError, match=says):
        replace(SIMULATION, **changed).engine()


def test_simulated_engine_is_what_the_options_say() -> None:
    """Every option reaches it."""
    options = replace(
        SIMULATION,
        ranks=2,
        block_size=32,
        cache_blocks=64,
        release="0.23.0",
        adapters=("a",),
        connector="nixl",
    )

    engine = options.engine()

    assert (engine.dp_size, engine.block_size, engine.num_blocks) == (2, 32, 64)
    assert (engine.version, engine.adapters, engine.kv_connector) == ("0.23.0", ("a",), "nixl")


def test_simulated_defaults_are_the_engines() -> None:
    """Those of the command line that speed doesn't decide."""
    options = {each.name: each.default for each in COMMANDS["simulate"].params}

    assert {name: options[name] for name in ("ranks", "block_size", "cache_blocks", "release")} == {
        name: getattr(SIMULATION, name)
        for name in ("ranks", "block_size", "cache_blocks", "release")
    }


@pytest.mark.parametrize("release", ["0.23.0", "0.33.0"])
async def test_printed_line_reaches_every_rank_of_a_simulated_fleet(
    release: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older engine doesn't tell its sockets, so the line names them."""
    options = replace(SIMULATION, ranks=2, release=release, connector="nixl")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_simulate("2", options))
        shown = await until_printed("kvlb events", capsys)
        line = next(each for each in shown.splitlines() if each.startswith("kvlb up"))
        settings = load_fleet(None, Overrides(instances=line.split()[3::2], port=0), {})
        async with running_kvlb(settings) as kvlb:
            async with asyncio.timeout(20):
                for each in settings.instances:
                    for rank in range(2):
                        await kvlb.indexer.until(
                            RankId(each.id, rank), lambda now: now.trust is Trust.EXACT
                        )
        os.kill(os.getpid(), signal.SIGINT)
        await running

    assert {each.connector for each in settings.instances} == {"nixl"}


@pytest.mark.parametrize("connector", ["nixl_push", "mooncake", "example", "offloading"])
async def test_simulated_connectors_are_balanced_by_the_printed_line(
    connector: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says of each engine what that doesn't tell itself; a long prompt takes both legs."""
    options = replace(SIMULATION, connector=connector)
    body = {"model": "sim", "prompt": list(range(600)), "max_tokens": 2}
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_simulate("1p1d", options))
        shown = await until_printed("kvlb events", capsys)
        line = next(each for each in shown.splitlines() if each.startswith("kvlb up"))
        settings = load_fleet(None, Overrides(instances=line.split()[3::2], port=0), {})
        async with (
            running_kvlb(settings) as kvlb,
            httpx.AsyncClient(base_url=kvlb.url, trust_env=False, timeout=10) as http,
            asyncio.timeout(20),
        ):
            while not await both_are_well(http):  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.01)
            answer = await http.post("/v1/completions", json=body)
        os.kill(os.getpid(), signal.SIGINT)
        await running

    assert (answer.status_code, answer.headers["x-kvlb-prefill"]) == (200, "p0")
    assert {each.connector for each in settings.instances} == {connector}


async def both_are_well(http: httpx.AsyncClient) -> bool:
    status = (await http.get("/status")).json()
    return all(each["healthy"] for each in status["instances"])
