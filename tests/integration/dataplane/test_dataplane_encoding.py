"""Encode legs against engines that misbehave: what is tried again, what is left, what the client sees."""

import asyncio
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Role
from balancer.core.prompt.encoded_items import EncodedItems
from balancer.core.settings.encode import EncodeSettings

CHAT = "/v1/chat/completions"
HANDLE = {"peer_host": "10.0.0.5", "peer_port": 5601, "size_bytes": 9}


def chat(*images: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": f"data:,{each}"}} for each in images]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], **fields}


async def answer_ok(received: Any, wire: Any) -> None:
    await wire.json({"choices": [{"message": {"content": "a"}}]})


async def encode_ok(received: Any, wire: Any) -> None:
    url = received.json["messages"][0]["content"][0]["image_url"]["url"]
    choice = {"message": {"content": ""}, "finish_reason": "stop"}
    await wire.json({"choices": [choice], "ec_transfer_params": {url: HANDLE}})


async def stay_silent(received: Any, wire: Any) -> None:
    await received.gone.wait()


def say(value: Any, status: int = 200) -> Any:
    async def script(received: Any, wire: Any) -> None:
        if isinstance(value, bytes):
            await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(value) + value)
        else:
            await wire.json(value, status)

    return script


async def close(received: Any, wire: Any) -> None:
    wire.close()


def remembering(**fields: Any) -> EncodedItems:
    return EncodedItems(EncodeSettings(**fields))


@pytest.fixture
def encoder(instance: Any) -> Any:
    """Describe an encode engine to the fleet."""

    def describe(engine: Any, alias: str = "e0", connector: str = "ec_cpu", **fields: Any) -> Any:
        return instance(engine, alias, role=Role.ENCODE, connector=connector, **fields)

    return describe


FAULTS = {
    "503": (say({"error": {"message": "full"}}, 503), "engine_refused"),
    "404": (say({"error": {"message": "no such model"}}, 404), "engine_refused"),
    "closed": (close, "engine_closed"),
    "not JSON": (say(b"<html>"), "no_transfer"),
    "nested": (say(b"[" * 100_000), "no_transfer"),
    "error in a 200": (say({"error": {"message": "no"}}), "no_transfer"),
    "aborted": (say({"choices": [{"finish_reason": "abort"}]}), "no_transfer"),
    "silent": (stay_silent, "engine_timeout"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failed_leg_is_tried_elsewhere(
    fault: str, engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """The other encode engine has what the prompt needs; both attempts are on record."""
    script, code = FAULTS[fault]
    encoded = remembering(timeout_s=1.0 if fault == "silent" else 60.0)
    async with (
        engine(script) as bad,
        engine(encode_ok) as good,
        engine(answer_ok) as target,
        balancer(
            encoder(bad), encoder(good, "e1"), instance(target, "m0"), encoded=encoded
        ) as running,
    ):
        answer = await client.post(running.url + CHAT, json=chat("cat"))
        (record,) = await running.wait_for_records(1)

        assert answer.status_code == 200
        assert [(leg.alias, leg.error) for leg in record.legs[:2]] == [("e0", code), ("e1", None)]
        assert target.received[0].json["ec_transfer_params"] == {"data:,cat": HANDLE}
        assert (answer.headers["x-kvlb-encode"], running.in_flight()) == ("e1", 0)


async def test_a_refusal_that_blames_the_item_is_left_to_the_consumer(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """Another encode engine would say the same; whoever computes the prompt has the last word."""
    refusal = {"error": {"message": "cannot identify image file"}}
    async with (
        engine(say(refusal, 400)) as first,
        engine(encode_ok) as second,
        engine(say(refusal, 400)) as target,
        balancer(encoder(first), encoder(second, "e1"), instance(target, "m0")) as running,
    ):
        answer = await client.post(running.url + CHAT, json=chat("cat"))

        assert (answer.status_code, answer.json()) == (400, refusal)
        assert (len(first.received), len(second.received), len(target.received)) == (1, 0, 1)


async def test_where_the_consumer_may_not_encode_the_refusal_is_the_answer(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """The first that can't be had ends the other legs; no prompt leg is sent."""
    refusal = {"error": {"message": "cannot identify image file"}}

    async def refuse_cats(received: Any, wire: Any) -> None:
        if b"cat" in received.body:
            await wire.json(refusal, 400)
            wire.close()
        else:
            await stay_silent(received, wire)

    encoded = remembering(on_failure="refuse")
    async with (
        engine(refuse_cats) as only,
        engine(answer_ok) as target,
        balancer(encoder(only), instance(target, "m0"), encoded=encoded) as running,
    ):
        answer = await client.post(running.url + CHAT, json=chat("dog", "cat"))
        async with asyncio.timeout(20):
            for each in only.received:
                await each.gone.wait()

        assert (answer.status_code, answer.json()) == (400, refusal)
        assert target.received == []


async def test_attempts_are_counted(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """After `attempts` of them nobody else is asked, although there is one."""
    encoded = remembering(attempts=1, on_failure="refuse")
    async with (
        engine(close) as bad,
        engine(encode_ok) as good,
        engine(answer_ok) as target,
        balancer(
            encoder(bad), encoder(good, "e1"), instance(target, "m0"), encoded=encoded
        ) as running,
    ):
        answer = await client.post(running.url + CHAT, json=chat("cat"))

        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "encode_failed"
        assert (len(good.received), len(target.received)) == (0, 0)


async def test_a_500_has_everything_encoded_anew_once(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """What was counted on may be gone; the same engine is asked again. A second 500 is the answer."""

    async def fail_twice(received: Any, wire: Any) -> None:
        if len(target.received) in {2, 4, 5}:
            await wire.json({"error": {"message": "no embedding"}}, 500)
        else:
            await answer_ok(received, wire)

    async with (
        engine(encode_ok) as source,
        engine(fail_twice) as target,
        balancer(encoder(source), instance(target, "m0")) as running,
    ):
        statuses = [
            (await client.post(running.url + CHAT, json=chat("cat"))).status_code for _ in range(3)
        ]

        assert statuses == [200, 200, 500]
        assert len(source.received) == 3  # at first, and anew after each first 500
        assert len(target.received) == 5


async def test_a_500_without_media_is_not_repeated(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """There is nothing that could be made anew."""
    async with (
        engine(encode_ok) as source,
        engine(say({"error": {"message": "no"}}, 500)) as target,
        balancer(encoder(source), instance(target, "m0")) as running,
    ):
        answer = await client.post(running.url + CHAT, json=chat())

        assert (answer.status_code, len(target.received)) == (500, 1)


async def test_a_push_is_made_anew_for_another_consumer(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """The first consumer died: the second gets its own, under another name."""
    prompts: list[Any] = []

    async def die_once(received: Any, wire: Any) -> None:
        prompts.append(received)
        await (close if len(prompts) == 1 else answer_ok)(received, wire)

    async with (
        engine(encode_ok) as source,
        engine(die_once) as one,
        engine(die_once) as other,
        balancer(
            encoder(source, connector="ec_mooncake"),
            instance(one, "m0", ec_zmq_addrs=("tcp://m0:1",)),
            instance(other, "m1", ec_zmq_addrs=("tcp://m1:1",)),
        ) as running,
    ):
        answer = await client.post(running.url + CHAT, json=chat("cat"))
        pushed = [each.json["ec_transfer_params"] for each in source.received]

        assert answer.status_code == 200
        assert {each["consumer_zmq"] for each in pushed} == {"tcp://m0:1", "tcp://m1:1"}
        assert pushed[1]["consumer_zmq"] == f"tcp://{answer.headers['x-kvlb-instance']}:1"
        names = [each["ec_items"][0]["transfer_id"] for each in pushed]
        (item,) = prompts[1].json["ec_transfer_params"]["ec_items"]
        assert item == {"mm_hash": "data:,cat", "transfer_id": names[1]}
        assert names[0] != names[1]


async def test_a_consumer_without_an_address_is_named(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """No leg is sent that would be pushed to nobody."""
    async with (
        engine(encode_ok) as source,
        engine(answer_ok) as target,
        balancer(encoder(source, connector="ec_mooncake"), instance(target, "m0")) as running,
    ):
        answer = await client.post(running.url + CHAT, json=chat("cat"))

        assert answer.status_code == 503
        assert "m0 has no address for rank 0: set its `ec_zmq_addrs`" in answer.text
        assert (source.received, target.received) == ([], [])


@pytest.mark.parametrize(("on_failure", "status"), [("local", 200), ("refuse", 503)])
async def test_a_decode_engine_that_nobody_pushes_to_encodes_itself(
    on_failure: str,
    status: int,
    engine: Any,
    balancer: Any,
    instance: Any,
    encoder: Any,
    client: Any,
) -> None:
    """Where a prompt isn't prefilled elsewhere it may be computed by one that is no consumer."""
    async with (
        engine(encode_ok) as source,
        engine(answer_ok) as target,
        balancer(
            encoder(source, connector="ec_mooncake"),
            instance(target, "d0", role=Role.DECODE),
            encoded=remembering(on_failure=on_failure),
        ) as running,
    ):
        answer = await client.post(running.url + CHAT, json=chat("cat"))

        assert answer.status_code == status
        assert (len(source.received), len(target.received)) == (0, int(status == 200))
        if status == 200:
            assert answer.headers["x-kvlb-encode-reason"] == "no_address"
            assert "ec_transfer_params" not in target.received[0].json


async def test_streams_are_asked_for_their_usage_all_the_same(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """What is handed over joins it in the body, whose other bytes stay; UTF-16 is written anew."""

    async def stream(received: Any, wire: Any) -> None:
        await wire.events(b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n")

    raw = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": ['
    raw += b'{"type": "image_url", "image_url": {"url": "data:,cat"}}]}]}'
    async with (
        engine(encode_ok) as source,
        engine(stream) as target,
        balancer(encoder(source), instance(target, "m0")) as running,
    ):
        for content in (raw, raw.decode().encode("utf-16")):
            await client.post(
                running.url + CHAT, content=content, headers={"content-type": "application/json"}
            )

        assert target.received[0].body.endswith(raw[1:])
        for each in target.received:
            assert each.json["stream_options"] == {"include_usage": True}
            assert each.json["ec_transfer_params"] == {"data:,cat": HANDLE}


async def test_an_encode_leg_has_an_id_of_its_own(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """It begins with the request's, so that engines' logs can be joined; the client's key goes along."""
    async with (
        engine(encode_ok) as source,
        engine(answer_ok) as target,
        balancer(encoder(source), instance(target, "m0")) as running,
    ):
        headers = {"x-request-id": "mine", "authorization": "Bearer k"}
        await client.post(running.url + CHAT, json=chat("cat", "dog"), headers=headers)
        ids = [each.header("x-request-id") for each in source.received]

        assert sorted(each.rpartition(":")[0] for each in ids) == ["mine:0", "mine:1"]
        assert {each.header("authorization") for each in source.received} == {"Bearer k"}
        assert target.received[0].header("x-request-id") == "mine"


async def test_legs_of_one_request_are_bounded(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """`parallel` of them at once, the others after."""
    at_once = most = 0

    async def count(received: Any, wire: Any) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        await encode_ok(received, wire)

    async with (
        engine(count) as source,
        engine(answer_ok) as target,
        balancer(
            encoder(source), instance(target, "m0"), encoded=remembering(parallel=2)
        ) as running,
    ):
        answer = await client.post(running.url + CHAT, json=chat(*"abcdef"))

        assert answer.status_code == 200
        assert (len(source.received), most) == (6, 2)


async def test_encode_instances_of_another_model_are_not_asked(
    engine: Any, balancer: Any, instance: Any, encoder: Any, client: Any
) -> None:
    """The request goes as if there were none."""
    async with (
        engine(encode_ok) as source,
        engine(answer_ok) as target,
        balancer(encoder(source, base="other"), instance(target, "m0")) as running,
    ):
        answer = await client.post(running.url + CHAT, json=chat("cat"))

        assert answer.status_code == 200
        assert source.received == []
        assert "x-kvlb-encode" not in answer.headers
