"""An engine moves behind its DNS name (X5): a real `kvlb up` whose system resolver says so."""

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvlb.simulated import parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

NAME = "engine.kvlb.test"
PROMPT = {"model": "sim", "prompt": list(range(3, 131)), "max_tokens": 2}


def may_mount() -> bool:
    """Only root, or who may make namespaces, can have a hosts file of its own."""
    if not shutil.which("unshare"):
        return False
    return (
        subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    )


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not may_mount(),
        reason="may not mount here: kvlb is given a hosts file of its own by `unshare --mount`",
    ),
]


async def until(http: httpx.AsyncClient, is_so: Any) -> dict[str, Any]:
    """Wait until `is_so` of the one instance as `/status` shows it."""
    async with asyncio.timeout(30):
        while True:
            (shown,) = (await http.get("/status")).json()["instances"]
            if is_so(shown, shown["ranks"][0]["index"] or {}):
                return dict(shown)
            await asyncio.sleep(0.05)


async def prompt_tokens(engine: Any) -> float:
    """What an engine has computed or found."""
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"{engine.url}/metrics")).text
    return sum(
        float(x) for x in re.findall(r"^vllm:prompt_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
    )


async def test_requests_and_events_follow_the_name(start_command: Any, tmp_path: Path) -> None:
    """Though the old engine still answers on every open connection; its rows are dropped."""
    settings = EngineSettings(inter_token_ms=1.0)
    hosts, file = tmp_path / "hosts", tmp_path / "kvlb.yaml"
    async with simulated_fleet(parse_fleet("1"), settings) as first:
        (old,) = first.engines
        assert old.replay_endpoint
        port = int(old.url.rpartition(":")[2])
        async with simulated_fleet(
            parse_fleet("1"), settings, host="127.0.0.2", base_port=port
        ) as second:
            (new,) = second.engines
            entry = {
                "url": f"http://{NAME}:{port}",
                "events": old.events_endpoint.replace("127.0.0.1", NAME),
                "replay": old.replay_endpoint.replace("127.0.0.1", NAME),
            }
            config = {"port": 0, "resolve_interval_s": 0.2, "instances": [entry]}
            file.write_text(yaml.safe_dump({**config, "probes": {"interval_s": 0.1}}))
            hosts.write_text(f"127.0.0.1 localhost {NAME}\n")
            script = f'mount --bind {hosts} /etc/hosts && exec "$0" -m kvlb up --config {file}'
            program = ("unshare", "-m", "sh", "-c", script, sys.executable)
            async with start_command(program=program) as command:
                url = re.findall(r"http://\S+", await command.printed("listens on"))[0]
                async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as http:
                    await until(http, lambda each, rank: each["available"] and rank)
                    await http.post("/v1/completions", json=PROMPT)
                    before = await until(http, lambda _, rank: rank.get("held_blocks"))
                    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.2 {NAME}\n")
                    await until(
                        http,
                        lambda each, rank: (
                            each["available"]
                            and rank.get("trust") == "exact"
                            and rank["held_blocks"] == 0
                        ),
                    )
                    served = await http.post("/v1/completions", json=PROMPT)
                    after = await until(http, lambda _, rank: rank.get("held_blocks"))
                    by_new = await prompt_tokens(new)
                    by_old = await prompt_tokens(old)

    assert served.status_code == 200
    assert (by_old, by_new) == (128, 128)
    old_rank, new_rank = (each["ranks"][0]["index"] for each in (before, after))
    assert new_rank["epoch"] > old_rank["epoch"]
