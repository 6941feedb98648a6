"""docs/migrating.md: every kvlb line in it serves the engines of the proxy that it replaces."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
import zmq

from simulator.core import tokenizer
from simulator.core.chat_template import render_chat
from simulator.core.generation import seed_answer
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TEXT = (Path(__file__).parent.parent.parent / "docs/migrating.md").read_text()
SHELL = re.compile(r"^```sh ?([a-z0-9_ ]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"--instance (\S+)")

StartCommand = Callable[..., AbstractAsyncContextManager[Any]]

BASE = EngineSettings(
    inter_token_ms=1.0, prefill_tokens_per_s=1e5, transfer_tokens_per_s=1e6, num_blocks=1024
)
KEY = "the-engines-key"
ADMIN_KEY = "ADMIN_API_KEY=choose-one"
SETUPS: dict[str, dict[str, Any]] = {
    "none": {},
    "nixl": {"kv_connector": "nixl"},
    "nixl keyed": {"kv_connector": "nixl", "api_key": KEY},
    "nixl_both_ways": {"kv_connector": "nixl", "bidirectional": True},
    "nixl_push": {"kv_connector": "nixl_push"},
    "mooncake": {"kv_connector": "mooncake"},
    "moriio_registered": {"kv_connector": "moriio"},
    "p2p_nccl": {"kv_connector": "p2p_nccl", "version": "0.23.0", "randomizes_ids": False},
    "p2p_nccl_registered": {
        "kv_connector": "p2p_nccl",
        "version": "0.23.0",
        "randomizes_ids": False,
    },
    "lmcache": {"kv_connector": "lmcache"},
    "offloading": {"kv_connector": "offloading"},
    "example": {"kv_connector": "example"},
    "ec_mooncake": {"ec_connector": "mooncake"},
}
"""What a line's engines are started with, by the words behind `sh serve`."""

FACTS: dict[str, Callable[[RunningEngine], object]] = {
    "engine_id": lambda each: each.engine.engine_id,
    "kv_host": lambda _: "127.0.0.1",
    "side_channel_port": lambda each: each.side_port,
    "bootstrap_port": lambda each: each.bootstrap_port,
    "zmq_address": lambda each: each.zmq_address,
    "p2p_host": lambda _: "127.0.0.1",
    "p2p_port": lambda each: each.side_port,
    "ec_zmq_addrs": lambda each: "+".join(each.ec_zmq_addrs),
}
"""Settings under `transfer` that are other ones here than on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """One kvlb line of the page, and the proxy whose section it is in."""

    proxy: str
    setup: str
    line: str


def read_lines() -> list[Documented]:
    """Every line of a block that isn't the old way."""
    found = []
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        proxy = section.partition("\n")[0]
        for info, block in SHELL.findall(section):
            if info != "old":
                setup = info.removeprefix("serve ")
                joined = block.replace("\\\n", " ").splitlines()
                found += [Documented(proxy=proxy, setup=setup, line=line) for line in joined]
    return found


LINES = read_lines()
FILES = dict(YAML.findall(TEXT))
PROXIES = {
    "disagg_proxy_demo.py": "-m -p -d --model --prefill --decode /instances/add /status",
    "toy_proxy_server.py": "--prefiller-hosts --prefiller-ports --decoder-hosts --decoder-ports "
    "/healthcheck",
    "disagg_proxy_pushconnector_demo.py": "--model --prefill --decode --prefill-engine-id "
    "--prefill-kv-host --prefill-side-channel-port --prefill-tp-size --prefill-pp-size /status",
    "disagg_proxy_multiturn.py": "--prefiller-host --prefiller-hosts --prefiller-port "
    "--prefiller-ports --decoder-host --decoder-hosts --decoder-port --decoder-ports "
    "conversation_id /health",
    "mooncake_connector_proxy.py": "--prefill --decode BOOTSTRAP_PORT /query",
    "moriio_toy_proxy_server.py": "--service-discovery-port PROXY_LISTEN_BACKLOG",
    "disagg_proxy_p2p_nccl_xpyd.py": "10001 30001",
    "disagg_prefill_proxy_server.py": "--timeout --max-concurrent --queue-size --rate-limit "
    "--prefill-url --decode-url --kv-host --prefill-kv-port --decode-kv-port X-KV-Target "
    "rate_limiter.py request_queue.py",
    "disagg_proxy_server.py": "--prefiller-host --prefiller-port --decoder-host --decoder-port "
    "--num-prefillers --num-decoders --decoder-init-port --decoder-alloc-port --proxy-host "
    "--proxy-port CLIENT_BOUND CLIENT_BOUND_KEY",
    "disagg_epd_proxy.py": "--encode-servers-urls --prefill-servers-urls --decode-servers-urls "
    "--decode-retries --ec-consumer-zmq-addrs --ec-consumer-dp-size --no-rewrite --log-requests "
    "--dynamic-registration --probe-interval --probe-timeout --fail-threshold --evicted-ttl "
    "ENCODER_MAX_BATCH_SIZE VLLM_HTTP_TIMEOUT_KEEP_ALIVE /instances /health /v1/models",
}
"""Each proxy's own flags, variables and paths."""
SHARED = (
    "--host --port OPENAI_API_KEY ADMIN_API_KEY /v1/completions /v1/chat/completions "
    "/health /healthcheck /status /start_profile /stop_profile"
)


def rows_of(heading: str) -> str:
    """The table of a section."""
    section = TEXT.split(f"\n## {heading}\n")[1].partition("\n## ")[0]
    return "\n".join(line for line in section.splitlines() if line.startswith("| "))


@pytest.mark.parametrize(
    ("heading", "words"),
    [*PROXIES.items(), ("What is the same for all", SHARED)],
    ids=[*PROXIES, "shared"],
)
def test_every_flag_variable_and_path_has_its_row(heading: str, words: str) -> None:
    """What isn't supported keeps a row that says so."""
    rows = rows_of(heading)

    assert [word for word in words.split() if not re.search(rf"{word}(?![\w-])", rows)] == []


@pytest.mark.parametrize("proxy", PROXIES)
def test_every_proxy_has_a_line_that_replaces_it(proxy: str) -> None:
    """The old one beside it."""
    section = TEXT.split(f"\n## {proxy}\n")[1].partition("\n## ")[0]

    assert "```sh old\n" in section
    assert any(each.proxy == proxy for each in LINES)


def test_no_line_is_left_out() -> None:
    """A line or a file that no test runs may be wrong."""
    assert [each for each in LINES if each.setup not in SETUPS] == []
    assert [each.line for each in LINES if "kvlb up " not in each.line] == []
    assert [name for name in FILES if not any(name in each.line for each in LINES)] == []


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """kvlb as the page starts it, before simulated engines."""

    fleet: RunningFleet
    http: httpx.AsyncClient

    def legs_of(self, marker: str) -> list[str]:
        """Names of the engines that a request went to, in the order of their roles."""
        return sorted(
            each.name
            for each in self.fleet.engines
            for received in each.engine.received
            if received.path in {"/v1/completions", "/v1/chat/completions"}
            and marker.encode() in received.body
        )

    def roles_of(self, marker: str) -> list[str]:
        roles = {each.name: each.role for each in self.fleet.engines}
        return [roles[name] for name in self.legs_of(marker)]


@pytest.mark.parametrize("documented", LINES, ids=[f"{n}-{x.proxy}" for n, x in enumerate(LINES)])
async def test_line_serves_what_the_proxy_served(
    documented: Documented,
    start_command: StartCommand,
    free_ports: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    """Completion and chat, whole and streamed: the right text, by the legs that the headers name."""
    async with on_stage(documented, start_command, free_ports(2), tmp_path) as stage:
        is_split = any(each.role == "prefill" for each in stage.fleet.engines)
        for number, (path, stream) in enumerate(
            (path, stream)
            for path in ("/v1/completions", "/v1/chat/completions")
            for stream in (False, True)
        ):
            marker = f"request-{number}"
            answer = await stage.http.post(path, json=body(path, marker, stream=stream))

            assert answer.status_code == 200, answer.text
            assert told(answer, stream=stream) == expected_text(path, marker)
            roles = stage.roles_of(marker)
            if answer.headers["x-kvlb-prefill"] in {"none", "skipped"}:
                assert roles == ["decode" if is_split else "mixed"]
            else:
                assert sorted(roles) == ["decode", "prefill"]
            if is_split and number == 0:
                assert len(roles) == 2, answer.headers

        if any(each.role == "encode" for each in stage.fleet.engines):
            await check_encoders(stage)
        await check_pages(stage)
        if ADMIN_KEY in documented.line:
            await check_membership(stage)


async def test_limits_of_the_benchmark_proxy_limit(
    start_command: StartCommand, free_ports: Callable[[int], list[int]], tmp_path: Path
) -> None:
    """Its `--rate-limit` and `--queue-size`: what comes faster waits and is served, none too many."""
    documented = next(each for each in LINES if "limits.yaml" in each.line)
    limits = yaml.safe_load(FILES["limits.yaml"])["admission"]
    sent = 4 * limits["requests_per_s"]  # long after a line would stand
    async with on_stage(documented, start_command, free_ports(2), tmp_path) as stage:
        async with asyncio.TaskGroup() as group:
            asked = [body("/v1/completions", str(number), stream=False) for number in range(sent)]
            answers = [
                group.create_task(stage.http.post("/v1/completions", json=each)) for each in asked
            ]
        metrics = (await stage.http.get("/metrics")).text

    assert limits == {"requests_per_s": 40, "max_waiting": 500}
    assert {each.result().status_code for each in answers} == {200}
    waited = re.search(r'wait_seconds_count\{outcome="admitted"\} (\d+)', metrics)
    assert waited is not None
    assert int(waited[1]) > 0


async def check_encoders(stage: Stage) -> None:
    """A picture is encoded by an encode engine, and nobody else runs an encoder."""
    part = {"type": "image_url", "image_url": {"url": "data:,cat"}}
    chat = body("/v1/chat/completions", "picture", stream=False)
    chat["messages"][0]["content"] = [{"type": "text", "text": "what is this?"}, part]
    answer = await stage.http.post("/v1/chat/completions", json=chat)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvlb-encode"] in {each.name for each in stage.fleet.engines}
    runs = {each.role: each.engine.encoder.counts.runs for each in stage.fleet.engines}
    assert runs.pop("encode") == 1
    assert set(runs.values()) == {0}


async def check_membership(stage: Stage) -> None:
    """An engine leaves and comes by the example's own words, while everything runs."""
    headers = {"x-api-key": ADMIN_KEY.partition("=")[2]}
    before = (await stage.http.get("/status")).json()
    named = {"type": "decode", "instance": before["decode_nodes"][-1]}
    removed = await stage.http.post("/instances/remove", json=named, headers=headers)
    without = (await stage.http.get("/status")).json()
    added = await stage.http.post("/instances/add", json=named, headers=headers)
    after = (await stage.http.get("/status")).json()

    assert removed.is_success, removed.text
    assert added.status_code == 200, added.text
    assert without["decode_node_count"] == before["decode_node_count"] - 1
    assert sorted(after["decode_nodes"]) == sorted(before["decode_nodes"])


async def check_pages(stage: Stage) -> None:
    """The paths that the proxies had beside those of OpenAI."""
    prefill = sum(each.role == "prefill" for each in stage.fleet.engines)
    counted = (await stage.http.get("/healthcheck")).json()
    status = (await stage.http.get("/status")).json()
    models = (await stage.http.get("/v1/models")).json()
    health = await stage.http.get("/health")

    assert counted["prefill_instances"] == status["prefill_node_count"] == prefill
    encode = sum(each.role == "encode" for each in stage.fleet.engines)
    assert status["encode_node_count"] == encode
    assert len(status["decode_nodes"]) == len(stage.fleet.engines) - prefill - encode
    assert [each["id"] for each in models["data"]] == ["sim"]
    assert health.status_code == 200


def body(path: str, marker: str, *, stream: bool) -> dict[str, Any]:
    """A request of about 2,000 tokens that begins as no other does."""
    told = f"{marker}: " + "say what there is to be said of it " * 60
    shape = (
        {"messages": [{"role": "user", "content": told}], "conversation_id": marker}
        if "chat" in path
        else {"prompt": told}
    )
    return {"model": "sim", "max_tokens": 12, "stream": stream, **shape}


def expected_text(path: str, marker: str) -> str:
    """What any engine says that has computed or read the prompt right."""
    asked = body(path, marker, stream=False)
    if "chat" in path:
        tokens = tokenizer.encode(render_chat(asked["messages"]), add_special_tokens=False)
    else:
        tokens = tokenizer.encode(asked["prompt"], add_special_tokens=True)
    sampler = seed_answer(tokens, 0)
    return tokenizer.decode([sampler.token_at(index, may_end=True) for index in range(12)])


def told(answer: httpx.Response, *, stream: bool) -> str:
    """The text of an answer."""
    if not stream:
        assert answer.headers["content-type"].startswith("application/json")
        return text_of(answer.json()["choices"][0])
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return "".join(map(text_of, choices))


def text_of(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta") or choice
    return said.get("content") or said.get("text") or ""


@asynccontextmanager
async def on_stage(
    documented: Documented, start_command: StartCommand, ports: list[int], folder: Path
) -> AsyncIterator[Stage]:
    """Start engines, and the line with their addresses in the place of the documented ones."""
    line, (port, registration) = documented.line, ports
    files = {name: yaml.safe_load(text) for name, text in FILES.items() if name in line}
    settings = msgspec.structs.replace(BASE, **SETUPS[documented.setup])
    spec = FleetSpec.parse("".join(f"1{each}" for each in roles_named(line, files)))
    async with running_fleet(spec, engine=settings) as fleet, asyncio.TaskGroup() as group:
        engines = list(fleet.engines)
        line = OPTION.sub(lambda found: f"--instance {put_into_option(found[1], engines)}", line)
        for name, values in files.items():
            put_into_file(values, engines, registration)
            (folder / name).write_text(yaml.safe_dump(values))
        line = re.sub(r"--port \d+", "", line).replace("--host 0.0.0.0", "")
        beats = group.create_task(announce(fleet, registration))
        async with (
            start_command(
                "-c",
                f"exec env {line} --host 127.0.0.1 --port {port}",
                program=("/bin/sh",),
                cwd=folder,
                env={
                    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
                    "OPENAI_API_KEY": KEY,
                },
            ) as command,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30
            ) as http,
        ):
            await command.printed("listens on")
            await until_all_are_healthy(http, len(fleet.engines))
            yield Stage(fleet=fleet, http=http)
            beats.cancel()
            await command.stop()


def roles_named(line: str, files: dict[str, Any]) -> list[str]:
    """First letters of the instances' roles; two of each where engines register themselves."""
    options = [re.search(r"role=([a-z])", option) for option in OPTION.findall(line)]
    named = [found[1] if found else "m" for found in options]
    for values in files.values():
        named += [entry["role"][0] for entry in values.get("instances", [])]
    return named or ["p", "p", "d", "d"]


def put_into_option(option: str, engines: list[RunningEngine]) -> str:
    """One `--instance` value with the address of the next engine of its role."""
    found = re.search(r"role=([a-z]+)", option)
    engine = take(engines, found[1] if found else "mixed")
    _, *parts = option.split(",")
    for index, part in enumerate(parts):
        name, _, value = part.partition("=")
        fact = FACTS.get(name.removeprefix("transfer."))
        parts[index] = f"{name}={fact(engine) if fact else value}"
    return ",".join([engine.url, *parts])


def put_into_file(values: dict[str, Any], engines: list[RunningEngine], registration: int) -> None:
    for entry in values.get("instances", []):
        entry["url"] = take(engines, entry["role"]).url
    if "registration" in values:
        here = {"port": registration, "bind": "127.0.0.1", "networks": ["127.0.0.0/8"]}
        values["registration"] |= here


def take(engines: list[RunningEngine], role: str) -> RunningEngine:
    engine = next(each for each in engines if each.role == role)
    engines.remove(engine)
    return engine


async def announce(fleet: RunningFleet, port: int) -> None:
    """A beat of every engine, more often than its first worker sends one, until cancelled."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    while True:
        for each in fleet.engines:
            with context.socket(zmq.DEALER) as beat:
                beat.setsockopt(zmq.LINGER, 500)
                beat.connect(f"tcp://127.0.0.1:{port}")
                beat.send(msgspec.msgpack.encode(registration_of(each)))
        await asyncio.sleep(0.5)


def registration_of(engine: RunningEngine) -> dict[str, Any]:
    message: dict[str, Any] = {
        "type": "P" if engine.role == "prefill" else "D",
        "http_address": engine.url.removeprefix("http://"),
        "zmq_address": engine.zmq_address,
    }
    if engine.settings.kv_connector == "moriio":
        message |= {"dp_size": 1, "tp_size": 1, "transfer_mode": "WRITE"}
    return message


async def until_all_are_healthy(http: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(30):
        while True:
            status = (await http.get("/status")).json()
            ready = [each for each in status["instances"] if each["available"] and each["models"]]
            if len(ready) == count:
                return
            await asyncio.sleep(0.05)
