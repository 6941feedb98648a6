"""An engine's error inside a 200: another engine is tried, or its client is told."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Role
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, running_fleet

COMPLETIONS = "/v1/completions"
GOOD = {"id": "cmpl-1", "choices": [{"text": "ok"}]}
NESTED = {"error": {"message": "m", "type": "T", "param": None, "code": 500}}
FLAT = {"object": "error", "message": "m", "type": "T", "param": None, "code": 400}


def answering(document: Any) -> Callable[[Any, Any], Awaitable[None]]:
    async def script(received: Any, wire: Any) -> None:
        await wire.json(document)

    return script


async def in_pieces(received: Any, wire: Any) -> None:
    """Whole, but nowhere near in one piece."""
    await wire.head(content_type="application/json")
    for byte in json.dumps(NESTED).encode():
        await wire.chunk(bytes([byte]))
    await wire.end()


def streaming(*events: bytes) -> Callable[[Any, Any], Awaitable[None]]:
    async def script(received: Any, wire: Any) -> None:
        await wire.events(*events)

    return script


DONE = b"data: [DONE]\n\n"
FAILED = {"id": "cmpl-1", "choices": [{"index": 0, "text": "", "finish_reason": "error"}]}
ABORTED = {"id": "cmpl-1", "choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}
LONG_FAILED = FAILED | {"prompt_token_ids": [1000] * 1000, "usage": {"completion_tokens": 0}}
NAMED = b'event: error\ndata: {"message":"gone"}\n\n'


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


NOTHING_SAID = {"id": "m", "type": "message", "role": "assistant", "content": []}
NOT_MADE = {"id": "r", "object": "response", "status": "failed", "output": []}


def named(document: Any) -> bytes:
    return f"event: {document['type']}\n".encode() + event(document)


MESSAGE_OPENS = named({"type": "message_start", "message": NOTHING_SAID})
MESSAGE_FAILS = named({"type": "error", "error": {"type": "internal_error", "message": "m"}})
MESSAGE_ENDS = named({"type": "message_delta", "delta": {"stop_reason": None}})
RESPONSE_OPENS = named({"type": "response.created", "response": {"status": "in_progress"}})
RESPONSE_FAILS = named({"type": "response.failed", "response": NOT_MADE})


async def as_first_event(received: Any, wire: Any) -> None:
    await wire.events(b"data: " + json.dumps(NESTED).encode() + b"\n\n", b"data: [DONE]\n\n")


def labelled(kind: str, *pieces: bytes) -> Callable[[Any, Any], Awaitable[None]]:
    """Pieces of one answer, each in a packet of its own."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type=kind)
        for piece in pieces:
            await wire.chunk(piece)
        await wire.end()

    return script


def at_once(kind: str, piece: bytes) -> Callable[[Any, Any], Awaitable[None]]:
    """An answer whose end comes with it."""

    async def script(received: Any, wire: Any) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(piece)}\r\n\r\n"
        await wire.raw(head.encode() + piece)

    return script


JSON, EVENTS = "application/json", "text/event-stream"
CHAT_OPENS = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
WHOLE = json.dumps(NESTED).encode()
ANSWERING = (COMPLETIONS, "/v1/messages", "/v1/responses")
ODD = {
    "byte-order-mark": labelled(JSON, b"\xef\xbb\xbf" + WHOLE),
    "message-first": answering({"message": "m", "object": "error", "code": 500}),
    "id-first": answering({"id": "x", **NESTED}),
    "no-json": labelled("text/plain", WHOLE),
    "events-as-json": labelled(JSON, event(NESTED), DONE),
    "events-cut": labelled(EVENTS, event(NESTED)[:12], event(NESTED)[12:]),
    "comment-first": labelled(EVENTS, b": ping\n\n" + event(NESTED)),
    "retry-first": labelled(EVENTS, b"retry: 10\n\n", event(NESTED)),
    "empty-data-first": labelled(EVENTS, b"data:\n\n", event(NESTED)),
    "chat-opening-first": labelled(EVENTS, CHAT_OPENS, event(NESTED)),
    "empty": labelled(JSON),
    "empty-stream": labelled(EVENTS),
    "comments-alone": at_once(EVENTS, b": ping\n\n"),
}


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        pytest.param(COMPLETIONS, answering(NESTED), id="whole"),
        pytest.param(COMPLETIONS, in_pieces, id="in-pieces"),
        pytest.param(COMPLETIONS, answering({"error": "gone"}), id="words"),
        pytest.param(COMPLETIONS, as_first_event, id="first-event"),
        pytest.param(COMPLETIONS, answering(FAILED), id="finish-error"),
        pytest.param(COMPLETIONS, answering(ABORTED), id="finish-abort"),
        pytest.param(COMPLETIONS, answering(LONG_FAILED), id="finish-error-long"),
        pytest.param(COMPLETIONS, streaming(event(FAILED), DONE), id="stream-finish-error"),
        pytest.param(COMPLETIONS, streaming(event(ABORTED), DONE), id="stream-finish-abort"),
        pytest.param(COMPLETIONS, streaming(NAMED), id="named-event"),
        pytest.param(COMPLETIONS, streaming(json.dumps(NESTED).encode()), id="no-stream-at-all"),
        pytest.param("/v1/embeddings", answering(NESTED), id="forwarded"),
        pytest.param("/v1/responses", as_first_event, id="forwarded-first-event"),
        pytest.param("/v1/responses", streaming(NAMED), id="forwarded-named-event"),
        pytest.param("/v1/messages", answering(NOTHING_SAID), id="message-without-a-word"),
        pytest.param("/v1/messages", streaming(MESSAGE_OPENS, MESSAGE_FAILS), id="message-error"),
        pytest.param("/v1/messages", streaming(MESSAGE_OPENS, MESSAGE_ENDS), id="message-ends"),
        pytest.param("/v1/responses", answering(NOT_MADE), id="response-failed"),
        pytest.param("/v1/responses", streaming(RESPONSE_OPENS, RESPONSE_FAILS), id="failed-event"),
        pytest.param("/inference/v1/generate", answering(ABORTED), id="tokens-abort"),
        *(
            pytest.param(path, fault, id=f"{path}-{name}")
            for path in ANSWERING
            for name, fault in ODD.items()
        ),
    ],
)
async def test_another_engine_is_tried(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, path: str, fault: Any
) -> None:
    """No byte had gone to the client."""
    async with engine(fault) as bad, engine(answering(GOOD)) as good:
        fleet = (instance(bad, "e0"), instance(good, "e1"))
        async with balancer(*fleet) as proxy:
            body = {"model": "m", "prompt": [1, 2], "input": "x", "messages": []}
            answers = [await client.post(proxy.url + path, json=body) for _ in range(2)]
            records = await proxy.wait_for_records(2)

            assert proxy.in_flight() == 0

    assert [(each.status_code, each.json()) for each in answers] == [(200, GOOD)] * 2
    assert sum(record.retries for record in records) >= 1
    assert len(bad.received) >= 1


@pytest.mark.parametrize(
    ("document", "status", "error"),
    [
        pytest.param(NESTED, 500, NESTED["error"], id="nested"),
        pytest.param(
            FLAT, 400, {"message": "m", "type": "T", "param": None, "code": 400}, id="flat"
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_its_client_is_told_if_nobody_else_can(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    document: Any,
    status: int,
    error: Any,
    stream: bool,
) -> None:
    """With the error's own status, in OpenAI's form: also one who asked for a stream."""
    async with (
        engine(answering(document)) as bad,
        balancer(instance(bad)) as proxy,
    ):
        body = {"model": "m", "prompt": [1, 2], "stream": stream}
        answer = await client.post(proxy.url + COMPLETIONS, json=body)

    assert (answer.status_code, answer.json()) == (status, {"error": error})


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        pytest.param(answering(FAILED), 500, "its first token: error", id="error"),
        pytest.param(answering(ABORTED), 502, "its first token: abort", id="abort"),
        pytest.param(streaming(event(ABORTED), DONE), 502, "its first token: abort", id="stream"),
        pytest.param(streaming(NAMED), 502, "gone", id="named-event"),
        pytest.param(streaming(json.dumps(NESTED).encode()), 500, "m", id="no-stream-at-all"),
    ],
)
async def test_client_is_told_that_the_engine_gave_up_without_a_word(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    fault: Any,
    status: int,
    message: str,
) -> None:
    """In OpenAI's form, and what the engine said of it."""
    async with engine(fault) as bad, balancer(instance(bad)) as proxy:
        answer = await client.post(proxy.url + COMPLETIONS, json={"model": "m", "prompt": [1, 2]})
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == record.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["message"].endswith(message)


@pytest.mark.parametrize("reason", ["error", "abort"])
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_what_was_said_first_passes_as_it_is(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    stream: bool,
    reason: str,
) -> None:
    """An engine that gives up behind a word has answered so far, and its client sees both."""
    spoken = {"id": "cmpl-1", "choices": [{"index": 0, "text": "a", "finish_reason": reason}]}
    good = streaming(event(spoken), DONE) if stream else answering(spoken)
    async with engine(good) as e, balancer(instance(e)) as proxy:
        body = {"model": "m", "prompt": [1, 2], "stream": stream}
        answer = await client.post(proxy.url + COMPLETIONS, json=body)

    sent = event(spoken) + DONE if stream else json.dumps(spoken).encode()
    assert (answer.status_code, answer.content) == (200, sent)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(answering(NESTED), id="error"),
        pytest.param(answering(FAILED), id="finish-error"),
        pytest.param(streaming(event(FAILED), DONE), id="stream-finish-error"),
    ],
)
async def test_decode_engine_that_could_not_load_is_told_as_such(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, fault: Any
) -> None:
    """Its words say nothing to a client who knows of no hand-over, whatever status they came with."""
    prefilled = {"kv_transfer_params": {"do_remote_prefill": True}}
    async with engine(answering(prefilled)) as p, engine(fault) as d:
        fleet = (
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        )
        async with balancer(*fleet) as proxy:
            body = {"model": "m", "prompt": list(range(1000))}
            answer = await client.post(proxy.url + COMPLETIONS, json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "hand_over_failed")


async def test_good_answer_that_begins_unusually_passes_as_it_is(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """An `error` that is null, or empty, is none."""
    odd: dict[str, Any] = {"error": {}, "choices": []}
    async with engine(answering(odd)) as e, balancer(instance(e)) as proxy:
        answer = await client.post(proxy.url + COMPLETIONS, json={"model": "m", "prompt": [1]})

    assert (answer.status_code, answer.json()) == (200, odd)


@pytest.mark.parametrize("version", ["0.10.0", "0.33.0"])
async def test_simulated_engine_that_hides_its_refusals(
    balancer: Any, instance: Any, client: httpx.AsyncClient, version: str
) -> None:
    """What it refuses reaches the client as what it is, in the form of either release."""
    settings = EngineSettings(model="m", hides_errors=True, version=version)
    async with running_fleet(FleetSpec.parse("1"), engine=settings) as fleet:
        url = fleet.engines[0].url
        body = {"model": "m", "prompt": [1], "max_tokens": -1}
        hidden = await client.post(url + COMPLETIONS, json=body)
        async with balancer(instance(url)) as proxy:
            answer = await client.post(proxy.url + COMPLETIONS, json=body)

    assert hidden.status_code == 200
    assert answer.status_code == answer.json()["error"]["code"] == 400


@pytest.mark.parametrize(
    ("path", "fault", "status", "error"),
    [
        pytest.param(
            "/v1/messages",
            streaming(MESSAGE_OPENS, MESSAGE_ENDS),
            502,
            {
                "type": "api_error",
                "message": "the engine ended the request before its first token: no reason given",
            },
            id="messages",
        ),
        pytest.param(
            "/v1/messages",
            streaming(MESSAGE_OPENS, MESSAGE_FAILS),
            502,
            {"type": "internal_error", "message": "m"},
            id="messages-error",
        ),
        pytest.param(
            "/v1/responses",
            streaming(RESPONSE_OPENS, named({"type": "error", "code": "500", "message": "m"})),
            500,
            {"message": "m", "type": "error", "param": None, "code": "500"},
            id="responses-error",
        ),
    ],
)
async def test_client_of_another_api_is_told_in_its_form(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    path: str,
    fault: Any,
    status: int,
    error: dict[str, Any],
) -> None:
    """With a status of its own: nothing of the stream had gone out."""
    async with engine(fault) as bad, balancer(instance(bad)) as proxy:
        answer = await client.post(proxy.url + path, json={"model": "m", "stream": True})

    assert (answer.status_code, answer.json()["error"]) == (status, error)


async def test_what_was_said_first_passes_on_every_path(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Openings are held back until then, and then are there."""
    word = named({"type": "content_block_delta", "delta": {"text": "a"}})
    rest = MESSAGE_ENDS + named({"type": "message_stop"})
    async with (
        engine(streaming(MESSAGE_OPENS, word, rest)) as e,
        balancer(instance(e)) as proxy,
    ):
        answer = await client.post(proxy.url + "/v1/messages", json={"model": "m", "stream": True})

    assert (answer.status_code, answer.content) == (200, MESSAGE_OPENS + word + rest)


async def test_a_response_that_is_kept_as_failed_is_shown(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Who asks for it asks how it went."""
    async with engine(answering(NOT_MADE)) as e, balancer(instance(e)) as proxy:
        answer = await client.get(proxy.url + "/v1/responses/r")

    assert (answer.status_code, answer.json()) == (200, NOT_MADE)
