"""The engine's install script never lets a CUDA build of torch in. Runs without one, in any tier."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = Path(__file__).parent / "install.sh"
PYTHON = """#!{python}
import json, os, sys
if sys.argv[1:2] == ["-c"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if "--dry-run" in sys.argv:
    print(json.dumps({{"install": [{{"metadata": {{"version": {version!r}}}}}]}}))
"""


def install(folder: Path, version: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run the script where pip would take this version of torch; return what pip was asked."""
    calls = folder / "calls"
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(python=sys.executable, calls=str(calls), version=version))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    env = {name: value for name, value in os.environ.items() if name != "TORCH_SPEC"}
    done = subprocess.run(
        [str(INSTALL), str(folder / "venv")], capture_output=True, text=True, env=env, check=False
    )
    asked = [json.loads(line) for line in calls.read_text().splitlines()]
    return done, [call for call in asked if call[:2] == ["-m", "pip"]]


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cu130", "2.13.0+cpu.cxx11.abi"])
def test_another_build_than_cpu_is_never_downloaded(tmp_path: Path, version: str) -> None:
    """It stops before anything but pip itself is installed, and says why."""
    done, asked = install(tmp_path, version)

    assert done.returncode == 3
    assert f"torch {version}, not a +cpu build" in done.stderr
    assert not (tmp_path / "venv/.ready").exists()
    assert len(asked) == 2
    assert asked[0][-1].startswith("pip>=")
    assert "--dry-run" in asked[1]


def test_a_cpu_build_is_installed_and_held_fast(tmp_path: Path) -> None:
    """Exactly the version that was looked at, also while vLLM's dependencies are resolved."""
    done, asked = install(tmp_path, "2.13.0+cpu")
    installs = [call for call in asked if "install" in call and "--dry-run" not in call]

    assert done.returncode == 0, done.stderr
    assert installs[1][-1] == "torch==2.13.0+cpu"
    assert all("--no-deps" in call or "--constraint" in call for call in installs[2:])
    assert (tmp_path / "venv/.ready").exists()
