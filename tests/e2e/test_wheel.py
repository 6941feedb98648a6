"""The wheel: built from this tree, installed elsewhere, and used without the clone."""

import asyncio
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOT = Path(__file__).parent.parent.parent
PACKAGES = {"balancer", "indexer", "kvlb", "simulator"}

StartCommand = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel once."""
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=100,
    )
    (built,) = target.glob("kvlb-*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install it into a directory of its own; what it depends on is the test environment's."""
    target = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target), str(wheel)],
        check=True,
        capture_output=True,
        timeout=100,
    )
    return target


def test_wheel_holds_the_packages_and_no_tests(wheel: Path) -> None:
    """Nothing but what runs: no tests, no captures, no benchmarks but the command's; types are marked."""
    names = zipfile.ZipFile(wheel).namelist()
    traces = {name for name in names if name.startswith("kvlb/bench/data/")}

    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == PACKAGES
    assert "kvlb/bench/data/README.md" in traces  # whose they are
    data = [name for name in names if "test" in name or name.endswith((".gz", ".jsonl"))]
    assert set(data) == {name for name in traces if name.endswith(".gz")}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_configuration_is_explained_without_the_clone(site: Path, tmp_path: Path) -> None:
    """Template and source are in the wheel: an operator has no other."""
    printed = subprocess.run(
        [sys.executable, "-m", "kvlb", "config", "reference"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONIOENCODING": "utf-8"},
        check=True,
        capture_output=True,
        timeout=60,
    ).stdout.decode()

    assert printed == (ROOT / "docs" / "configuration.md").read_text("utf-8")


def test_installed_command_runs_from_the_wheel(site: Path, tmp_path: Path) -> None:
    """Not from the clone that happens to be importable, too."""
    program = "import json, balancer, indexer, kvlb, simulator; print(json.dumps([m.__file__ for m in (balancer, indexer, kvlb, simulator)]))"
    printed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert all(file.startswith(str(site)) for file in json.loads(printed))


async def test_installed_command_answers_the_openai_client(
    site: Path, tmp_path: Path, start_command: StartCommand
) -> None:
    """`kvlb up --simulate 2p2d`, chat and completions, streamed and whole."""
    program = (str(site / "bin" / "kvlb"),)
    env = {"PYTHONPATH": str(site)}
    arguments = ("up", "--simulate", "2p2d", "--port", "0")
    async with start_command(*arguments, program=program, cwd=tmp_path, env=env) as command:
        url = re.findall(r"http://\S+", await command.printed("listens on"))[0]
        await until_ready(url)
        texts = await ask_everything(f"{url}/v1")
        code = await command.stop()

    assert code == 0
    assert all(texts.values()), texts
    assert texts["chat"] == texts["chat stream"]
    assert texts["completion"] == texts["completion stream"]


async def ask_everything(base_url: str) -> dict[str, str]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hello " * 100}]
        chat = await client.chat.completions.create(model="sim", messages=messages, max_tokens=8)
        chats = await client.chat.completions.create(
            model="sim", messages=messages, max_tokens=8, stream=True
        )
        chat_pieces = [part.choices[0].delta.content or "" async for part in chats if part.choices]
        completion = await client.completions.create(model="sim", prompt="Once", max_tokens=8)
        completions = await client.completions.create(
            model="sim", prompt="Once", max_tokens=8, stream=True
        )
        pieces = [part.choices[0].text async for part in completions if part.choices]
    return {
        "chat": chat.choices[0].message.content or "",
        "chat stream": "".join(chat_pieces),
        "completion": completion.choices[0].text,
        "completion stream": "".join(pieces),
    }


async def until_ready(url: str) -> None:
    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as http:
        while True:
            answer = await http.get(f"{url}/ready")
            if answer.status_code == 200 and not answer.json()["reasons"]:
                return
            await asyncio.sleep(0.05)
