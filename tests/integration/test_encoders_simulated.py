"""Encoder disaggregation end to end: kvlb's own process over simulated encode engines."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from kvlb.explain import explain
from kvlb.running import running_kvlb
from kvlb.settings import Overrides, load_settings
from simulator.core import tokenizer
from simulator.core.chat_template import render_chat
from simulator.core.generation import seed_answer
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet

FAST = EngineSettings(
    inter_token_ms=1.0, prefill_tokens_per_s=1e5, transfer_tokens_per_s=1e6, encode_ms=1.0
)
CHAT = "/v1/chat/completions"
CONNECTORS = ["example", "cpu", "mooncake"]
FLEETS = ["1e1m", "1e2m", "2e1p1d"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Engines, and a client of the balancer in front of them."""

    fleet: RunningFleet
    http: httpx.AsyncClient

    def engine(self, name: str) -> RunningEngine:
        return next(each for each in self.fleet.engines if each.name == name)

    def counts(self, role: str) -> dict[str, int]:
        """What the encoders of all engines of a role did."""
        summed: dict[str, int] = {}
        for each in self.fleet.engines:
            if each.role == role and each.is_running:
                counts = each.engine.encoder.counts
                for name in ("runs", "loaded", "aborted", "lost"):
                    summed[name] = summed.get(name, 0) + getattr(counts, name)
        return summed

    def legs(self, name: str) -> list[dict[str, Any]]:
        """Bodies of the chats that an engine was sent."""
        received = self.engine(name).engine.received
        return [msgspec.json.decode(each.body) for each in received if each.path == CHAT]

    async def ask(self, *images: str, **fields: Any) -> httpx.Response:
        return await self.http.post(CHAT, json=body(*images, **fields))

    async def last(self) -> dict[str, Any]:
        """The newest entry of the decision log."""
        answer = await self.http.get("/explain/recent")
        newest: dict[str, Any] = answer.json()["decisions"][0]
        return newest

    async def until(self, is_so: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(20):
            while not await is_so():  # noqa: ASYNC110 - another process would be asked so, too
                await asyncio.sleep(0.005)


def body(*images: str, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what do you see? " * 40}]
    parts += [{"type": "image_url", "image_url": {"url": f"data:,{each}"}} for each in images]
    chat = {"model": "sim", "messages": [{"role": "user", "content": parts}], "max_tokens": 5}
    return chat | fields


def expected_text(*images: str) -> str:
    """What any engine says to this chat."""
    text = render_chat(body(*images)["messages"], takes_media=True)
    sampler = seed_answer(tokenizer.encode(text, add_special_tokens=False), 0)
    return tokenizer.decode([sampler.token_at(index, may_end=True) for index in range(5)])


def text_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@asynccontextmanager
async def on_stage(
    fleet: str,
    connector: str,
    path: Path,
    *,
    encode: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[Stage]:
    """Run engines and a balancer that was told of them in a file."""
    settings = msgspec.structs.replace(FAST, ec_connector=connector, **engine)
    async with running_fleet(FleetSpec.parse(fleet), engine=settings) as engines:
        entries = [
            {"url": each.url, "alias": each.name, "role": each.role}
            | ({"connector": f"ec_{connector}"} if each.role == "encode" else {})
            | ({"ec_zmq_addrs": list(each.ec_zmq_addrs)} if each.ec_zmq_addrs else {})
            for each in engines.engines
        ]
        told = {
            "instances": entries,
            "pd": {"force": "remote"},
            "probes": {"interval_s": 0.05, "unhealthy_after": 1},
            "encode": encode or {},
        }
        write(path, told | (more or {}))
        async with (
            running_kvlb(load_settings(path, Overrides(port=0), {})) as kvlb,
            httpx.AsyncClient(base_url=kvlb.url, trust_env=False, timeout=20) as http,
        ):
            stage = Stage(fleet=engines, http=http)

            async def is_ready() -> bool:
                status = (await http.get("/status")).json()
                return all(each["healthy"] for each in status["instances"])

            await stage.until(is_ready)
            yield stage


def write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("fleet", FLEETS)
async def test_every_image_is_encoded_once_and_by_an_encode_engine(
    fleet: str, connector: str, tmp_path: Path
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
async def test_each_leg_carries_what_its_engine_needs(connector: str, tmp_path: Path) -> None:
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


async def test_text_takes_no_encode_leg(tmp_path: Path) -> None:
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
    connector: str, tmp_path: Path
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


async def test_without_reuse_the_same_image_goes_to_the_same_engine(tmp_path: Path) -> None:
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


async def test_an_image_that_stands_twice_is_encoded_once(tmp_path: Path) -> None:
    """Also where the consumer gets an entry for each place."""
    async with on_stage("1e1m", "mooncake", tmp_path / "kvlb.yaml") as stage:
        answer = await stage.ask("cat", "dog", "cat")
        (sent,) = stage.legs("m0")

        assert text_of(answer) == expected_text("cat", "dog", "cat")
        assert stage.counts("encode")["runs"] == 2
        names = [each["transfer_id"] for each in sent["ec_transfer_params"]["ec_items"]]
        assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_an_encode_engine_killed_during_its_leg_is_replaced(
    connector: str, tmp_path: Path
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


async def encoding_engine(stage: Stage) -> RunningEngine:
    """Wait until an encode engine has a leg; it is that one."""
    async with asyncio.timeout(20):
        while True:
            for each in stage.fleet.engines:
                if each.role == "encode" and stage.legs(each.name):
                    return each
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("connector", ["example", "cpu"])
async def test_without_encode_engines_the_consumer_encodes_itself(
    connector: str, tmp_path: Path
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
    connector: str, encode: dict[str, Any], tmp_path: Path
) -> None:
    """Mooncake's consumer can't encode, another one may not: 503 in OpenAI's form, no other leg."""
    async with on_stage("1e1m", connector, tmp_path / "kvlb.yaml", encode=encode) as stage:
        await stage.fleet.stop(stage.engine("e0"))
        answer = await stage.ask("cat")

        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "encode_failed"
        assert stage.legs("m0") == []
        assert (await stage.ask()).status_code == 200


async def test_a_lost_encoding_is_made_up_for_by_the_consumer(tmp_path: Path) -> None:
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


async def until_answered(stage: Stage, image: str) -> None:
    async def is_answered() -> bool:
        return (await stage.ask(image)).status_code == 200

    await stage.until(is_answered)


async def test_a_client_that_leaves_ends_its_encode_legs(tmp_path: Path) -> None:
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
            return stage.counts("encode")["aborted"] == 2

        async def nothing_is_booked() -> bool:
            status = (await stage.http.get("/status")).json()
            ranks = [rank for each in status["instances"] for rank in each["ranks"]]
            return all(rank["load"]["requests"] == 0 for rank in ranks)

        await stage.until(both_stopped)
        await stage.until(nothing_is_booked)

        assert stage.legs("m0") == []
        assert (await stage.last())["status"] == 499


async def test_explain_says_who_would_encode_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


async def test_status_counts_encode_instances(tmp_path: Path) -> None:
    """Beside the example proxies' fields; they are no prefill instances."""
    async with on_stage("2e1p1d", "example", tmp_path / "kvlb.yaml") as stage:
        status = (await stage.http.get("/status")).json()

        assert status["encode_node_count"] == len(status["encode_nodes"]) == 2
        assert (status["prefill_node_count"], status["decode_node_count"]) == (1, 1)
        assert {each["role"] for each in status["instances"]} == {"encode", "prefill", "decode"}
        assert status["conflicts"] == []


async def test_an_encode_instance_comes_and_goes_at_run_time(tmp_path: Path) -> None:
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
