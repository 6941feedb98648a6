"""`kvlb doctor` on what is no engine, says little, or answers with errors."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace

import msgspec
import pytest

from kvlb.doctor.core.examination import examine
from kvlb.doctor.core.facts import FleetFacts
from kvlb.doctor.core.findings import Finding
from kvlb.doctor.gather import Patience, gather_facts
from kvlb.running import running_kvlb
from kvlb.settings import KvlbSettings, Overrides, load_settings
from kvlb.simulated import instance_option
from simulator.core.settings import EngineSettings
from simulator.service import RunningEngine

Settings = Callable[..., KvlbSettings]
Engines = Callable[..., AbstractAsyncContextManager[list[RunningEngine]]]
Diagnose = Callable[..., Awaitable[tuple[FleetFacts, list[Finding]]]]

WELL = EngineSettings(inter_token_ms=1.0)
QUICK = Patience(connect_s=1.0, event_s=1.0, replay_s=0.5)

Pages = Mapping[str, tuple[int, object]]


@asynccontextmanager
async def canned(pages: Pages) -> AsyncIterator[str]:
    """A server that answers paths with what it was given, and hangs where that is None."""
    connections: list[tuple[asyncio.StreamWriter, asyncio.Task[None]]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        connections.append((writer, task))
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(length[1]) if length else 0)
                status, body = pages.get(head.split()[1].decode(), (404, {}))
                if body is None:
                    continue
                content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode()
                    + content
                )
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer, task in connections:
            writer.close()
            task.cancel()
        if connections:
            await asyncio.wait([task for _, task in connections])


MODELS = (200, {"data": [{"id": "sim"}]})


@pytest.mark.parametrize(
    ("pages", "name", "seen"),
    [
        ({"/health": (200, None)}, "unreachable", "no answer in time"),
        ({"/v1/models": (200, None)}, "unreachable", "no answer in time"),
        ({"/v1/models": (500, {})}, "not_vllm", "answered 500"),
        ({"/v1/models": (200, "hello")}, "not_vllm", "list `data`"),
        ({"/v1/models": (200, {"data": []})}, "not_vllm", "no base model"),
    ],
)
async def test_what_is_no_engine_is_named(
    pages: Pages, name: str, seen: str, told: Settings
) -> None:
    """It hangs, it fails, or it is another program."""
    async with canned({"/health": (200, ""), **pages}) as url:
        facts = await gather_facts(told(url), nonce="test", patience=replace(QUICK, http_s=0.3))
    (finding,) = examine(facts)

    assert finding.name == name
    assert seen in finding.seen


async def test_a_balancer_in_an_engines_place_is_named(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """Its model list is as an engine's, and it would get nothing."""
    async with engines(("1", WELL)) as running:
        settings = load_settings(None, Overrides(instances=(running[0].url,), port=0), {})
        async with running_kvlb(settings) as kvlb:
            _, (finding,) = await diagnose(told(kvlb.url))

    assert finding.name == "not_vllm"
    assert "kvlb balancer" in finding.seen


async def test_engine_that_says_little_is_judged_by_what_it_says(
    told: Settings, diagnose: Diagnose
) -> None:
    """A build without a version, sources that can't be read, no metrics, no tokens."""
    sources = {
        "0": "x",
        "1": {"endpoint": "nonsense"},
        "2": {"endpoint": "tcp://*:5557", "enable_kv_cache_events": False},
        "3": {"endpoint": "tcp://*:5557", "publisher": "null"},
    }
    pages: dict[str, tuple[int, object]] = {
        "/health": (200, ""),
        "/v1/models": MODELS,
        "/version": (200, {"version": "0.1.dev1+g1234567"}),
        "/kv_event_sources": (200, sources),
        "/tokenize": (200, {"tokens": "x"}),
    }
    async with canned(pages) as url:
        facts, (finding,) = await diagnose(told(url))

    assert (facts.instances[0].version, facts.instances[0].declared) == (None, {})
    assert finding.name == "events_off"


async def test_request_that_fails_is_a_finding(told: Settings) -> None:
    """The engine lists its model and answers nothing."""
    pages: dict[str, tuple[int, object]] = {
        "/health": (200, ""),
        "/v1/models": MODELS,
        "/kv_event_sources": (200, {}),
        "/tokenize": (200, {"tokens": list(range(300))}),
    }
    broken = {**pages, "/v1/completions": (500, {})}
    silent = {**pages, "/v1/completions": (200, None)}
    said = []
    for each in (broken, silent):
        async with canned(each) as url:
            facts = await gather_facts(told(url), nonce="test", patience=replace(QUICK, http_s=0.3))
        said += [finding.seen for finding in examine(facts) if finding.name == "request_failed"]

    assert said == [
        "a completion of one token: status 500",
        "a completion of one token: no answer in time",
    ]


@pytest.mark.parametrize(
    ("completions", "seen"),
    [
        ((500, {}), "status 500"),
        ((200, "no json"), "status 200"),
        ((200, None), "no answer in time"),
        ((200, {"kv_transfer_params": None}), "names no blocks"),
    ],
)
async def test_prefill_leg_that_fails_says_how(
    completions: tuple[int, object], seen: str, told: Settings
) -> None:
    """Whatever comes back in place of an address."""
    pages: dict[str, tuple[int, object]] = {
        "/health": (200, ""),
        "/v1/models": MODELS,
        "/kv_event_sources": (200, {}),
        "/tokenize": (200, {"tokens": list(range(300))}),
        "/v1/completions": completions,
    }
    async with canned(pages) as url:
        facts = await gather_facts(
            told(f"{url},role=prefill"), nonce="test", patience=replace(QUICK, http_s=0.3)
        )
    (finding,) = (each for each in examine(facts) if each.name == "no_transfer")

    assert seen in finding.seen


async def test_address_that_swallows_connections_is_out_of_reach(
    told: Settings, engines: Engines, diagnose: Diagnose
) -> None:
    """Nobody says no, nobody answers."""
    async with engines(
        ("1p", msgspec.structs.replace(WELL, side_channel_host="192.0.2.1"))
    ) as running:
        _, findings = await diagnose(told(instance_option(running[0])))

    assert {each.name for each in findings} == {"nixl_unreachable", "role_alone"}
