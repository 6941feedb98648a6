"""Recorded decisions with other weights."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvlb.bench.decisions import decide_again, read_decisions, read_weights
from kvlb.errors import SettingsError


def candidate(instance: str, **terms: float | None) -> dict[str, Any]:
    return {"instance": instance, "rank": 0, "cost": 1.0, "terms": terms}


def decision(number: int, *considered: dict[str, Any]) -> dict[str, Any]:
    leg = {"chosen": considered[0], "considered": list(considered), "why": ""}
    return {"request_id": f"r{number}", "status": 200, "plan": {"decode": leg, "prefill": None}}


LOG = [
    decision(0, candidate("a", queue=0.1, work=0.4), candidate("b", queue=0.6, work=0.1)),
    decision(1, candidate("a", queue=0.1, work=0.1), candidate("b", queue=0.2, work=0.2)),
    decision(2, candidate("b", queue=0.1, work=0.1), candidate("a", queue=0.1, work=0.1)),
    decision(3, candidate("a", queue=1.0, work=0.1)),
    {"request_id": "r4", "plan": None},
]
PAGE = json.dumps({"decisions": LOG})


def told(text: str, *weights: str, as_json: bool = True, tmp_path: Path) -> str:
    path = tmp_path / "log.json"
    path.write_text(text)
    written = StringIO()
    decide_again(str(path), weights, as_json=as_json, console=Console(file=written, width=200))
    return written.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(PAGE, id="an answer"),
        pytest.param(json.dumps({"decisions": LOG}, indent=2), id="an answer on many lines"),
        pytest.param("\n".join(map(json.dumps, LOG)) + "\n", id="one a line"),
    ],
)
def test_only_decisions_between_several_say_anything(text: str) -> None:
    """One candidate, or none recorded, leaves nothing to decide."""
    assert [each.request_id for each in read_decisions(text)] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("indent", [None, 2])
def test_one_decision_is_a_log(indent: int | None) -> None:
    """As one line of a longer one is, or as somebody has written it out."""
    assert len(read_decisions(json.dumps(LOG[0], indent=indent) + "\n")) == 1


def test_a_weight_moves_what_it_decided(tmp_path: Path) -> None:
    """And nothing else; of equals the recorded choice stays."""
    whole = json.loads(told(PAGE, "queue=0", tmp_path=tmp_path))

    assert whole["decisions"] == 3
    assert whole["changed"] == [{"request_id": "r0", "without": "a/0", "with": "b/0"}]


def test_every_term_is_told_with_what_depends_on_it(tmp_path: Path) -> None:
    """Left out, halved and doubled."""
    whole = json.loads(told(PAGE, tmp_path=tmp_path))

    assert whole["changed"] == []
    queue, work = whole["terms"]
    assert (queue["term"], queue["without"], queue["half"], queue["double"]) == ("queue", 1, 1, 0)
    assert (work["term"], work["without"], work["half"], work["double"]) == ("work", 0, 0, 1)
    assert queue["share"] == pytest.approx(0.3 / 0.9)


def test_people_get_a_table_and_what_moved(tmp_path: Path) -> None:
    """The first of many."""
    many = {"decisions": [{**LOG[0], "request_id": f"r{number}"} for number in range(30)]}

    shown = told(json.dumps(many), "queue=0", as_json=False, tmp_path=tmp_path)

    assert "Of 30 decisions" in shown
    assert "With queue x 0: 30 of 30 go elsewhere." in shown
    assert "r0: a/0 -> b/0" in shown
    assert "and 10 more" in shown


def test_without_weights_only_terms_are_told(tmp_path: Path) -> None:
    """There is nothing to have moved."""
    assert "go elsewhere." not in told(PAGE, as_json=False, tmp_path=tmp_path)


def test_a_term_without_a_number_is_endless(tmp_path: Path) -> None:
    """Unless it doesn't count."""
    log = [decision(0, candidate("a", queue=9.0, work=0.0), candidate("b", queue=0.1, work=None))]

    whole = json.loads(told(json.dumps({"decisions": log}), "work=0", tmp_path=tmp_path))

    assert [each["with"] for each in whole["changed"]] == ["b/0"]


@pytest.mark.parametrize(
    ("text", "weights", "message"),
    [
        pytest.param("nothing", (), "no log of decisions", id="no JSON"),
        pytest.param('{"decisions": []}', (), "none of 0 decisions", id="empty"),
        pytest.param(PAGE, ("queue",), "write TERM=FACTOR", id="no factor"),
        pytest.param(PAGE, ("cue=1",), "no term 'cue'", id="no such term"),
        pytest.param(PAGE, ("queue=nan",), "0 or more, not 'nan'", id="no number"),
        pytest.param(PAGE, ("queue=inf",), "0 or more, not 'inf'", id="endless"),
        pytest.param(PAGE, ("queue=-1",), "0 or more, not '-1'", id="negative"),
        pytest.param('{"a": 1}', (), "missing required field `request_id`", id="something else"),
    ],
)
def test_what_is_wrong_is_said(
    text: str, weights: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """In one sentence."""
    with pytest.raises(SettingsError, match=message):
        told(text, *weights, tmp_path=tmp_path)


def test_a_log_that_is_not_there_is_named() -> None:
    """With why."""
    with pytest.raises(SettingsError, match=r"nowhere\.json: No such file"):
        decide_again("nowhere.json", (), as_json=True, console=Console(file=StringIO()))


def test_weights_are_read_by_name() -> None:
    """A later one replaces an earlier one."""
    assert read_weights(["a=1", "b=0.5", "a=2"]) == {"a": 2.0, "b": 0.5}
