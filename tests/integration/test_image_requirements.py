"""requirements.txt, of which the image is made: complete, pinned, and enough to run everything.

An environment that holds the pinned packages and nothing else is put together from those that the
tests run with, so no registry is asked. The image build installs them for real.
"""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

USE_EVERYTHING = """
import asyncio, importlib, pkgutil
import balancer, indexer, kvlb, simulator

for package in (balancer, indexer, kvlb, simulator):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.startswith("kvlb.demo") and not module.name.endswith("__main__"):
            importlib.import_module(module.name)

from balancer.core.settings.tracing import TracingSettings
from kvlb.trace_export import open_tracing

async def trace():
    async with open_tracing(TracingSettings(endpoint="http://127.0.0.1:1")) as tracing:
        print(type(tracing).__name__)

asyncio.run(trace())
"""


def pins() -> dict[str, str]:
    """Package to version."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in pinned)
    return {name: version for name, _, version in (line.partition("==") for line in pinned)}


def asked_for() -> list[Requirement]:
    """What kvlb needs at run time, tracing included."""
    project = PROJECT["project"]
    return [
        Requirement(each)
        for each in [*project["dependencies"], *project["optional-dependencies"]["otel"]]
    ]


def needs(package: str, extras: set[str]) -> list[Requirement]:
    """What an installed package needs on this platform."""
    found = [Requirement(each) for each in distribution(package).requires or ()]
    return [
        each
        for each in found
        if each.marker is None
        or any(each.marker.evaluate({"extra": extra}) for extra in ({""} | extras))
    ]


@pytest.fixture
def pinned_only(tmp_path: Path) -> Path:
    """Python of a virtual environment with the pinned packages and kvlb's own metadata."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    for name in [*pins(), "kvlb"]:
        for file in distribution(name).files or ():
            if ".." in file.parts or (name == "kvlb" and ".dist-info" not in file.parts[0]):
                continue
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file.locate())
    return tmp_path / "bin/python"


def test_every_dependency_has_a_pin_that_suits() -> None:
    """Those of pyproject.toml, those of tracing, and whatever they need themselves."""
    pinned = pins()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = asked_for()
    while waiting:
        each = waiting.pop()
        name = canonicalize_name(each.name)
        assert name in pinned, each
        assert each.specifier.contains(pinned[name], prereleases=True), each
        if (name, frozenset(each.extras)) not in seen:
            seen.add((name, frozenset(each.extras)))
            waiting += needs(name, each.extras)


def test_tests_run_with_the_tracing_packages_of_the_image() -> None:
    """Where a development dependency is in the image too, both are the same version."""
    pinned = pins()
    development = [Requirement(each) for each in PROJECT["dependency-groups"]["dev"]]
    shared = [each for each in development if each.name in pinned]

    assert {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"} <= {
        each.name for each in shared
    }
    assert [each for each in shared if not each.specifier.contains(pinned[each.name])] == []


def test_pinned_packages_run_everything_that_ships(pinned_only: Path) -> None:
    """Every module but the demo's is imported and tracing begins, with nothing else installed."""
    done = subprocess.run(
        [pinned_only, "-W", "error", "-c", USE_EVERYTHING],
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=45,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["OtelTracing"]
