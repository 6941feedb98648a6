"""`kvlb bench routing`: runs, searches, tables and files, on small fleets."""

import json
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvlb.bench import command, saturation
from kvlb.bench.command import BenchOptions, bench, calibrate
from kvlb.bench.figures import Figures
from kvlb.bench.formulas import FORMULAS
from kvlb.bench.oracle import OracleJob, search
from kvlb.bench.pool import Task
from kvlb.bench.progress import watched
from kvlb.bench.run import OURS, POLICIES, Job, Scenario, play, run
from kvlb.bench.saturation import SATURATION
from kvlb.bench.workloads import WORKLOADS
from kvlb.cli import app
from kvlb.errors import SettingsError

CHAT = Scenario(workload="chat", engines=4, speed=3.0, seed=0, limit=240)
OPTIONS = BenchOptions(
    workloads=("chat",),
    engines=(4,),
    loads=(40, 85),
    policies=("round_robin", "kvlb"),
    seeds=2,
    limit=240,
)


def test_a_run_is_the_same_every_time() -> None:
    """By its seed; another one gives other figures."""
    job = Job(scenario=CHAT, policy=OURS)

    assert run(job) == run(job)
    assert run(job) != run(Job(scenario=msgspec.structs.replace(CHAT, seed=1), policy=OURS))


@pytest.mark.parametrize("policy", [*POLICIES, *FORMULAS])
def test_every_call_is_answered(policy: str) -> None:
    """Under every policy: first tokens after arrival, ends after first tokens."""
    outcomes = play(Job(scenario=CHAT, policy=policy))

    assert len(outcomes) == CHAT.limit
    assert all(each.arrived_s < each.first_s <= each.ended_s for each in outcomes)


def test_nobody_asks_before_the_answer() -> None:
    """Where a workload waits for answers."""
    outcomes = play(Job(scenario=CHAT, policy="round_robin"))

    for each in outcomes:
        if each.call.after is not None:
            assert each.arrived_s == outcomes[each.call.after].ended_s + each.call.at_s


def test_caches_tell_policies_apart() -> None:
    """Round robin finds least of what it has seen, and the formula most."""
    figures = {str(name): run(Job(scenario=CHAT, policy=name)) for name in POLICIES}

    assert figures["round_robin"].cached < figures["session"].cached < figures[OURS].cached
    assert figures[OURS].ttft_mean < figures["round_robin"].ttft_mean


def test_a_slow_engine_gets_less() -> None:
    """Rates are learned per engine."""
    scenario = Scenario(workload="arxiv", engines=4, speed=1.0, seed=0, one_slow=True, limit=300)
    outcomes = play(Job(scenario=scenario, policy=OURS))
    counts = dict.fromkeys({each.rank for each in outcomes}, 0)
    for each in outcomes:
        counts[each.rank] += 1
    slow = next(rank for rank in counts if "e0" in rank.instance)

    assert counts[slow] == min(counts.values())


def test_the_search_is_at_least_as_good_as_where_it_began() -> None:
    """Under the same limit of work, and never better than one endless cache."""
    job = OracleJob(scenario=CHAT, load=0.85, policies=("session", OURS), moves=30)

    found = search(job)

    assert found.cached >= found.ours - 1e-9
    assert found.cached <= found.endless
    assert found.most_over_mean <= 1.3
    assert set(found.by_policy) == {"session", OURS}


def test_a_search_can_be_for_first_tokens() -> None:
    """Instead of cached tokens."""
    job = OracleJob(scenario=CHAT, load=0.85, policies=(OURS,), moves=20, aim="ttft")

    assert search(job).ttft_mean <= run(Job(scenario=CHAT, policy=OURS)).ttft_mean


def test_tables_say_how_we_stand(tmp_path: Path) -> None:
    """On the terminal, as a page, as JSON and as plots."""
    written = StringIO()
    options = msgspec.structs.replace(OPTIONS, oracle_moves=10, out=tmp_path)

    measured = bench(options, Console(file=written, width=200))

    shown = written.getvalue()
    assert [str(column.place) for column in measured] == [
        "chat, 4 engines, 40%",
        "chat, 4 engines, 85%",
    ]
    for word in ("chat, 4 engines, 85%", "kvlb is", "better", "against the best other", "endless"):
        assert word in shown
    whole = json.loads((tmp_path / "routing-benchmark.json").read_text())
    assert len(whole["columns"]) == 2
    assert len(whole["columns"][0]["runs"]["kvlb"]) == 2
    assert len(whole["oracle"]) == 1
    page = (tmp_path / "routing-benchmark.md").read_text()
    assert "## Where it isn't best" in page
    assert "| 4, 85% | round_robin |" in page
    plots = (tmp_path / "routing-benchmark.html").read_text()
    assert plots.count("<svg") == 6
    assert "src=" not in plots
    assert "href=" not in plots
    picture = ElementTree.parse(tmp_path / "routing-benchmark.svg")  # noqa: S314 - our own
    assert len(picture.findall(".//{*}polyline")) == 2


def test_a_fleet_that_was_never_calibrated_is_refused() -> None:
    """Loads would mean nothing."""
    options = BenchOptions(
        workloads=("chat",), engines=(5,), loads=(40,), policies=(OURS,), seeds=1
    )

    with pytest.raises(SettingsError, match="not for 5"):
        bench(options, Console(file=StringIO()))


def test_every_workload_is_calibrated() -> None:
    """For every fleet of the usual table."""
    assert set(SATURATION) == {(name, engines) for name in WORKLOADS for engines in (4, 8, 16)}


@pytest.mark.parametrize("carried", [0.05, 1.0, 7.3])
def test_saturation_is_found_wherever_one_looks_first(
    carried: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up or down from there."""

    def carries(job: Job, *, patience_s: float) -> list[int]:
        assert patience_s > 0
        return [1] if job.scenario.speed <= carried and job.policy == "matched_load" else []

    monkeypatch.setattr(saturation, "play", carries)

    found = saturation.Saturation("arxiv", 4).find(1.0)

    assert found <= carried < found * saturation.CLOSE_ENOUGH


def test_calibrating_prints_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a line of the table of it."""
    monkeypatch.setattr(command, "find_saturation", lambda place: len(place) + 0.5)
    written = StringIO()

    calibrate(OPTIONS, Console(file=written))

    assert written.getvalue() == '    ("chat", 4): 2.5,\n'


def test_patience_ends_a_run() -> None:
    """As soon as it is clear that it is overloaded."""
    job = Job(scenario=CHAT, policy="round_robin")

    assert play(job, patience_s=0.5) == []
    assert len(play(job, patience_s=1e6)) == CHAT.limit


def test_work_is_spread_over_processes() -> None:
    """Results come with what they are of."""
    jobs = [Job(scenario=CHAT, policy=policy) for policy in ("round_robin", "session")]

    found = dict(watched([Task(run, job) for job in jobs], 2))

    assert set(found) == set(jobs)
    assert all(isinstance(each, Figures) for each in found.values())
    assert found[jobs[0]] == run(jobs[0])


def test_the_command_explains_itself() -> None:
    """And which workloads and policies there are."""
    shown = CliRunner().invoke(app, ["bench", "routing", "--help"], env={"COLUMNS": "200"}).output

    for word in ("conversation", "agents", "--calibrate", "--oracle-moves", "cache_aware"):
        assert word in shown
