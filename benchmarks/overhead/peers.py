"""The two Rust routers, from PyPI, in a virtual environment that `make clean` removes."""

import subprocess
import sys
from pathlib import Path

VERSIONS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2"}
ENVIRONMENT = Path(__file__).parents[2] / ".venv-peers"
_INSTALL_TIMEOUT_S = 600


def install(name: str) -> str | None:
    """Have the router's command in the environment; what stood in the way, if anything did."""
    if command(name).exists():
        return None
    wanted = f"{name}=={VERSIONS[name]}"
    print(f"installing {wanted} ...", file=sys.stderr, flush=True)
    try:
        if not (ENVIRONMENT / "bin" / "pip").exists():
            _run([sys.executable, "-m", "venv", str(ENVIRONMENT)])
        _run([str(ENVIRONMENT / "bin" / "pip"), "install", "--quiet", wanted])
    except (subprocess.SubprocessError, OSError) as error:
        told = getattr(error, "stderr", "") or str(error)
        last = str(told).strip().splitlines()[-1:]
        return f"{wanted} can't be installed: {' '.join(last)}"
    return None


def command(name: str) -> Path:
    """Its program."""
    return ENVIRONMENT / "bin" / name


def _run(arguments: list[str]) -> None:
    subprocess.run(
        arguments, check=True, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S
    )
