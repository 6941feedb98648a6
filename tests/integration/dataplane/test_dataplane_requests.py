"""What reaches the engine of a client's request, and what doesn't."""

import json
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Fleet
from balancer.core.settings.dataplane import DataPlaneSettings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def answer_ok(received: Any, wire: Any) -> None:
    await wire.json({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})


def post(client: httpx.AsyncClient, url: str, body: object, **headers: str) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return client.post(url, content=raw, headers=sent)


async def test_body_that_needs_no_change_passes_byte_for_byte(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Spaces, key order, number forms and escapes are the client's."""
    raw = b'{ "model":"m" ,"temperature":1.0e0, "messages":[{"role":"user","content":"\\u00e9"}]}\n'
    async with engine(answer_ok) as fake, balancer(instance(fake)) as proxy:
        await post(client, proxy.url + CHAT, raw)

        assert fake.received[0].body == raw


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'\xef\xbb\xbf{"model":"m","prompt":"p"}', id="byte-order-mark"),
        pytest.param('{"model":"m","prompt":"p"}'.encode("utf-16"), id="utf-16"),
        pytest.param(b'{"model":"m","prompt":"p\\ud800"}', id="lone-surrogate"),
        pytest.param(b'{"model":"m","prompt":[1,2],"cache_salt":"\\udfff"}', id="in-the-salt"),
        pytest.param(b'{"model":"m","prompt":"p","temperature":NaN}', id="nan"),
    ],
)
async def test_body_that_engines_can_read_passes_byte_for_byte(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, raw: bytes
) -> None:
    """Python's parser takes more than the standard; what to make of it is theirs."""
    async with engine(answer_ok) as fake, balancer(instance(fake)) as proxy:
        answer = await post(client, proxy.url + COMPLETIONS, raw)

        assert answer.status_code == 200
        assert fake.received[0].body == raw


async def test_forbidden_fields_and_headers_are_removed(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """No client steers KV transfers, ranks or event reports."""
    body = {
        "model": "m",
        "prompt": "p",
        "kv_transfer_params": {"do_remote_prefill": True},
        "ec_transfer_params": {},
        "vllm_xargs": {"kv_cache_report_mode": "full", "other": 1},
        "request_id": "___prefill_addr_1.2.3.4:5___decode_addr_1:2_x",
    }
    async with engine(answer_ok) as fake, balancer(instance(fake)) as proxy:
        await post(client, proxy.url + COMPLETIONS, body, x_data_parallel_rank="1")

        (received,) = fake.received
        assert received.json == {"model": "m", "prompt": "p", "vllm_xargs": {"other": 1}}
        assert received.header("x-data-parallel-rank") is None


async def test_end_to_end_headers_pass_and_hop_by_hop_ones_stop(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Tracing and authorization reach the engine; what concerns the connection doesn't."""
    async with engine(answer_ok) as fake, balancer(instance(fake)) as proxy:
        await post(
            client,
            proxy.url + COMPLETIONS,
            {"prompt": "p"},
            traceparent="00-1",
            authorization="Bearer user1",
            connection="keep-alive, x-private",
            x_private="1",
        )

        (received,) = fake.received
        assert received.header("traceparent") == "00-1"
        assert received.header("authorization") == "Bearer user1"
        assert received.header("x-private") is None
        assert received.header("connection") is None
        assert received.header("host") == fake.url.removeprefix("http://")


async def test_engine_key_replaces_the_clients(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Where the operator gave an engine's key, the client's own never reaches it (F52)."""
    async with engine(answer_ok) as fake:
        async with balancer(instance(fake), engine_key=lambda _: "k1") as proxy:
            await post(client, proxy.url + COMPLETIONS, {"prompt": "p"}, authorization="Bearer u")

        headers = [value for name, value in fake.received[0].headers if name == "authorization"]
        assert headers == ["Bearer k1"]


@pytest.mark.parametrize(
    ("sent", "body_id", "expected"),
    [
        pytest.param("abc", None, "abc", id="clients"),
        pytest.param(None, None, "made-up-1", id="none"),
        pytest.param(None, "from-body", "from-body", id="body"),
        pytest.param("abc", "from-body", "abc", id="header-wins"),
        pytest.param("___prefill_addr_1:2___decode_addr_3:4_x", None, "made-up-1", id="addresses"),
        pytest.param("a b", None, "made-up-1", id="odd-characters"),
    ],
)
async def test_request_id_is_one_for_client_and_engine(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    sent: str | None,
    body_id: str | None,
    expected: str,
) -> None:
    """The client's id if it is a clean one, else a made-up one; the client gets it back (F39)."""
    body = {"prompt": "p"} | ({"request_id": body_id} if body_id else {})
    headers = {"x_request_id": sent} if sent else {}
    async with engine(answer_ok) as fake, balancer(instance(fake)) as proxy:
        answer = await post(client, proxy.url + COMPLETIONS, body, **headers)

        assert fake.received[0].header("x-request-id") == expected
        assert answer.headers["x-request-id"] == expected
        assert proxy.records[0].request_id == expected


async def test_query_string_is_kept(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """The target is the client's."""
    async with engine(answer_ok) as fake, balancer(instance(fake)) as proxy:
        await post(client, proxy.url + COMPLETIONS + "?a=b%20c", {"prompt": "p"})

        assert fake.received[0].target == COMPLETIONS + "?a=b%20c"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        pytest.param(CHAT, b"{", 400, None, id="malformed"),
        pytest.param(CHAT, b"", 400, None, id="empty"),
        pytest.param(CHAT, b"[1]", 400, None, id="no-object"),
        pytest.param(CHAT, b"[" * 100_000, 400, None, id="deep"),
        pytest.param(CHAT, {"model": "m"}, 400, "messages", id="no-messages"),
        pytest.param(CHAT, {"messages": "hi"}, 400, "messages", id="messages-text"),
        pytest.param(COMPLETIONS, {"model": "m"}, 400, "prompt", id="no-prompt"),
        pytest.param(COMPLETIONS, {"prompt": 5}, 400, "prompt", id="prompt-number"),
        pytest.param(COMPLETIONS, {"prompt": "p", "stream": "oui"}, 400, "stream", id="stream"),
        pytest.param(
            COMPLETIONS,
            {"prompt": "p", "stream": True, "stream_options": {"include_usage": 2}},
            400,
            "stream_options.include_usage",
            id="include-usage",
        ),
        pytest.param(COMPLETIONS, {"prompt": "p", "model": 42}, 400, "model", id="model-number"),
        pytest.param(COMPLETIONS, {"prompt": "p", "model": "nope"}, 404, "model", id="unknown"),
    ],
)
async def test_clients_faults_are_told_without_an_engine(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    path: str,
    body: object,
    status: int,
    param: str | None,
) -> None:
    """4xx in OpenAI's form, and no engine is asked (F44, F59)."""
    async with engine(answer_ok) as fake, balancer(instance(fake)) as proxy:
        answer = await post(client, proxy.url + path, body)

        assert answer.status_code == status
        assert answer.json()["error"]["param"] == param
        assert answer.headers["content-type"] == "application/json"
        assert fake.received == []
        (record,) = proxy.records
        assert record.status == status
        assert record.error is not None


@pytest.mark.parametrize("model", [None, "", "absent"])
async def test_no_model_means_the_only_one(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, model: str | None
) -> None:
    """Like an engine, a fleet of one base model needs no name (F59)."""
    body: dict[str, Any] = {"prompt": "p"} | ({} if model == "absent" else {"model": model})
    async with engine(answer_ok) as fake, balancer(instance(fake)) as proxy:
        answer = await post(client, proxy.url + COMPLETIONS, body)

        assert answer.status_code == 200
        assert proxy.records[0].base_model == "m"


async def test_no_model_among_several_is_the_clients_fault(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Nobody guesses which model was meant."""
    async with engine(answer_ok) as fake:
        fleet = (instance(fake), instance("http://127.0.0.1:9", "e1", base="other"))
        async with balancer(*fleet) as proxy:
            answer = await post(client, proxy.url + COMPLETIONS, {"prompt": "p"})

        assert answer.status_code == 400


async def test_known_model_without_an_available_instance_is_503(
    balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """An outage is not the client's fault (F59)."""
    async with balancer(instance("http://127.0.0.1:9", healthy=False)) as proxy:
        answer = await post(client, proxy.url + COMPLETIONS, {"prompt": "p", "model": "m"})

        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_instance"


async def test_empty_fleet_is_503(balancer: Any, client: httpx.AsyncClient) -> None:
    """Nobody knows a model yet."""
    async with balancer() as proxy:
        assert proxy.fleet == Fleet()
        answer = await post(client, proxy.url + COMPLETIONS, {"prompt": "p", "model": "m"})

        assert answer.status_code == 503


async def test_adapter_is_routed_under_its_own_name(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Only the instance that lists the adapter gets it."""
    async with engine(answer_ok) as plain, engine(answer_ok) as adapted:
        fleet = (instance(plain, "e0"), instance(adapted, "e1", adapters=("ad1",)))
        async with balancer(*fleet) as proxy:
            for _ in range(3):
                await post(client, proxy.url + COMPLETIONS, {"prompt": "p", "model": "ad1"})

        assert (len(plain.received), len(adapted.received)) == (0, 3)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        pytest.param("GET", CHAT, 405, id="get"),
        pytest.param("DELETE", "/v1/embeddings", 405, id="delete"),
        pytest.param("POST", "/v1/nonsense", 404, id="unknown"),
        pytest.param("POST", "/release_kv_cache_memory", 404, id="dev"),
    ],
)
async def test_wrong_method_or_path(
    balancer: Any, client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    """405 names what is allowed, 404 is in OpenAI's form (F44)."""
    async with balancer() as proxy:
        answer = await client.request(method, proxy.url + path)

        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert ("allow" in answer.headers) == (status == 405)


async def test_body_over_the_limit_is_413(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Refused by its declared length, and by its real one if none is declared."""

    async def pieces() -> Any:
        for _ in range(3):
            yield b"x" * 1000

    settings = DataPlaneSettings(max_body_bytes=2000)
    async with engine(answer_ok) as fake, balancer(instance(fake), settings=settings) as proxy:
        declared = await post(client, proxy.url + COMPLETIONS, b"x" * 2001)
        streamed = await client.post(proxy.url + COMPLETIONS, content=pieces())

        assert (declared.status_code, streamed.status_code) == (413, 413)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        (
            "full",
            {
                "x-kvlb-instance",
                "x-kvlb-prefill",
                "x-kvlb-reason",
                "x-kvlb-overlap-tokens",
                "x-kvlb-trust",
                "x-kvlb-trust-reason",
            },
        ),
        ("id", set()),
        ("off", set()),
    ],
)
async def test_own_headers_by_setting(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    setting: Any,
    names: set[str],
) -> None:
    """`full` explains the decision, `id` gives the request id alone, `off` nothing."""
    settings = DataPlaneSettings(headers=setting)
    async with (
        engine(answer_ok) as fake,
        balancer(instance(fake), settings=settings, reads=True) as proxy,
    ):
        answer = await post(client, proxy.url + COMPLETIONS, {"prompt": [1, 2, 3]})

        assert {name for name in answer.headers if name.startswith("x-kvlb-")} == names
        assert ("x-request-id" in answer.headers) == (setting != "off")


@pytest.mark.parametrize(("setting", "is_told"), [("full", True), ("id", False)])
async def test_client_that_asks_why_is_told(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    setting: Any,
    is_told: bool,
) -> None:
    """Every candidate with its terms, and why one won; the engine hears nothing of the question."""
    settings = DataPlaneSettings(headers=setting)
    async with (
        engine(answer_ok) as fake,
        balancer(instance(fake), settings=settings, reads=True) as proxy,
    ):
        answer = await post(
            client, proxy.url + COMPLETIONS, {"prompt": [1, 2, 3]}, x_kvlb_explain="1"
        )

        assert ("is the only candidate" in answer.headers.get("x-kvlb-why", "")) == is_told
        assert ("/0 cost=" in answer.headers.get("x-kvlb-candidates", "")) == is_told
        assert "x-kvlb-explain" not in dict(fake.received[0].headers)


async def test_record_tells_what_happened(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """One record per request, complete."""
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }

    async def script(received: Any, wire: Any) -> None:
        await wire.json({"usage": usage})

    async with engine(script) as fake, balancer(instance(fake), reads=True) as proxy:
        await post(client, proxy.url + COMPLETIONS, {"prompt": list(range(9)), "model": "m"})
        (record,) = await proxy.wait_for_records(1)

    assert (record.status, record.error, record.model, record.stream) == (200, None, "m", False)
    assert (record.prompt_tokens, record.prompt_source) == (9, "ids")
    assert (record.available_tokens, record.chosen_tokens) == (0, 0)
    assert record.cached_tokens == 4
    (leg,) = record.legs
    assert (leg.kind, leg.alias, leg.status, leg.completion_tokens) == ("decode", "e0", 200, 2)
    times = [record.arrived_s, leg.started_s, leg.first_byte_s, record.first_byte_s, leg.ended_s]
    assert times == sorted(times)
    assert leg.ended_s <= record.ended_s
    assert proxy.health == [(fake.url, True, None)]
