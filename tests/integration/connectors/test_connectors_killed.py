"""Engines that are killed or restarted while blocks go from one to another, with every connector."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from simulator.service import RunningEngine

OnStage = Callable[..., AbstractAsyncContextManager[Any]]
Body = Callable[..., dict[str, Any]]
Expected = Callable[[int], str]


IsVictim = Callable[[Any, RunningEngine], bool]


async def ask_and_kill(stage: Any, is_victim: IsVictim) -> tuple[httpx.Response, RunningEngine]:
    """Stop the first engine that is so while a completion is on its way."""
    engines: Sequence[RunningEngine] = stage.fleet.engines

    async def found() -> RunningEngine:
        async with asyncio.timeout(20):
            while True:
                for each in engines:
                    if is_victim(stage, each):
                        return each
                await asyncio.sleep(0.002)

    async with asyncio.TaskGroup() as group:
        asked = group.create_task(stage.complete())
        victim = await found()
        await stage.fleet.stop(victim)
    return asked.result(), victim


def has_work(engine: RunningEngine) -> bool:
    return any(rank.in_flight for rank in engine.engine.ranks)


def works(role: str) -> IsVictim:
    """An engine of this role has the request."""
    return lambda _, engine: engine.role == role and has_work(engine)


def has_prefilled(stage: Any, engine: RunningEngine) -> bool:
    """It has sampled its token and has nothing to do any more, while decode is still reading."""
    ranks = engine.engine.ranks
    tokens = sum(rank.core.statistics.generation_tokens for rank in ranks)
    has_answered = engine.role == "prefill" and tokens > 0 and not has_work(engine)
    return has_answered and has_work(stage.engine("d0"))


async def test_a_prefill_engine_killed_during_its_leg_is_replaced(
    case: Any, tmp_path: Path, on_stage: OnStage, expected_text: Expected
) -> None:
    """The client gets its answer; the decode engine isn't left waiting."""
    slow: dict[str, Any] = {"prefill_tokens_per_s": 1500.0}
    async with on_stage(case, "2p1d", tmp_path / "kvlb.yaml", **slow) as stage:
        answer, victim = await ask_and_kill(stage, works("prefill"))
        await stage.until_state("d0", "in_flight", 0)
        decode = await stage.state("d0")

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvlb-prefill"] != victim.name
    assert answer.json()["choices"][0]["text"] == expected_text(0)
    assert decode["corrupt_reads"] == 0


async def test_a_decode_engine_killed_before_its_first_byte_is_replaced(
    case: Any, tmp_path: Path, on_stage: OnStage, expected_text: Expected
) -> None:
    """Both legs run again, since the transfer may be spent; the client gets its answer."""
    slow: dict[str, Any] = {"transfer_latency_ms": 400.0}
    async with on_stage(case, "1p2d", tmp_path / "kvlb.yaml", **slow) as stage:
        answer, victim = await ask_and_kill(stage, works("decode"))

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvlb-instance"] != victim.name
    assert answer.json()["choices"][0]["text"] == expected_text(0)


@pytest.mark.parametrize("name", ["nixl", "nixl-push", "mooncake", "moriio-write", "p2p-nccl"])
async def test_without_a_prefill_engine_left_it_is_a_503(
    name: str, tmp_path: Path, cases: dict[str, Any], on_stage: OnStage
) -> None:
    """Before anybody knows that they are gone, and after; streamed and not."""
    async with on_stage(cases[name], "2p2d", tmp_path / "kvlb.yaml") as stage:
        for each in stage.fleet.engines:
            if each.role == "prefill":
                await stage.fleet.stop(each)
        answers = [await stage.complete(number, stream=number % 2 == 1) for number in range(4)]

    assert [answer.status_code for answer in answers] == [503] * 4
    codes = [answer.json()["error"]["code"] for answer in answers]
    assert set(codes) <= {"prefill_failed", "no_instance"}
    assert codes[-1] == "no_instance"


async def test_a_prefill_engine_killed_after_its_leg_is_replaced(
    case: Any, tmp_path: Path, on_stage: OnStage, expected_text: Expected
) -> None:
    """What the decode engine was about to read is gone: both legs run again, or a storage has it."""
    slow: dict[str, Any] = {"transfer_latency_ms": 400.0}
    async with on_stage(case, "2p1d", tmp_path / "kvlb.yaml", **slow) as stage:
        answer, _ = await ask_and_kill(stage, has_prefilled)
        await stage.until_state("d0", "in_flight", 0)
        decode = await stage.state("d0")

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text(0)
    assert decode["corrupt_reads"] == 0


async def test_a_decode_engine_killed_behind_its_first_byte_ends_its_stream_with_an_error(
    case: Any, tmp_path: Path, body: Body, on_stage: OnStage
) -> None:
    """Nothing looks like an end; the prefill engine keeps nothing for it beyond what it had read."""
    slow: dict[str, Any] = {"inter_token_ms": 20.0}
    asked = body(0, stream=True, max_tokens=400, ignore_eos=True)
    async with on_stage(case, "1p2d", tmp_path / "kvlb.yaml", **slow) as stage:
        lines: list[str] = []
        with suppress(httpx.RemoteProtocolError):  # behind the event the connection breaks
            async with stage.http.stream("POST", "/v1/completions", json=asked) as answer:
                victim = stage.engine(answer.headers["x-kvlb-instance"])
                async for line in answer.aiter_lines():
                    if not lines:
                        await stage.fleet.stop(victim)
                    lines += [line.removeprefix("data: ")] if line else []
        prefill = await stage.state("p0")

    *events, last = lines
    assert answer.status_code == 200
    assert set(msgspec.json.decode(last)["error"]) >= {"message", "type", "code"}
    assert [choice["finish_reason"] for choice in choices_of(events)] == [None] * len(events)
    assert prefill["reservations_unreleased"] == 0


def choices_of(events: list[str]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(event)["choices"][0] for event in events]


@pytest.mark.parametrize("name", ["mooncake", "nixl-push"])
async def test_a_prefill_engine_that_restarts_is_known_anew(
    name: str, tmp_path: Path, cases: dict[str, Any], on_stage: OnStage
) -> None:
    """Its engine id is another one, which is asked for with the next probe."""
    async with on_stage(cases[name], "1p1d", tmp_path / "kvlb.yaml") as stage:
        before = await stage.complete(0)
        engine = stage.engine("p0")
        old = engine.engine.engine_id
        await stage.fleet.restart(engine)
        assert engine.engine.engine_id != old
        await stage.until(lambda: answers(stage))
        decode = await stage.state("d0")

    assert before.status_code == 200
    assert decode["computed_prompt_tokens"] >= 2


async def answers(stage: Any) -> bool:
    return bool((await stage.complete(1)).status_code == 200)
