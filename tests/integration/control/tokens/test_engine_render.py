"""Tokens from engines that render: what is asked, what is believed, and who is asked instead."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from balancer.core.control_errors import EngineCallError, RenderAbsentError, TokenizeRefusedError
from balancer.core.fleet.transfer_facts import NO_FACTS, Inquiry
from balancer.core.prompt.rendered import Rendered, RenderQuestion
from balancer.core.request import Endpoint, GenerateRequest
from balancer.fleet.engine_client import EngineClient
from balancer.tokens.engine_tokens import ABSENT_S
from balancer.tokens.reader import PromptReader
from indexer.core.hashing import MediumPlace
from indexer.core.index import Prompt
from indexer.core.types import InstanceId

SameTokens = Callable[[Prompt, list[int]], bool]

MakeRequest = Callable[..., GenerateRequest]
MakeReader = Callable[..., PromptReader]
FleetOf = Callable[..., Any]

CHAT = "/v1/chat/completions/render"
HI = [{"role": "user", "content": "hi"}]


def rendered(*token_ids: int, **fields: Any) -> tuple[int, bytes]:
    return 200, json.dumps({"token_ids": token_ids, "sampling_params": {}, **fields}).encode()


async def test_engine_that_renders_is_asked_to(
    engine: Any,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    same_tokens: SameTokens,
) -> None:
    """With the client's own body, so that every field counts that shapes the prompt."""
    engine.answers[CHAT] = rendered(4, 5)
    body = {"messages": HI, "reasoning_effort": "high", "max_tokens": 3}

    view = await make_reader().read(fleet_of(engine), make_request(body))

    assert view.source == "engine"
    assert same_tokens(view.prompts[0], [4, 5])
    asked = [(path, sent) for path, sent, _ in engine.received]
    assert asked == [(CHAT, {**body, "mm_payload": "none"})]


async def test_completions_are_rendered_as_a_list(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """One call for all prompts of a request, however many."""
    one = json.loads(rendered(7)[1])
    engine.answers["/v1/completions/render"] = (200, json.dumps([one] * 8).encode())

    view = await make_reader().read(fleet_of(engine), make_request({"prompt": list("abcdefgh")}))

    assert [prompt.tokens for prompt in view.prompts] == [1] * 8


@pytest.mark.parametrize("status", [403, 404, 405, 501])
async def test_engine_that_does_not_render_is_left_alone(
    status: int,
    engine: Any,
    now: list[float],
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """Its `/tokenize` is asked in the same breath; some minutes later it may have been restarted."""
    engine.answers[CHAT] = (status, b"{}")
    reader = make_reader(breaker_failures=1)

    async def read(text: str) -> str:
        body = {"messages": [{"role": "user", "content": text}]}
        return (await reader.read(fleet_of(engine), make_request(body))).source

    before = [await read("a"), await read("b")]
    calls = engine.calls(CHAT)
    now[0] = ABSENT_S
    after = await read("c")

    assert [*before, after] == ["engine"] * 3
    assert [calls, engine.calls(CHAT)] == [1, 2]


@pytest.mark.parametrize(
    ("has_render", "outcome"), [(True, ("engine", None)), (False, ("opening", "unsupported_field"))]
)
async def test_what_tokenize_has_no_field_for_is_rendered(
    has_render: bool,
    outcome: tuple[str, str | None],
    engine: Any,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """Or stays unscorable: another prompt's tokens would be worse."""
    if has_render:
        engine.answers["/v1/messages/render"] = rendered(4, 5)
    request = msgspec.structs.replace(
        make_request({"messages": HI, "max_tokens": 9, "thinking": {"type": "disabled"}}),
        endpoint=Endpoint.MESSAGES,
    )

    view = await make_reader().read(fleet_of(engine), request)

    assert (view.source, view.unscorable) == outcome
    assert engine.calls("/tokenize") == 0


@pytest.mark.parametrize("has_render", [True, False])
async def test_text_that_would_be_cut_is_rendered(
    has_render: bool,
    engine: Any,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """What the local tokenizer leaves to the engine, `/tokenize` doesn't know either."""
    if has_render:
        engine.answers["/v1/completions/render"] = (200, b'[{"token_ids": [1, 2]}]')
    engine.answers["/tokenize"] = (200, b'{"tokens": [1, 2, 3]}')
    reader = make_reader(models={"tiny": tokenizer_directory})
    body = {"prompt": "a " * 50, "truncate_prompt_tokens": 2}

    first = await reader.read(fleet_of(engine), make_request(body))
    await reader.read(fleet_of(engine), make_request(body))

    assert first.unscorable == (None if has_render else "truncated")
    assert engine.calls("/tokenize") == (not has_render)


async def test_prompt_that_render_refuses_goes_to_tokenize(
    engine: Any,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    same_tokens: SameTokens,
) -> None:
    """Some fields are refused there that have nothing to do with the prompt."""
    engine.answers[CHAT] = (400, b"{}")

    view = await make_reader().read(fleet_of(engine), make_request({"messages": HI}))

    assert view.source == "engine"
    assert same_tokens(view.prompts[0], [7, 8, 9])


async def test_prompt_that_nobody_else_can_tell_is_refused(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """The engine will say why."""
    engine.answers["/v1/completions/render"] = (400, b"{}")

    view = await make_reader().read(fleet_of(engine), make_request({"prompt": list("abcdefgh")}))

    assert view.unscorable == "refused"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((500, b"{}"), id="failed"),
        pytest.param((200, b"{"), id="no-json"),
        pytest.param((200, b'{"token_ids": "x"}'), id="wrong-json"),
        pytest.param((200, b'{"token_ids": [-1]}'), id="wrong-ids"),
    ],
)
async def test_engine_that_renders_nonsense_counts_as_failed(
    answer: tuple[int, bytes],
    engine: Any,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """It costs the request its overlap, and the engine a mark in its breaker."""
    engine.answers[CHAT] = answer
    reader = make_reader(breaker_failures=1)

    views = [await reader.read(fleet_of(engine), make_request({"messages": HI})) for _ in range(2)]

    assert [view.unscorable for view in views] == ["no_tokenizer"] * 2
    assert engine.calls(CHAT) == 1


async def test_answer_shape_is_part_of_what_is_remembered(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """Some models are told of it in their prompt; sampling parameters change nothing."""
    engine.answers[CHAT] = rendered(4, 5)
    reader = make_reader()
    bodies = [
        {"messages": HI},
        {"messages": HI, "temperature": 0.5},
        {"messages": HI, "response_format": {"type": "json_object"}},
    ]

    sources = [(await reader.read(fleet_of(engine), make_request(body))).source for body in bodies]

    assert sources == ["engine", "cache", "engine"]


async def test_media_are_told_in_their_order(engine: Any, client: EngineClient) -> None:
    """Over all kinds, by where they stand."""
    engine.answers[CHAT] = rendered(
        1,
        2,
        3,
        features={
            "mm_hashes": {"image": ["b"], "audio": ["a"]},
            "mm_placeholders": {
                "image": [{"offset": 2, "length": 1}],
                "audio": [{"offset": 0, "length": 2}],
            },
            "kwargs_data": None,
        },
    )

    told = await client.render(engine.id, RenderQuestion(path=CHAT, body={}))

    assert told == (
        Rendered(
            token_ids=[1, 2, 3],
            media=(
                MediumPlace(identifier="a", offset_tokens=0, tokens=2),
                MediumPlace(identifier="b", offset_tokens=2, tokens=1),
            ),
        ),
    )


@pytest.mark.parametrize(
    "features",
    [
        {"mm_hashes": {"image": ["b"]}, "mm_placeholders": {}},
        {"mm_hashes": {"image": ["b"]}, "mm_placeholders": {"image": []}},
    ],
)
async def test_media_that_contradict_each_other_are_no_answer(
    features: dict[str, Any], engine: Any, client: EngineClient
) -> None:
    """Half of it may be wrong, too."""
    engine.answers[CHAT] = rendered(1, features=features)

    with pytest.raises(EngineCallError, match="bad_answer"):
        await client.render(engine.id, RenderQuestion(path=CHAT, body={}))


NESTED = b'{"a":' + b"[" * 100_000
CALLS: dict[str, Callable[[EngineClient, InstanceId], Awaitable[object]]] = {
    "/v1/models": lambda client, engine: client.list_models(engine),
    "/version": lambda client, engine: client.find_release(engine),
    "/tokenize": lambda client, engine: client.tokenize(engine, {}),
    CHAT: lambda client, engine: client.render(engine, RenderQuestion(path=CHAT, body={})),
    "/query": lambda client, engine: client.learn(
        Inquiry(url=f"{engine}/query", read=lambda _: NO_FACTS)
    ),
}


@pytest.mark.parametrize("path", CALLS)
async def test_what_is_nested_too_deep_is_no_answer(
    path: str, engine: Any, client: EngineClient
) -> None:
    """An engine's failure, and no bug of ours."""
    engine.answers[path] = (200, NESTED)

    with pytest.raises(EngineCallError):
        await CALLS[path](client, engine.id)


async def test_what_may_be_missing_may_be_nested_too_deep(
    engine: Any, client: EngineClient
) -> None:
    """Ranks and sleep are taken for untold."""
    engine.answers |= {"/kv_event_sources": (200, NESTED), "/is_sleeping": (200, NESTED)}

    assert list(await client.find_ranks(engine.id)) == []
    assert await client.is_asleep(engine.id) is False


@pytest.mark.parametrize(
    ("status", "error"), [(404, RenderAbsentError), (422, TokenizeRefusedError)]
)
async def test_client_tells_absent_from_refused(
    status: int, error: type[EngineCallError], engine: Any, client: EngineClient
) -> None:
    """The first says something of the engine, the second of the request."""
    engine.answers[CHAT] = (status, b"{}")

    with pytest.raises(error):
        await client.render(engine.id, RenderQuestion(path=CHAT, body={}))
