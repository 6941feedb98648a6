"""`kvlb up` and `kvlb simulate` as processes: they start, answer, and end when asked to."""

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

StartCommand = Callable[..., AbstractAsyncContextManager[Any]]
FreePorts = Callable[[int], list[int]]
PYTHON = (sys.executable,)
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}]}


async def until_ready(url: str) -> None:
    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as http:
        while True:
            try:
                answer = await http.get(f"{url}/ready")
                if answer.status_code == 200 and not answer.json()["reasons"]:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


@pytest.fixture
async def simulated(start_command: StartCommand) -> AsyncIterator[tuple[Any, str]]:
    """`kvlb up --simulate 2p2d` on a free port: the process and the balancer's address."""
    async with start_command("up", "--simulate", "2p2d", "--port", "0") as command:
        line = await command.printed("listens on")
        url = re.findall(r"http://\S+", line)[0]
        await until_ready(url)
        yield command, url


async def test_up_with_a_simulated_fleet_answers_the_openai_client(
    simulated: tuple[Any, str],
) -> None:
    """Chat and completions, streamed and whole; the model list names the fleet's model."""
    _, url = simulated
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        models = [model.id async for model in client.models.list()]
        chat = await client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
        stream = await client.chat.completions.create(
            model="sim",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=8,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        completion = await client.completions.create(model="sim", prompt="Once", max_tokens=8)

    assert models == ["sim"]
    assert chat.choices[0].message.content
    assert "".join(pieces) == chat.choices[0].message.content
    assert completion.choices[0].text


async def test_banner_shows_addresses_and_a_line_to_try(simulated: tuple[Any, str]) -> None:
    """Where it listens, which engines, what to type next."""
    command, url = simulated
    await command.printed("kvlb explain")

    for text in ("p0", "p1", "d0", "d1", f"curl -i {url}/v1/chat/completions", "/status"):
        assert text in command.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
async def test_up_finishes_what_runs_and_ends(
    simulated: tuple[Any, str], number: signal.Signals
) -> None:
    """A stream that has begun is complete; the exit code says that nothing went wrong."""
    command, url = simulated
    body = {**CHAT, "max_tokens": 60, "stream": True}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        command.process.send_signal(number)
        rest = [line async for line in lines if line]

    assert rest[-1] == "data: [DONE]"
    assert await command.process.wait() == 0
    assert "Traceback" not in command.output


async def test_second_interrupt_does_not_wait(simulated: tuple[Any, str]) -> None:
    """Who presses Ctrl-C again wants it to end now, whatever still streams."""
    command, url = simulated
    body = {**CHAT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
    ):
        await anext(answer.aiter_lines())
        command.process.send_signal(signal.SIGINT)
        await command.printed("draining_started")

        assert await command.stop(signal.SIGINT, deadline_s=5) == 128 + signal.SIGINT
    assert "Traceback" not in command.output


async def test_up_with_named_engines_balances_over_them(
    start_command: StartCommand, free_ports: FreePorts
) -> None:
    """The line that `kvlb simulate` prints works as it is."""
    (port,) = free_ports(1)
    async with start_command("simulate", "1p1d") as engines:
        line = await engines.printed("kvlb up --instance")
        arguments = line.split()[1:]
        async with start_command(*arguments, "--port", str(port)) as command:
            await command.printed("listens on")
            await until_ready(f"http://127.0.0.1:{port}")
            async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
                answer = await http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT)
            assert await command.stop() == 0
        assert await engines.stop() == 0

    assert answer.status_code == 200
    assert answer.headers["x-kvlb-instance"] == "d0"


async def test_up_starts_before_its_engines(start_command: StartCommand) -> None:
    """An engine that is down is no reason to end: it is awaited, and shown as missing."""
    async with start_command("up", "--instance", "http://127.0.0.1:9", "--port", "0") as command:
        url = re.findall(r"http://\S+", await command.printed("listens on"))[0]
        async with httpx.AsyncClient(trust_env=False) as http:
            ready = await http.get(f"{url}/ready")

        assert ready.status_code == 503
        assert await command.stop() == 0


async def test_port_in_use_is_one_line_and_exit_2(start_command: StartCommand) -> None:
    """Which port, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with start_command("up", "--simulate", "1", "--port", str(port)) as command:
            line = await command.printed("kvlb:")
            code = await command.process.wait()

    assert code == 2
    assert f"port {port}" in line
    assert "Traceback" not in command.output


async def test_simulated_port_in_use_is_one_line_and_exit_2(start_command: StartCommand) -> None:
    """The range that was wanted, and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with start_command("simulate", "1", "--base-port", str(port)) as command:
            line = await command.printed("kvlb:")
            code = await command.process.wait()

    assert code == 2
    assert "--base-port" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(("up",), "--simulate 2p2d", id="no-engines"),
        pytest.param(("up", "--simulate", "2x"), "2p2d", id="no-fleet"),
        pytest.param(("up", "--instance", "gpu:1"), "http://host:port", id="instance"),
        pytest.param(("up", "--config", "absent.yaml"), "absent.yaml", id="file"),
        pytest.param(("up", "--policy", "best"), "round_robin", id="policy"),
        pytest.param(("simulate", "0"), "engines", id="empty-fleet"),
        pytest.param(("events", "gpu:5557"), "tcp://host:port", id="endpoint"),
        pytest.param(("explain", "{"), "JSON", id="request"),
        pytest.param(("audit", "absent", "absent"), "absent", id="capture"),
    ],
)
async def test_mistake_is_told_without_a_traceback(
    start_command: StartCommand, arguments: tuple[str, ...], says: str
) -> None:
    """One message that says what to change; exit code 2."""
    async with start_command(*arguments) as command:
        code = await command.process.wait()

    assert code == 2
    assert says in command.output
    assert "Traceback" not in command.output


async def test_demo_without_the_extra_names_it(start_command: StartCommand) -> None:
    """`openai` is optional; its absence is a sentence."""
    program = "import sys; sys.modules['openai'] = None; from kvlb.__main__ import main; main()"
    async with start_command("-c", program, "demo", program=PYTHON) as command:
        code = await command.process.wait()

    assert code == 2
    assert "pip install 'kvlb[demo]'" in command.output


async def test_events_that_nobody_reads_any_more_end_quietly(start_command: StartCommand) -> None:
    """`kvlb events ... | head -1` is no error."""
    async with start_command("simulate", "1") as engines:
        line = await engines.printed("kvlb events http")
        program = ("/bin/sh", "-c", f"{PYTHON[0]} -m {line.strip()} --from 0 | head -1")
        async with start_command(program=program) as command:
            code = await command.process.wait()

    assert code == 0
    assert "Traceback" not in command.output


async def test_events_show_a_gap_and_its_repair(start_command: StartCommand) -> None:
    """Every second batch is lost on the wire; each is replayed in its place."""
    async with start_command("simulate", "1", "--drop-every", "2") as engines:
        engine = (await engines.printed("kvlb events http")).split()[-1]
        async with start_command("events", engine, "--limit", "6") as command:
            await command.printed("trust exact")
            async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
                for number in range(8):
                    body = {"model": "sim", "prompt": [number] * 32, "max_tokens": 1}
                    await http.post(f"{engine}/v1/completions", json=body)
            code = await command.process.wait()

    assert code == 0
    for word in ("stored", "gap 1..1", "replay 1..", "repaired 1..1", "32 tokens", "replayed"):
        assert word in command.output


@pytest.mark.parametrize(
    "command",
    [
        ("up", "--port", "0"),
        ("balancer", "--port", "0", "--redis", "redis://127.0.0.1:9"),
        ("indexer", "--status-port", "0", "--redis", "redis://127.0.0.1:9"),
    ],
    ids=lambda command: command[0],
)
async def test_hangup_without_a_file_changes_nothing(
    start_command: StartCommand, command: tuple[str, ...]
) -> None:
    """There is nothing to reload, and that is no reason to end."""
    async with start_command(*command, "--instance", "http://127.0.0.1:9") as running:
        url = re.findall(r"http://\S+", await running.printed("listens on"))[0]
        running.process.send_signal(signal.SIGHUP)
        line = await running.printed("nothing_to_reload")
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.get(f"{url}/health")

        assert "--config" in line
        assert answer.status_code == 200
        assert await running.stop() == 0


async def test_hangup_with_a_file_reloads_it(start_command: StartCommand, tmp_path: Path) -> None:
    """The watch over the file takes over from what guards the start."""
    file = tmp_path / "kvlb.yaml"
    file.write_text("instances: [{url: 'http://127.0.0.1:9'}]")
    async with start_command("up", "--port", "0", "--config", str(file)) as running:
        await running.printed("listens on")
        running.process.send_signal(signal.SIGHUP)

        assert "sighup" in await running.printed("reloaded")
        assert await running.stop() == 0
