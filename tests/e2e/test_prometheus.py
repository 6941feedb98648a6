"""A real Prometheus scrapes a running fleet: every query of every dashboard has an answer.

The fleet has a bad day on purpose: events are lost on the wire, the balancer's tokenizer is another
model's, clients ask for a model that nobody serves, and all engines are killed and started again.
Else the panels that show such things would rightly be empty.
"""

import asyncio
import json
import math
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards"
WINDOW = "2m"
"""Stands for $__rate_interval: from the first request to the last look."""
DEADLINE_S = 90.0

StartCommand = Callable[..., AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Rig:
    """Where Prometheus answers."""

    prometheus: str
    http: httpx.AsyncClient

    async def ask(self, path: str, **params: str) -> Any:
        answer = await self.http.get(f"{self.prometheus}/api/v1/{path}", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    async def samples(self, expr: str) -> dict[str, float]:
        """Series, by their labels, whose value is a number other than zero."""
        found = await self.ask("query", query=expr)
        values = {
            " ".join(f"{name}={value}" for name, value in sorted(each["metric"].items())): float(
                each["value"][1]
            )
            for each in found["result"]
        }
        return {
            labels: value for labels, value in values.items() if value != 0 and math.isfinite(value)
        }


def find_queries() -> dict[str, str]:
    """Every target of every panel, with variables as they stand when nothing is chosen."""
    found = {}
    for path in sorted(DASHBOARDS.glob("grafana/dashboards/*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"].replace("$__rate_interval", WINDOW)
                for variable in ("$model", "$instance"):
                    expr = expr.replace(f'"{variable}"', '".*"')
                found[f"{path.stem}: {panel['title']} ({target['refId']})"] = expr
    return found


def write_prometheus_files(directory: Path, balancer: int) -> Path:
    """dashboards/prometheus.yml and its rules, with this test's port and more haste."""
    config = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    # `kvlb up` is both: one job is enough.
    config["scrape_configs"] = config["scrape_configs"][:1]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{balancer}"]}]
    (directory / "rules").mkdir()
    for path in DASHBOARDS.glob("rules/*.yml"):
        text = path.read_text().replace("interval: 15s", "interval: 1s")
        (directory / "rules" / path.name).write_text(text)
    written = directory / "prometheus.yml"
    written.write_text(yaml.safe_dump(config))
    return written


def write_kvlb_file(directory: Path, engines: int, balancer: int) -> Path:
    """Four simulated engines at neighbouring ports, and a tokenizer that isn't theirs."""
    roles = ("prefill", "prefill", "decode", "decode")
    instances = [
        {"url": f"http://127.0.0.1:{engines + number}", "role": role}
        for number, role in enumerate(roles)
    ]
    written = directory / "kvlb.yaml"
    tokens = {"models": {"sim": str(ROOT / "tests/tokenizer")}, "parity_interval_s": 1.0}
    written.write_text(yaml.safe_dump({"port": balancer, "instances": instances, "tokens": tokens}))
    return written


async def until_ready(url: str, http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                answer = await http.get(f"{url}/ready")
                if answer.status_code == 200 and not answer.json()["reasons"]:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


@pytest.fixture
async def rig(
    start_command: StartCommand,
    free_ports: Callable[[int], list[int]],
    free_range: Callable[[int], int],
    tmp_path: Path,
) -> AsyncIterator[Rig]:
    """Engines that lose events, a balancer, traffic, and a Prometheus that has seen a bad day."""
    assert shutil.which("prometheus"), "run .ci/setup-services: it installs what tests need"
    balancer, prometheus = free_ports(2)
    engines = free_range(12)
    url = f"http://127.0.0.1:{balancer}"
    simulate = ("simulate", "2p2d", "--base-port", str(engines), "--drop-every", "5")
    kvlb_file = write_kvlb_file(tmp_path, engines, balancer)
    prometheus_options = (
        f"--config.file={write_prometheus_files(tmp_path, balancer)}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{prometheus}",
    )
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(start_command(*simulate))
        await first.printed("Balance over them")
        await stack.enter_async_context(start_command("up", "--config", str(kvlb_file)))
        watching = await stack.enter_async_context(
            start_command(*prometheus_options, program=("prometheus",))
        )
        await watching.printed("Server is ready")
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
        rig = Rig(f"http://127.0.0.1:{prometheus}", http)
        await until_ready(url, http)
        await clear_behind_our_back(rig, url, engines)
        await stack.enter_async_context(start_command("load", "--url", url, "--rate", "3"))
        await until(rig, "sum(kvlb_prefill_legs_total{outcome='skipped'}) > 10")
        await http.post(f"{url}/v1/completions", json={"model": "nobody's", "prompt": "x"})
        await first.stop(signal.SIGKILL)
        await until(rig, 'sum(kvlb_legs_total{outcome!="ok"}) > 0')
        await until(rig, 'ALERTS{alertname="KvlbInstanceUnhealthy", alertstate="pending"}')
        second = await stack.enter_async_context(start_command(*simulate))
        await second.printed("Balance over them")
        yield rig


async def clear_behind_our_back(rig: Rig, url: str, engines: int) -> None:
    """Empty every cache: engines that idle tell it with the next request, one too late for us."""
    body = {"model": "sim", "prompt": list(range(2048)), "max_tokens": 2}
    for _ in range(2):
        await rig.http.post(f"{url}/v1/completions", json=body)
    await until(rig, "kvlb_leg_predicted_tokens_total > 0")
    for engine in range(engines, engines + 4):
        await rig.http.post(f"http://127.0.0.1:{engine}/reset_prefix_cache")
    await rig.http.post(f"{url}/v1/completions", json=body)
    await until(rig, "kvlb_leg_overpredicted_tokens_total > 1000")


async def until(rig: Rig, expr: str) -> None:
    """Wait until `expr` holds for something."""
    async with asyncio.timeout(60):
        while True:
            if (await rig.ask("query", query=expr))["result"]:
                return
            await asyncio.sleep(0.2)


async def test_every_panel_has_an_answer(rig: Rig) -> None:
    """No query is wrong, and none shows something that can't happen."""
    waiting = find_queries()
    answers: dict[str, dict[str, float]] = {}
    assert len(waiting) > 40
    try:
        async with asyncio.timeout(DEADLINE_S):
            while waiting:
                for name, expr in list(waiting.items()):
                    if samples := await rig.samples(expr):
                        answers[name] = samples
                        del waiting[name]
                await asyncio.sleep(0.5)
    except TimeoutError:
        pytest.fail(f"no sample but zero: {json.dumps(waiting, indent=2)}")

    assert answers.keys() == find_queries().keys()
    groups = (await rig.ask("rules"))["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    write_table(answers)


def write_table(answers: Mapping[str, Mapping[str, float]]) -> None:
    """For docs/dashboards.md, if asked for: what each query answered, one series of each."""
    lines = [
        "| dashboard: panel (query) | series | one of them | value |",
        "| --- | --- | --- | --- |",
    ]
    for name, samples in sorted(answers.items()):
        labels, value = max(samples.items(), key=lambda sample: sample[1])
        lines.append(f"| {name} | {len(samples)} | {labels or 'all'} | {value:.4g} |")
    if written := os.environ.get("KVLB_WRITE_TABLE"):
        Path(written).write_text("\n".join(lines) + "\n")
