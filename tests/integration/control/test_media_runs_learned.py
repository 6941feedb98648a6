"""Media that clients named: learned from an engine that renders, then part of the prompt."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from balancer.core.record import LegRecord, RequestRecord
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.settings.control import TokensSettings
from balancer.fleet.engine_client import EngineClient
from balancer.tokens.media import MAX_SURPRISES, WAITING, MediaWatch
from balancer.tokens.pool import TokenPool
from balancer.tokens.reader import PromptReader
from balancer.tokens.stage import TokensStage
from indexer.core.hashing import MediumPlace
from indexer.core.index import Prompt

MakeRequest = Callable[..., GenerateRequest]
FleetOf = Callable[..., Any]

RENDER = "/v1/chat/completions/render"
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{% if part.type == 'image' %}<|endoftext|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}"""
PATCHES = [77, 78, 78, 78, 79]
"""What the engine's model makes of any picture."""
TOKENIZER = Path(__file__).parents[2] / "tokenizer"


def picture(uuid: str | None = "a") -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": "http://a/1.png"}}
    return part if uuid is None else {**part, "uuid": uuid}


def chat(*parts: Any) -> dict[str, Any]:
    content = [each if isinstance(each, dict) else {"type": "text", "text": each} for each in parts]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}]}


TOKENS = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
STAND_IN = TOKENS.token_to_id("<|endoftext|>")


def theirs(body: dict[str, Any]) -> tuple[list[int], list[MediumPlace]]:
    """The engine's prompt, and where its media stand."""
    ids: list[int] = []
    places: list[MediumPlace] = []
    parts = body["messages"][0]["content"]
    media = [part for part in parts if part["type"] != "text"]
    text = "".join(part.get("text", "<|endoftext|>") for part in parts)
    whole = TOKENS.encode(f"<|im_start|>user\n{text}<|im_end|>\n", add_special_tokens=False)
    for token in whole.ids:
        if token != STAND_IN:
            ids.append(token)
            continue
        places.append(
            MediumPlace(
                identifier=f"hash of {media[len(places)].get('uuid')}",
                offset_tokens=len(ids),
                tokens=len(PATCHES),
            )
        )
        ids += PATCHES
    return ids, places


def rendered(body: dict[str, Any], **changes: Any) -> tuple[int, bytes]:
    """The engine's answer about `body`."""
    ids, places = theirs(body)
    features = {
        "mm_hashes": {"image": [each.identifier for each in places]},
        "mm_placeholders": {
            "image": [{"offset": each.offset_tokens, "length": each.tokens} for each in places]
        },
    }
    return 200, json.dumps({"token_ids": ids, "features": features, **changes}).encode()


def is_prompt_of(prompt: Prompt, body: dict[str, Any]) -> bool:
    ids, places = theirs(body)
    other = Prompt(prompt.namespace, ids, media=places)
    return prompt.tokens == other.tokens and list(prompt.keys(4)) == list(other.keys(4))


@dataclass
class Eyes:
    """A reader that learns."""

    reader: PromptReader
    watch: MediaWatch
    fleet: Any
    make_request: MakeRequest

    async def read(self, body: dict[str, Any], **fields: Any) -> PromptView:
        return await self.reader.read(self.fleet, self.make_request(body, **fields))

    async def learned(self, body: dict[str, Any]) -> PromptView:
        """Read until its media are known."""
        async with asyncio.timeout(20):
            view = await self.read(body)
            while view.source != "with_media":
                await asyncio.sleep(0.005)
                view = await self.read(body)
        return view


See = Callable[..., AbstractAsyncContextManager[Eyes]]


@pytest.fixture
def seeing(
    client: EngineClient,
    now: list[float],
    tmp_path: Path,
    fleet_of: FleetOf,
    make_request: MakeRequest,
) -> See:
    """Starts a reader of a model that sees, before these engines."""
    for path in TOKENIZER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    @asynccontextmanager
    async def start(*engines: Any, fallback: bool = True, **fields: Any) -> AsyncIterator[Eyes]:
        settings = TokensSettings(
            models={"tiny": str(tmp_path)}, deadline_s=5.0, engine_fallback=fallback
        )
        pool = TokenPool(settings.models, workers=1, cache_bytes=1 << 20, strftime_now=str)
        watch = MediaWatch(client, lambda: now[0], **fields)
        reader = PromptReader(
            settings=settings, pool=pool, engine=client, clock=lambda: now[0], media=watch
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(watch.run())
            yield Eyes(reader, watch, fleet_of(*engines), make_request)
            task.cancel()
        pool.close()

    return start


async def test_named_picture_is_part_of_the_next_prompt(engine: Any, seeing: See) -> None:
    """The first one goes by the text before it; the engine is asked once, beside the request."""
    first = chat("Look at this picture, it is of last summer: ", picture("a"), "What is it?")
    second = chat("Before it. ", picture("a"), " after it ", picture("a"), " and on.")
    engine.answers[RENDER] = rendered(first)
    async with seeing(engine) as eyes:
        before = await eyes.read(first)
        now_known = await eyes.learned(first)
        other = await eyes.read(second)

    assert [before.source, other.source] == ["before_media", "with_media"]
    assert is_prompt_of(now_known.prompts[0], first)
    assert is_prompt_of(other.prompts[0], second)
    asked = [body for path, body, _ in engine.received if path == RENDER]
    assert asked[0] == {**first, "mm_payload": "none"}


@pytest.mark.parametrize(
    ("uuid", "fields", "fallback"),
    [
        pytest.param(None, {}, True, id="no-name"),
        pytest.param("a", {"lora": "sql"}, True, id="adapter"),
        pytest.param("a", {}, False, id="engines-are-not-asked"),
    ],
)
async def test_others_are_never_asked_about(
    uuid: str | None, fields: dict[str, Any], fallback: bool, engine: Any, seeing: See
) -> None:
    """An engine would fetch and decode them, for one request."""
    body = chat("Look at this picture, it is of last summer: " * 4, picture(uuid))
    engine.answers[RENDER] = rendered(body)
    async with seeing(engine, fallback=fallback) as eyes:
        views = [await eyes.read(body, **fields) for _ in range(3)]

    assert {view.source for view in views} == {"before_media"}
    assert engine.calls(RENDER) == 0


async def test_picture_that_nothing_comes_before_is_learned_too(engine: Any, seeing: See) -> None:
    """It can't be matched until it is known."""
    body = chat(picture("a"), "What is it?")
    engine.answers[RENDER] = rendered(body)
    async with seeing(engine) as eyes:
        first = await eyes.read(body)
        view = await eyes.learned(body)

    assert first.unscorable == "multimodal"
    assert is_prompt_of(view.prompts[0], body)


async def test_engine_that_writes_another_prompt_is_left_alone(engine: Any, seeing: See) -> None:
    """After a few tries: its media aren't where our template has them."""
    body = chat("Look: " * 20, picture("a"))
    engine.answers[RENDER] = rendered(body, token_ids=[1, 2, 3])
    async with seeing(engine) as eyes:
        async with asyncio.timeout(20):
            while engine.calls(RENDER) < MAX_SURPRISES:
                await eyes.read(body)
        sources = [(await eyes.read(body)).source for _ in range(2 * WAITING)]

    assert set(sources) == {"before_media"}
    assert engine.calls(RENDER) <= MAX_SURPRISES + WAITING


@pytest.mark.parametrize("answer", [(500, b""), (400, b"{}"), (200, b"{"), (200, b"[]")])
async def test_engine_that_cannot_tell_costs_nothing(
    answer: tuple[int, bytes], engine: Any, seeing: See
) -> None:
    """The next request has it asked again."""
    body = chat("Look: " * 20, picture("a"))
    engine.answers[RENDER] = answer
    async with seeing(engine) as eyes:
        await eyes.read(body)
        await engine.wait_for_calls(RENDER, 1)
        engine.answers[RENDER] = rendered(body)

        assert (await eyes.learned(body)).source == "with_media"


async def test_engine_that_does_not_render_is_not_asked_again(
    engine_factory: Any, now: list[float], seeing: See
) -> None:
    """The others are; nobody is, if none does, until some minutes later."""
    body = chat("Look: " * 20, picture("a"))
    async with engine_factory() as old, seeing(old) as eyes:
        await eyes.read(body)
        await old.wait_for_calls(RENDER, 1)
        async with asyncio.timeout(20):
            while eyes.watch.willing(eyes.fleet, "tiny"):
                await eyes.read(body)
        await eyes.read(body)
        old.answers[RENDER] = rendered(body)
        now[0] = 1000.0
        view = await eyes.learned(body)

    assert view.source == "with_media"


async def test_requests_never_wait_for_an_engine(engine: Any, seeing: See) -> None:
    """One that doesn't answer has a few waiting, the others aren't learned from."""
    engine.stall.add(RENDER)
    async with seeing(engine) as eyes:
        for number in range(3 * WAITING):
            view = await eyes.read(chat("Look: " * 20, picture(f"{number}")))
            assert view.source == "before_media"


async def test_what_is_remembered_is_bounded(engine: Any, seeing: See) -> None:
    """The media asked for longest ago are learned anew."""
    bodies = [chat("Look: " * 20, picture(name)) for name in "abc"]
    async with seeing(engine, max_run_tokens=2 * len(PATCHES)) as eyes:
        for body in bodies:
            engine.answers[RENDER] = rendered(body)
            await eyes.learned(body)
        engine.answers[RENDER] = (500, b"")
        sources = [(await eyes.read(body)).source for body in bodies]

    assert sources == ["before_media", "with_media", "with_media"]


async def test_text_that_says_the_token_of_a_picture_is_not_taken_for_one(
    engine: Any, seeing: See
) -> None:
    """Then it goes by what stands before."""
    body = chat("Look: " * 20, picture("a"))
    engine.answers[RENDER] = rendered(body)
    async with seeing(engine) as eyes:
        await eyes.learned(body)
        view = await eyes.read(chat("Look: " * 20, picture("a"), "<|endoftext|>"))

    assert view.source == "before_media"


async def test_engine_that_counts_otherwise_has_its_media_forgotten(
    engine: Any, client: EngineClient, tmp_path: Path, seeing: See
) -> None:
    """A client may give another picture the same name; what was learned is learned anew."""
    body = chat("Look: " * 20, picture("a"))
    engine.answers[RENDER] = rendered(body)
    async with seeing(engine) as eyes:
        known = await eyes.learned(body)
        eyes.watch.surprised("tiny")
        engine.answers[RENDER] = (500, b"")
        view = await eyes.read(body)

    assert [known.source, view.source] == ["with_media", "before_media"]


@pytest.mark.parametrize(("counted", "surprises"), [(5, 0), (6, 1)])
def test_stage_hears_of_other_counts(
    counted: int, surprises: int, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts with media that were made here."""
    heard: list[str] = []
    monkeypatch.setattr(MediaWatch, "surprised", lambda _, model: heard.append(model))
    stage = TokensStage(
        TokensSettings(),
        client,
        registry=CollectorRegistry(),
        clock=lambda: 0.0,
        strftime_now=str,
    )
    record = RequestRecord(request_id="r", path="/", arrived_s=0.0, prompt_tokens=5)
    record.prompt_source, record.base_model = "with_media", "tiny"
    leg = LegRecord(kind="decode", alias="m", overlap_tokens=0, started_s=0.0)
    leg.prompt_tokens = counted
    record.legs = [leg]

    stage.on_record(record)
    stage.close()

    assert heard == ["tiny"] * surprises
