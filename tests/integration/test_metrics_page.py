"""docs/metrics.md names what the two registries and a running kvlb expose, no more and no less."""

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from balancer.app import create_app
from indexer.config import IndexerConfig
from indexer.memory_index import MemoryIndex
from indexer.service import IndexerService
from indexer.status import IndexerCollector
from kvlb.running import running_kvlb
from kvlb.settings import KvlbSettings

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ANY_ROW = re.compile(r"^\| `([a-z_]+)` \| (\w+) \|", re.MULTILINE)
ROW = re.compile(r"^\| `(kvlb_[a-z_]+)` \| (\w+) \| ([^|]*)\|", re.MULTILINE)


@pytest.fixture
async def registry() -> CollectorRegistry:
    """Everything that `kvlb up` registers, for a fleet without instances."""
    registry, index = CollectorRegistry(), MemoryIndex()
    create_app(config=KvlbSettings(), index=index, registry=registry)
    async with httpx.AsyncClient() as http:
        service = IndexerService(config=IndexerConfig(), sources=(), index=index, http=http)
        registry.register(IndexerCollector(service))
    return registry


def exposed_name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def labels_of(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Label names by metric, whether it has series yet or not."""
    found: dict[str, set[str]] = {}
    for collector in registry._collector_to_names:
        own = getattr(collector, "_labelnames", None)
        for metric in collector.collect():
            names = own if own is not None else getattr(metric, "_labelnames", ())
            found[exposed_name(metric)] = set(names)
    return found


async def test_page_names_every_metric_with_its_type(registry: CollectorRegistry) -> None:
    """A metric that nobody can look up is not there."""
    documented = {name: kind for name, kind, _ in ROW.findall(PAGE.read_text("utf-8"))}

    assert documented == {exposed_name(metric): metric.type for metric in registry.collect()}


async def test_page_names_every_label(registry: CollectorRegistry) -> None:
    """Dashboards are written from it."""
    rows = ROW.findall(PAGE.read_text("utf-8"))

    assert {name: set(re.findall(r"`(\w+)`", labels)) for name, _, labels in rows} == labels_of(
        registry
    )


async def test_page_names_everything_that_a_running_kvlb_exposes() -> None:
    """What Prometheus reads, whoever put it there."""
    async with (
        running_kvlb(KvlbSettings(port=0)) as kvlb,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        text = (await http.get(f"{kvlb.url}/metrics")).text

    exposed = {exposed_name(metric): metric.type for metric in text_string_to_metric_families(text)}
    assert exposed == dict(ANY_ROW.findall(PAGE.read_text("utf-8")))
