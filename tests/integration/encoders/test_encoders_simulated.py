"""Encoder disaggregation end to end: kvlb's own process over simulated encode engines."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvlb.explain import explain

OnStage = Callable[..., AbstractAsyncContextManager[Any]]
Body = Callable[..., dict[str, Any]]
Expected = Callable[..., str]
TextOf = Callable[[httpx.Response], Any]

CHAT = "/v1/chat/completions"
CONNECTORS = ["example", "cpu", "mooncake"]
FLEETS = ["1e1m", "1e2m", "2e1p1d"]


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("fleet", FLEETS)
async def test_every_image_is_encoded_once_and_by_an_encode_engine(
    fleet: str,
    connector: str,
    tmp_path: Path,
    on_stage: OnStage,
    expected_text: Expected,
    text_of: TextOf,
) -> None:
    """Whoever computes the prompt finds all three; the answer is the one of a lone engine."""
    async with on_stage(fleet, connector, tmp_path / "kvlb.yaml") as stage:
        answer = await stage.ask("cat", "dog", "bird")
        streamed = await stage.ask("fish", stream=True)
        consumer = "prefill" if "p" in fleet else "mixed"

        assert text_of(answer) == expected_text("cat", "dog", "bird")
        assert "[DONE]" in streamed.text
        assert answer.headers["x-kvlb-encode-reason"] == "encoded"
        assert stage.counts("encode")["runs"] == 4
        consumed = stage.counts(consumer)
        assert (consumed["runs"], consumed["loaded"], consumed["lost"]) == (0, 4, 0)
        if consumer == "prefill":
            assert answer.headers["x-kvlb-prefill"] == "p0"
            assert stage.counts("decode")["runs"] == 0


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_each_leg_carries_what_its_engine_needs(
    connector: str, tmp_path: Path, body: Body, on_stage: OnStage
) -> None:
    """One item on each encode leg and no text; the media as they came on the others."""
    async with on_stage("1e1p1d", connector, tmp_path / "kvlb.yaml") as stage:
        await stage.ask("cat", "dog")
        encodes, (prefill,), (decode,) = (stage.legs(name) for name in ("e0", "p0", "d0"))
        told: Any = prefill.get("ec_transfer_params")

        assert len(encodes) == 2
        for leg in encodes:
            assert [each["type"] for each in leg["messages"][0]["content"]] == ["image_url"]
            assert (leg["max_tokens"], leg["stream"]) == (1, False)
        for leg in (prefill, decode):
            assert leg["messages"] == body("cat", "dog")["messages"]
            assert leg.get("ec_transfer_params") == told
        if connector == "example":
            assert told is None
        elif connector == "cpu":
            assert [each["peer_host"] for each in told.values()] == ["127.0.0.1"] * 2
        else:
            sent = [leg["ec_transfer_params"] for leg in encodes]
            assert {each["consumer_zmq"] for each in sent} == set(stage.engine("p0").ec_zmq_addrs)
            pushed = {each["ec_items"][0]["transfer_id"] for each in sent}
            assert {each["transfer_id"] for each in told["ec_items"]} == pushed


async def test_text_takes_no_encode_leg(tmp_path: Path, on_stage: OnStage) -> None:
    """Nor does it say anything of encoding."""
    async with on_stage("1e1m", "cpu", tmp_path / "kvlb.yaml") as stage:
        answer = await stage.ask()
        completion = await stage.http.post("/v1/completions", json={"model": "sim", "prompt": "a"})

        assert (answer.status_code, completion.status_code) == (200, 200)
        assert "x-kvlb-encode" not in answer.headers
        assert stage.legs("e0") == []
        assert (await stage.last())["encode"] is None


@pytest.mark.parametrize("connector", ["example", "cpu"])
async def test_an_image_that_was_encoded_lately_takes_no_leg(
    connector: str, tmp_path: Path, on_stage: OnStage, expected_text: Expected, text_of: TextOf
) -> None:
    """Another consumer finds it, too; beyond `reuse_s` a leg is sent where it was seen last."""
    async with on_stage("2e2m", connector, tmp_path / "kvlb.yaml") as stage:
        first = await stage.ask("cat")
        again = [await stage.ask("cat", seed=number) for number in range(4)]

        assert stage.counts("encode")["runs"] == 1
        assert sum(len(stage.legs(name)) for name in ("e0", "e1")) == 1
        assert {text_of(each) for each in (first, *again)} == {expected_text("cat")}
        assert {each.headers["x-kvlb-encode-reason"] for each in again} == {"reused"}
        assert {each.headers["x-kvlb-encode"] for each in again} == {first.headers["x-kvlb-encode"]}
        assert stage.counts("mixed")["runs"] == 0


async def test_without_reuse_the_same_image_goes_to_the_same_engine(
    tmp_path: Path, on_stage: OnStage
) -> None:
    """Its cache spares the encoder; the leg says why it went there."""
    async with on_stage("2e1m", "cpu", tmp_path / "kvlb.yaml", encode={"reuse_s": 0}) as stage:
        for image in ("cat", "dog", "cat", "dog"):
            await stage.ask(image)
        last = await stage.last()

        assert stage.counts("encode")["runs"] == 2
        assert [len(stage.legs(name)) for name in ("e0", "e1")] == [2, 2]
        assert last["legs"][0]["leg"] == "encode"
        assert last["legs"][0]["reason"] == "affinity"
        assert last["encode"]["reason"] == "encoded"


async def test_an_image_that_stands_twice_is_encoded_once(
    tmp_path: Path, on_stage: OnStage, expected_text: Expected, text_of: TextOf
) -> None:
    """Also where the consumer gets an entry for each place."""
    async with on_stage("1e1m", "mooncake", tmp_path / "kvlb.yaml") as stage:
        answer = await stage.ask("cat", "dog", "cat")
        (sent,) = stage.legs("m0")

        assert text_of(answer) == expected_text("cat", "dog", "cat")
        assert stage.counts("encode")["runs"] == 2
        names = [each["transfer_id"] for each in sent["ec_transfer_params"]["ec_items"]]
        assert names[0] == names[2] != names[1]


async def test_explain_says_who_would_encode_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: Body, on_stage: OnStage
) -> None:
    """Nothing is sent or booked by asking; the command says it in a line."""
    async with on_stage("2e1m", "cpu", tmp_path / "kvlb.yaml") as stage:
        before = (await stage.http.post("/explain", json=body("cat", "dog"))).json()
        await stage.ask("cat")
        after = (await stage.http.post("/explain", json=body("cat"))).json()
        text = (await stage.http.post("/explain", json=body())).json()
        for name in ("e0", "e1"):
            await stage.fleet.stop(stage.engine(name))

        async def encoders_are_down() -> bool:
            status = (await stage.http.get("/status")).json()
            return sum(bool(each["healthy"]) for each in status["instances"]) == 1

        await stage.until(encoders_are_down)
        down = (await stage.http.post("/explain", json=body("cat"))).json()
        asked = msgspec.json.encode(body("cat")).decode()
        url = str(stage.http.base_url)
        await asyncio.to_thread(explain, asked, url=url, path=CHAT, as_json=False)
        shown = capsys.readouterr().out

        assert "encode  item 0: where the prompt is computed (no_encode_instance)" in shown

        assert [each["reason"] for each in before["encode"]["items"]] == ["least_loaded"] * 2
        assert after["encode"]["items"][0]["reason"] == "reused"
        assert text["encode"] is None
        assert down["encode"]["items"] == [
            {"item": 0, "instance": None, "reason": "no_encode_instance"}
        ]


async def test_status_counts_encode_instances(tmp_path: Path, on_stage: OnStage) -> None:
    """Beside the example proxies' fields; they are no prefill instances."""
    async with on_stage("2e1p1d", "example", tmp_path / "kvlb.yaml") as stage:
        status = (await stage.http.get("/status")).json()

        assert status["encode_node_count"] == len(status["encode_nodes"]) == 2
        assert (status["prefill_node_count"], status["decode_node_count"]) == (1, 1)
        assert {each["role"] for each in status["instances"]} == {"encode", "prefill", "decode"}
        assert status["conflicts"] == []


async def test_an_encode_instance_comes_and_goes_at_run_time(
    tmp_path: Path, on_stage: OnStage
) -> None:
    """In the words of the example's registration."""
    admin = {"admin": {"api_key": "k"}}
    async with on_stage("2e1m", "cpu", tmp_path / "kvlb.yaml", more=admin) as stage:
        headers = {"x-api-key": "k"}
        url = stage.engine("e1").url
        removed = await stage.http.delete("/instances", params={"url": url}, headers=headers)
        entry = {"role": "encode", "url": url, "dp_size": 1, "connector": "ec_cpu"}
        added = await stage.http.post("/instances", json=entry, headers=headers)
        wrong = await stage.http.post(
            "/instances", json=entry | {"ec_zmq_addrs": ["tcp://h:1"]}, headers=headers
        )

        assert removed.is_success, removed.text
        assert added.status_code == 200, added.text
        assert added.json()["instance"]["role"] == "encode"
        assert wrong.status_code == 400
        assert "ec_zmq_addrs" in wrong.json()["error"]["message"]
