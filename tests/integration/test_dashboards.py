"""Dashboards, rules and Prometheus' configuration: whole, valid, and about metrics that exist.

docs/metrics.md is taken for the truth about metrics; `test_metrics_page.py` holds it against the code.
That every query returns something is shown by tests/e2e/test_prometheus.py.
"""

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards"
GRAFANA = DASHBOARDS / "grafana"
RULES = DASHBOARDS / "rules"

BOARDS = {
    path.stem: json.loads(path.read_text()) for path in sorted(GRAFANA.glob("dashboards/*.json"))
}
METRIC_ROW = re.compile(r"^\| `(kvlb_[a-z_]+)` \| (\w+) \| ([^|]*)\|", re.MULTILINE)
METRICS = {
    name: (kind, set(re.findall(r"`(\w+)`", labels)))
    for name, kind, labels in METRIC_ROW.findall((ROOT / "docs/metrics.md").read_text())
}
PROCESS_METRICS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
"""Of Prometheus itself, and of every process that the client library watches."""
TARGET_LABELS = {"job", "process"}
"""Given by dashboards/prometheus.yml."""
OWN_LABELS = {"le", "what"}
"""Of histograms; made by `label_replace`."""

NAME = re.compile(r"\b(?:[a-z]+:)?kvlb[a-z0-9_:]+|\bprocess_[a-z_]+|\bup\b")
BY = re.compile(r"\b(?:by|on) \(([^)]*)\)")
MATCHER = re.compile(r"([a-z_]+)(?:=~|!~|!=|=)\"")
STRING = re.compile(r'"[^"]*"')


@dataclass(frozen=True, slots=True)
class Query:
    """One expression and where it stands."""

    where: str
    expr: str


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def read_groups(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in read_groups("alerts.yml")}
RECORDED = {rule["record"]: rule for rule in read_groups("recording.yml")}


def find_queries() -> Iterator[Query]:
    for name, board in BOARDS.items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield Query(f"{name}/{panel['title']}/{target['refId']}", target["expr"])
    for name, rule in (ALERTS | RECORDED).items():
        yield Query(name, rule["expr"])


QUERIES = list(find_queries())


def names_in(expr: str) -> set[str]:
    """Metric names; a name that is a pattern stands for all it matches."""
    found = set(NAME.findall(STRING.sub('""', expr)))
    for pattern in re.findall(r'__name__=~"([^"]+)"', expr):
        matched = {name for name in METRICS if re.fullmatch(pattern, name)}
        alternatives = re.search(r"\(([^)]*)\)", pattern)
        wanted = alternatives[1].split("|") if alternatives else [""]
        found |= matched
        found |= {each for each in wanted if not any(each in name for name in matched)}
    return found


def labels_in(expr: str) -> set[str]:
    grouped = {label for labels in BY.findall(expr) for label in re.split(r", *", labels)}
    return (grouped | set(MATCHER.findall(expr))) - {"__name__", ""}


def base_name(name: str) -> str:
    """The metric a series belongs to: a histogram has three."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if METRICS.get(stem, ("", ()))[0] == "histogram" else name


def labels_of(name: str) -> set[str]:
    if name in RECORDED:
        expr = RECORDED[name]["expr"]
        return {label for labels in BY.findall(expr) for label in re.split(r", *", labels)}
    return METRICS[base_name(name)][1] if base_name(name) in METRICS else set()


def run(*command: str | Path) -> str:
    """Run a program of the Debian package `prometheus`; fail with what it printed."""
    assert shutil.which(str(command[0])), "run .ci/setup-services: it installs what tests need"
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_query_names_existing_metrics(query: Query) -> None:
    """A metric that is renamed breaks the panel here and not in front of its reader."""
    names = names_in(query.expr)
    unknown = {
        name
        for name in names
        if base_name(name) not in METRICS and name not in RECORDED and name not in PROCESS_METRICS
    }

    assert names
    assert unknown == set()


@pytest.mark.parametrize(
    ("expr", "unknown"),
    [
        pytest.param("rate(kvlb_legs_totals[5m])", "kvlb_legs_totals", id="name"),
        pytest.param("kvlb_epochs_total + kvlb:nobody:sum", "kvlb:nobody:sum", id="recorded"),
        pytest.param('{__name__=~"kvlb_(epochs|nobody)_total"}', "nobody", id="in-a-pattern"),
        pytest.param("kvlb_legs_total_bucket", "kvlb_legs_total_bucket", id="no-histogram"),
    ],
)
def test_a_metric_that_does_not_exist_is_found(expr: str, unknown: str) -> None:
    """The comparison above can fail."""
    unnamed = {name for name in names_in(expr) if base_name(name) not in METRICS}

    assert unnamed == {unknown}


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_query_names_existing_labels(query: Query) -> None:
    """A label nobody sets groups everything into one line, silently."""
    known = set().union(*(labels_of(name) for name in names_in(query.expr)))

    assert labels_in(query.expr) - known - TARGET_LABELS - OWN_LABELS == set()


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_query_invents_nothing(query: Query) -> None:
    """`or vector(0)` shows 0 where nothing is measured."""
    assert "vector(" not in query.expr


@pytest.mark.parametrize("name", BOARDS)
def test_dashboard_survives_grafanas_schema(name: str) -> None:
    """Every key of the file is one that Grafana's own types know, with its value."""
    register_default_plugins()
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(BOARDS[name])))

    assert list(differences(BOARDS[name], known)) == []


def differences(written: Any, known: Any, where: str = "") -> Iterator[str]:
    """Keys and values of `written` that `known` lacks."""
    if isinstance(written, dict) and isinstance(known, dict):
        for key, value in written.items():
            if key in known:
                yield from differences(value, known[key], f"{where}/{key}")
            else:
                yield f"{where}/{key}: unknown"
    elif isinstance(written, list) and isinstance(known, list) and len(written) == len(known):
        for number, (left, right) in enumerate(zip(written, known, strict=True)):
            yield from differences(left, right, f"{where}/{number}")
    elif written != known:
        yield f"{where}: {written!r} became {known!r}"


def test_a_key_that_grafana_does_not_know_is_found() -> None:
    """The comparison above can fail."""
    register_default_plugins()
    board = {"title": "t", "panels": [{"type": "stat", "titel": "typo"}]}
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))

    assert list(differences(board, known)) == ["/panels/0/titel: unknown"]


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_says_what_it_answers(name: str) -> None:
    """Title, sentence and unit, and the panel's data source is the one that is chosen above."""
    for panel in panels(BOARDS[name]):
        assert panel["title"]
        assert len(panel["description"]) > 5, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("name", BOARDS)
def test_panels_do_not_overlap(name: str) -> None:
    """Each cell of the grid belongs to one panel, each id to one panel."""
    places = [panel["gridPos"] for panel in BOARDS[name]["panels"]]
    cells = Counter(
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )

    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in BOARDS[name]["panels"]}) == len(places)


def test_dashboards_find_each_other_and_their_data() -> None:
    """Links lead to dashboards that exist; the data source chosen first is the provisioned one."""
    provisioned = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())
    sources = {source["uid"]: source["name"] for source in provisioned["datasources"]}
    uids = {board["uid"] for board in BOARDS.values()}

    assert len(uids) == len(BOARDS) > 1
    for board in BOARDS.values():
        chosen = board["templating"]["list"][0]["current"]
        assert sources[chosen["value"]] == chosen["text"]
        assert [link["url"].removeprefix("/d/") in uids for link in board["links"]] == [True]


def test_datasource_knows_how_often_prometheus_scrapes() -> None:
    """`$__rate_interval` is four times that; a wrong figure leaves graphs empty."""
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())
    config = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text())
    interval = source["datasources"][0]["jsonData"]["timeInterval"]

    assert interval == config["global"]["scrape_interval"]


def test_every_job_keeps_the_labels_of_kvlb() -> None:
    """Without `honor_labels` the label `instance` is renamed, and every panel is empty."""
    config = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text())

    for job in config["scrape_configs"]:
        assert job["honor_labels"] is True
        assert job["job_name"].startswith("kvlb")
        assert {each["target_label"] for each in job["relabel_configs"]} == {"process"}


def test_prometheus_accepts_its_configuration() -> None:
    """Syntax of the configuration and of the rules it names."""
    printed = run("promtool", "check", "config", DASHBOARDS / "prometheus.yml")

    assert "2 rule files found" in printed


def test_rules_do_what_their_tests_say() -> None:
    """The tests beside the rules pass."""
    run("promtool", "test", "rules", *sorted(RULES.glob("tests/*.yml")))


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_has_a_test_that_fires_and_one_that_does_not(alert: str) -> None:
    """One that can't fire is worse than none."""
    cases = yaml.safe_load((RULES / "tests/alerts.yml").read_text())["tests"]
    expected = [
        bool(check["exp_alerts"])
        for case in cases
        for check in case["alert_rule_test"]
        if check["alertname"] == alert
    ]

    assert set(expected) == {True, False}


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_says_what_to_do(alert: str) -> None:
    """Severity, summary and description; README.md says what to do."""
    rule = ALERTS[alert]

    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"].keys() == {"summary", "description"}
    assert f"`{alert}`" in (DASHBOARDS / "README.md").read_text()


@pytest.mark.parametrize("recorded", RECORDED)
def test_recorded_ratio_is_used(recorded: str) -> None:
    """By a panel or an alert."""
    users = [query.where for query in QUERIES if recorded in query.expr]

    assert users


def test_trust_panel_tells_of_a_rank_that_is_not_connected(tmp_path: Path) -> None:
    """An exact rank whose connection is gone isn't shown as exact."""
    (panel,) = [each for each in panels(BOARDS["engines"]) if each["title"] == "Trust by rank"]
    series = [
        ('kvlb_rank_connected{instance="d0",rank="0"}', "1"),
        ('kvlb_rank_trust{instance="d0",rank="0",trust="exact"}', "1"),
        ('kvlb_rank_trust{instance="d0",rank="0",trust="degraded"}', "0"),
        ('kvlb_rank_connected{instance="d1",rank="0"}', "0"),
        ('kvlb_rank_trust{instance="d1",rank="0",trust="exact"}', "1"),
    ]
    told = [("d0", "exact"), ("d1", "not connected")]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": value} for name, value in series],
        "promql_expr_test": [
            {
                "expr": panel["targets"][0]["expr"].replace("$instance", ".*"),
                "eval_time": "0s",
                "exp_samples": [
                    {
                        "labels": f'{{instance="{instance}", rank="0", trust="{trust}"}}',
                        "value": 1,
                    }
                    for instance, trust in told
                ],
            }
        ],
    }
    written = tmp_path / "test.yml"
    written.write_text(yaml.safe_dump({"tests": [test]}))

    run("promtool", "test", "rules", written)


def test_table_of_answers_names_every_query() -> None:
    """docs/dashboards.md shows what each of them gave; a new panel needs a new table."""
    rows = re.findall(
        r"^\| (\w+: .+) \((\w)\) \|", (ROOT / "docs/dashboards.md").read_text(), re.MULTILINE
    )
    asked = {
        (f"{name}: {panel['title']}", target["refId"])
        for name, board in BOARDS.items()
        for panel in panels(board)
        for target in panel["targets"]
    }

    assert set(rows) == asked
