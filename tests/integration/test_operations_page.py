"""docs/operations.md: what it names exists, and every alert is explained."""

import re
from pathlib import Path

import pytest
import yaml

from kvlb.settings import KvlbSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
ALERTS = sorted(
    rule["alert"]
    for group in yaml.safe_load((ROOT / "dashboards/rules/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
)


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_has_a_paragraph(alert: str) -> None:
    """Whoever is woken by it finds what to do."""
    assert f"### {alert}\n" in PAGE


def test_no_alert_is_explained_that_does_not_exist() -> None:
    """A rule that was removed leaves the page, too."""
    assert sorted(re.findall(r"^### (Kvlb\w+)$", PAGE, re.MULTILINE)) == ALERTS


def test_reloadable_keys_are_those_of_the_configuration_page() -> None:
    """The table says what the code takes over."""
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    row = re.search(r"^\| taken over at once .*\n\| --- .*\n\| (.*?) \|", page, re.MULTILINE)
    assert row
    named = set(re.findall(r"`(\w+)`", row[1]))

    assert named == set(KvlbSettings.reloadable())


def test_metrics_that_are_named_exist() -> None:
    """They are in docs/metrics.md, which is held against the code."""
    metrics = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    named = set(re.findall(r"`(kvlb_\w+)`", PAGE))

    assert named
    assert {name for name in named if f"`{name}`" not in metrics} == set()
