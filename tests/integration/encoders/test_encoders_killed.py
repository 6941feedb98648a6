"""Encode engines that are killed or missing, encodings that are lost, clients that leave."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

OnStage = Callable[..., AbstractAsyncContextManager[Any]]
Body = Callable[..., dict[str, Any]]
Expected = Callable[..., str]
TextOf = Callable[[httpx.Response], Any]

CHAT = "/v1/chat/completions"
CONNECTORS = ["example", "cpu", "mooncake"]


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_an_encode_engine_killed_during_its_leg_is_replaced(
    connector: str, tmp_path: Path, on_stage: OnStage, expected_text: Expected, text_of: TextOf
) -> None:
    """The other one encodes; the client gets its answer."""
    async with on_stage("2e1m", connector, tmp_path / "kvlb.yaml", encode_ms=300.0) as stage:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(stage.ask("cat"))
            victim = await encoding_engine(stage)
            await stage.fleet.stop(victim)
        answer = asked.result()
        (survivor,) = (
            each for each in stage.fleet.engines if each.role == "encode" and each.is_running
        )

        assert text_of(answer) == expected_text("cat")
        assert answer.headers["x-kvlb-encode"] == survivor.name
        assert stage.counts("mixed")["runs"] == 0
        legs = [leg for leg in (await stage.last())["legs"] if leg["leg"] == "encode"]
        assert [leg["error"] for leg in legs] == ["engine_closed", None]


async def encoding_engine(stage: Any) -> Any:
    """Wait until an encode engine has a leg; it is that one."""
    async with asyncio.timeout(20):
        while True:
            for each in stage.fleet.engines:
                if each.role == "encode" and stage.legs(each.name):
                    return each
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("connector", ["example", "cpu"])
async def test_without_encode_engines_the_consumer_encodes_itself(
    connector: str, tmp_path: Path, on_stage: OnStage, expected_text: Expected, text_of: TextOf
) -> None:
    """The answer says so, and metrics count it."""
    async with on_stage("1e1m", connector, tmp_path / "kvlb.yaml") as stage:
        await stage.fleet.stop(stage.engine("e0"))
        answer = await stage.ask("cat")
        metrics = (await stage.http.get("/metrics")).text

        assert text_of(answer) == expected_text("cat")
        assert answer.headers["x-kvlb-encode"] == "none"
        assert answer.headers["x-kvlb-encode-reason"] in {"encode_failed", "no_encode_instance"}
        assert stage.counts("mixed")["runs"] == 1
        assert 'kvlb_encode_items_total{outcome="local"} 1.0' in metrics


@pytest.mark.parametrize(
    ("connector", "encode"), [("mooncake", {}), ("cpu", {"on_failure": "refuse"})]
)
async def test_where_nobody_may_stand_in_the_client_is_told(
    connector: str, encode: dict[str, Any], tmp_path: Path, on_stage: OnStage
) -> None:
    """Mooncake's consumer can't encode, another one may not: 503 in OpenAI's form, no other leg."""
    async with on_stage("1e1m", connector, tmp_path / "kvlb.yaml", encode=encode) as stage:
        await stage.fleet.stop(stage.engine("e0"))
        answer = await stage.ask("cat")

        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "encode_failed"
        assert stage.legs("m0") == []
        assert (await stage.ask()).status_code == 200


async def test_a_lost_encoding_is_made_up_for_by_the_consumer(
    tmp_path: Path, on_stage: OnStage, expected_text: Expected, text_of: TextOf
) -> None:
    """What the encode engine dropped meanwhile costs time, not the answer."""
    async with on_stage("1e1m", "cpu", tmp_path / "kvlb.yaml", ec_cpu_items=1) as stage:
        stage.engine("m0").settings = msgspec.structs.replace(
            stage.engine("m0").settings, encoder_cache_items=1
        )
        await stage.fleet.restart(stage.engine("m0"))
        for image in ("cat", "dog"):
            await until_answered(stage, image)
        answer = await stage.ask("cat")

        assert text_of(answer) == expected_text("cat")
        assert answer.headers["x-kvlb-encode-reason"] == "reused"
        assert stage.counts("mixed") == {"runs": 1, "loaded": 2, "aborted": 0, "lost": 1}


async def until_answered(stage: Any, image: str) -> None:
    async def is_answered() -> bool:
        return bool((await stage.ask(image)).status_code == 200)

    await stage.until(is_answered)


async def test_a_client_that_leaves_ends_its_encode_legs(
    tmp_path: Path, body: Body, on_stage: OnStage
) -> None:
    """Every engine stops, nothing stays booked, no prompt leg is sent."""
    async with on_stage("2e1m", "cpu", tmp_path / "kvlb.yaml", encode_ms=60_000.0) as stage:
        raw = msgspec.json.encode(body("cat", "dog"))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
        head += "content-type: application/json\r\n\r\n"
        url = stage.http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(head.encode() + raw)

        async def both_encode() -> bool:
            return all(stage.legs(name) for name in ("e0", "e1"))

        await stage.until(both_encode)
        writer.transport.abort()

        async def both_stopped() -> bool:
            return bool(stage.counts("encode")["aborted"] == 2)

        async def nothing_is_booked() -> bool:
            status = (await stage.http.get("/status")).json()
            ranks = [rank for each in status["instances"] for rank in each["ranks"]]
            return all(rank["load"]["requests"] == 0 for rank in ranks)

        await stage.until(both_stopped)
        await stage.until(nothing_is_booked)

        assert stage.legs("m0") == []
        assert (await stage.last())["status"] == 499
