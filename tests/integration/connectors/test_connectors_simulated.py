"""Every connector end to end: kvlb's own process over simulated engines that insist on its fields."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
import zmq

from balancer.core.settings.control import TokensSettings
from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from simulator.service import FleetSpec, RunningFleet, running_fleet

OnStage = Callable[..., AbstractAsyncContextManager[Any]]
Expected = Callable[[int], str]
Make = Callable[..., Any]

TOKENS = 600


async def test_two_legs_say_what_one_engine_says(
    case: Any, tmp_path: Path, on_stage: OnStage, expected_text: Expected
) -> None:
    """The prompt is computed once, on the prefill engine; nothing stays pinned, nothing is corrupt."""
    async with on_stage(case, "1p1d", tmp_path / "kvlb.yaml") as stage:
        answers = [await stage.complete(number, stream=number == 1) for number in range(3)]
        prefill, decode = await stage.state("p0"), await stage.state("d0")

    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    assert {answer.headers["x-kvlb-prefill"] for answer in answers} == {"p0"}
    assert answers[2].json()["choices"][0]["text"] == expected_text(2)
    assert answers[2].json()["usage"]["completion_tokens"] == 5
    assert prefill["computed_prompt_tokens"] == 3 * TOKENS
    if case.loads_all:
        assert decode["computed_prompt_tokens"] == 3
    else:
        assert decode["computed_prompt_tokens"] < TOKENS
    assert prefill["reservations_unreleased"] == 0
    assert (decode["corrupt_reads"], decode["failed_loads"]) == (0, 0)


async def test_shared_storage_is_not_used_where_it_would_mix_tenants_up(
    tmp_path: Path, cases: dict[str, Any], on_stage: OnStage
) -> None:
    """A salted prompt, and the length the engine dies of, are computed where they decode."""
    async with on_stage(cases["example"], "1p1d", tmp_path / "kvlb.yaml") as stage:
        answers = [
            await stage.complete(0),
            await stage.complete(0, cache_salt="tenant"),
            await stage.complete(1, tokens=320 + 1),
        ]
        health = await stage.direct.get(f"{stage.engine('d0').url}/health")

    assert [each.headers["x-kvlb-reason"] for each in answers] == [
        "forced_remote",
        "not_splittable",
        "not_splittable",
    ]
    assert health.status_code == 200


BOUND = [
    pytest.param("/v1/completions", {"prompt": "a" * 900, "n": 2}, id="not-splittable"),
    pytest.param(
        "/v1/messages", {"messages": [{"role": "user", "content": "a" * 900}]}, id="whole"
    ),
    pytest.param("/v1/chat/completions/batch", {"messages": []}, id="whole-and-not-scored"),
]


@pytest.mark.parametrize(("path", "body"), BOUND)
async def test_engine_that_waits_for_blocks_gets_no_request_without_a_prefill_leg(
    path: str, body: dict[str, Any], tmp_path: Path, cases: dict[str, Any], on_stage: OnStage
) -> None:
    """In READ mode it would answer from blocks that nobody filled."""
    async with on_stage(cases["moriio-read"], "1p1d", tmp_path / "kvlb.yaml") as stage:
        answer = await stage.http.post(path, json={"model": "sim", "max_tokens": 2, **body})
        decode = await stage.state("d0")

    assert answer.status_code == 503, answer.text
    assert "without a prefill leg" in answer.text
    assert decode["computed_prompt_tokens"] == 0


async def test_an_idle_engine_fetches_what_another_holds(
    tmp_path: Path,
    cases: dict[str, Any],
    make_case: Make,
    on_stage: OnStage,
    expected_text: Expected,
) -> None:
    """The index names the peer; what was there isn't computed again."""
    case = make_case(
        connector="offloading",
        transfer=lambda each: {**cases["offloading"].transfer(each), "pull_min_tokens": 256},
    )
    routing = {"policy": "round_robin", "lookup_timeout_s": 1.0}
    async with on_stage(case, "2", tmp_path / "kvlb.yaml", routing=routing) as stage:
        first = await stage.complete()
        holder = first.headers["x-kvlb-instance"]

        async def is_indexed() -> bool:
            status = (await stage.http.get("/status")).json()
            held = [
                rank["index"]["held_blocks"]
                for each in status["instances"]
                for rank in each["ranks"]
                if each["alias"] == holder and rank["index"]
            ]
            return bool(held and held[0] >= TOKENS // 16)

        await stage.until(is_indexed)
        second = await stage.complete()
        states = {name: await stage.state(name) for name in ("m0", "m1")}

    other = second.headers["x-kvlb-instance"]
    assert other != holder
    assert second.json()["choices"][0]["text"] == expected_text(0)
    assert states[other]["computed_prompt_tokens"] <= 16


async def test_the_next_turn_reads_what_decode_computed(
    tmp_path: Path, cases: dict[str, Any], on_stage: OnStage
) -> None:
    """The last turn's blocks come from the decode engine, though the prefill engine has died."""
    chat = {"model": "sim", "max_tokens": 200, "conversation_id": "c", "ignore_eos": True}
    first = [{"role": "user", "content": "tell me of it " * 60}]
    async with on_stage(
        cases["nixl-two-ways"], "2p1d", tmp_path / "kvlb.yaml", inter_token_ms=0.2
    ) as stage:
        await stage.complete()  # from now on the block size is known
        said = await stage.http.post("/v1/chat/completions", json={**chat, "messages": first})
        text = said.json()["choices"][0]["message"]["content"]
        turn = [
            *first,
            {"role": "assistant", "content": text},
            {"role": "user", "content": "and more of it " * 40},
        ]
        source = said.headers["x-kvlb-prefill"]
        await stage.fleet.stop(stage.engine(source))
        other = "p1" if source == "p0" else "p0"
        before = await stage.state(other)
        again = await stage.http.post("/v1/chat/completions", json={**chat, "messages": turn})
        after, decode = await stage.state(other), await stage.state("d0")

    assert (said.status_code, again.status_code) == (200, 200), again.text
    prompt = again.json()["usage"]["prompt_tokens"]
    answered = said.json()["usage"]["prompt_tokens"]
    computed = after["computed_prompt_tokens"] - before["computed_prompt_tokens"]
    assert computed <= prompt - answered
    assert (after["corrupt_reads"], decode["corrupt_reads"]) == (0, 0)
    assert decode["reservations_released"] == 1


@pytest.mark.parametrize("name", ["moriio-write", "moriio-read", "p2p-nccl"])
async def test_engines_that_register_themselves_need_no_description(
    name: str,
    tmp_path: Path,
    unused_port: int,
    cases: dict[str, Any],
    make_stage: Make,
    expected_text: Expected,
) -> None:
    """Address, sizes and mode are as they announce them."""
    case, path = cases[name], tmp_path / "kvlb.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "registration": {"port": unused_port},
                "pd": {"force": "remote"},
                "probes": {"interval_s": 0.05},
            }
        )
    )
    settings = msgspec.structs.replace(
        load_settings(path, Overrides(port=0), {}), tokens=TokensSettings(deadline_s=10.0)
    )
    async with (
        running_fleet(FleetSpec.parse("1p1d"), engine=case.settings()) as engines,
        running_kvlb(settings) as kvlb,
        httpx.AsyncClient(base_url=kvlb.url, trust_env=False, timeout=20) as http,
        httpx.AsyncClient(trust_env=False, timeout=20) as direct,
    ):
        stage = make_stage(fleet=engines, http=http, direct=direct)

        async def is_ready() -> bool:
            announce(engines, case, unused_port)
            status = (await http.get("/status")).json()
            return [each["healthy"] for each in status["instances"]] == [True, True]

        await stage.until(is_ready)
        answer = await stage.complete()
        decode = await stage.state("d0")

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text(0)
    assert decode["computed_prompt_tokens"] == 1


def announce(engines: RunningFleet, case: Any, port: int) -> None:
    """One beat of every engine, as its first worker sends it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    for each in engines.engines:
        message: dict[str, Any] = {
            "type": "P" if each.role == "prefill" else "D",
            "http_address": each.url.removeprefix("http://"),
            "zmq_address": each.zmq_address,
        }
        if case.connector == "moriio":
            mode = "READ" if each.settings.reads else "WRITE"
            message |= {"dp_size": 1, "tp_size": 1, "transfer_mode": mode}
        with context.socket(zmq.DEALER) as beat:
            beat.setsockopt(zmq.LINGER, 1000)
            if case.connector == "p2p_nccl":
                beat.setsockopt(zmq.IDENTITY, each.zmq_address.encode())
            beat.connect(f"tcp://127.0.0.1:{port}")
            beat.send(msgspec.msgpack.encode(message))


@pytest.fixture
def unused_port(reserved: Any) -> int:
    port: int = reserved.port()
    return port


REFUSED: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": "five"},
    {"max_tokens": 5, "min_tokens": 6},
    {"n": 0},
]


@pytest.mark.parametrize("case", ["p2p-nccl", "moriio-read"])
async def test_engine_that_waits_for_blocks_refuses_in_its_own_words(
    case: str, tmp_path: Path, cases: dict[str, Any], on_stage: OnStage
) -> None:
    """What is wrong with a request is told as 4xx, though it can't run over two legs."""
    async with on_stage(cases[case], "1p1d", tmp_path / "kvlb.yaml") as stage:
        told, expected = [], []
        for body in REFUSED:
            asked = {"model": "sim", "prompt": "a" * 900, **body}
            answer = await stage.http.post("/v1/completions", json=asked)
            engine = await stage.direct.post(f"{stage.engine('d0').url}/v1/completions", json=asked)
            told.append((answer.status_code, answer.json()))
            expected.append((engine.status_code, engine.json()))
        computed = [(await stage.state(name))["computed_prompt_tokens"] for name in ("p0", "d0")]

    assert {status for status, _ in told} == {400}
    assert told == expected
    assert computed == [0, 0]
