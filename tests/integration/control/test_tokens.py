"""From requests to tokens, over real tokenizers, threads and HTTP."""

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Fleet
from balancer.core.prompt.chat_template import ChatTemplate
from balancer.core.prompt.shape import ChatShape, TextShape, UnscorableError
from balancer.core.prompt.template_inputs import TemplateManner
from balancer.core.request import GenerateRequest
from balancer.core.settings.control import EngineFlags
from balancer.tokens.directory import TokenizerLoadError, load_tokenizer
from balancer.tokens.pool import TokenPool
from balancer.tokens.reader import PromptReader
from balancer.tokens.templates import ReadyTemplate, Templates
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt

MakeRequest = Callable[..., GenerateRequest]
MakeReader = Callable[..., PromptReader]
FleetOf = Callable[..., Any]

CAPTURES = Path(__file__).parents[2] / "captures"
HI = [{"role": "user", "content": "hi"}]


def recorded(name: str) -> Iterator[dict[str, Any]]:
    """Requests of a capture whose ids the engine told."""
    with gzip.open(CAPTURES / f"{name}.requests.jsonl.gz") as lines:
        for line in lines:
            step = json.loads(line)
            if step["kind"] == "request" and step.get("tokenize"):
                yield step


def same_tokens(prompt: Prompt, ids: list[int]) -> bool:
    """Compare through the keys of one-token blocks: a prompt doesn't give its ids back."""
    other = Prompt(prompt.namespace, ids)
    return prompt.tokens == other.tokens and list(prompt.keys(1)) == list(other.keys(1))


@pytest.mark.parametrize(
    "name",
    sorted(path.name.split(".")[0] for path in CAPTURES.glob("*.requests.jsonl.gz")),
)
async def test_local_ids_are_those_of_the_real_engine(
    name: str, make_reader: MakeReader, make_request: MakeRequest, tokenizer_directory: str
) -> None:
    """Every recorded completion and chat, tools included, gives the ids `/tokenize` gave."""
    reader = make_reader(models={"tiny": tokenizer_directory}, engine_fallback=False)
    compared = 0

    for step in recorded(name):
        view = await reader.read(Fleet(), make_request(step["body"]))
        assert view.unscorable is None, step["label"]
        assert same_tokens(view.prompts[0], step["tokenize"]), step["label"]
        compared += 1

    assert compared > 5


async def test_ids_are_used_as_they_are(
    make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """Nobody is asked about them."""
    view = await make_reader().read(fleet_of(), make_request({"prompt": [[1, 2], [3]]}))

    assert view.source == "ids"
    assert [prompt.tokens for prompt in view.prompts] == [2, 1]
    assert view.prompt_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        pytest.param([[1]] * 400_000, "too_many_prompts", id="prompts"),
        pytest.param([[-1] * 5, [1] * 6], "too_long", id="ids"),
        pytest.param("a b c d e f g h i j k l", "too_long", id="text"),
    ],
)
async def test_too_much_is_neither_packed_nor_hashed(
    prompt: Any,
    reason: str,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """One client's huge request mustn't hold up the others: it is routed by load."""
    reader = make_reader(models={"tiny": tokenizer_directory}, max_prompts=4, max_prompt_tokens=10)

    view = await reader.read(fleet_of(), make_request({"prompt": prompt}))

    assert view.unscorable == reason
    assert view.prompts == ()


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param([-1], id="negative"),
        pytest.param([2**32], id="too-large"),
        pytest.param([1, "a"], id="text-inside"),
        pytest.param([[1], [None]], id="null-inside"),
    ],
)
async def test_ids_that_are_none_are_left_to_the_engine(
    prompt: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """The engine answers 400; we only know nothing."""
    view = await make_reader().read(fleet_of(), make_request({"prompt": prompt}))

    assert view.unscorable == "bad_tokens"
    assert view.prompts == ()


async def test_ids_are_truncated(
    make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """As the engine does."""
    body = {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}

    view = await make_reader().read(fleet_of(), make_request(body))

    assert same_tokens(view.prompts[0], [2, 3])


async def test_namespace_holds_base_model_adapter_and_salt(
    make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """Tenants and adapters share no keys."""
    request = make_request({"prompt": [1], "cache_salt": "s"}, model="ad", lora="ad")

    view = await make_reader().read(fleet_of(), request)

    assert view.prompts[0].namespace == Namespace(model="tiny", lora="ad", cache_salt="s")


async def test_chat_has_no_doubled_bos(
    tmp_path: Path, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """A tokenizer that adds a BOS does so for completions, not for rendered chats."""
    copy_tokenizer(tmp_path)
    add_bos(tmp_path / "tokenizer.json")
    put(tmp_path, "tokenizer_config.json", {})  # where it says nothing, the tokenizer's own counts
    reader = make_reader(models={"tiny": str(tmp_path)})

    text = await reader.read(fleet_of(), make_request({"prompt": "hi"}))
    bare = await reader.read(
        fleet_of(), make_request({"prompt": "hi", "add_special_tokens": False})
    )
    chat = await reader.read(fleet_of(), make_request({"messages": HI}))
    doubled = await reader.read(
        fleet_of(), make_request({"messages": HI, "add_special_tokens": True})
    )

    assert text.prompts[0].tokens == bare.prompts[0].tokens + 1
    assert doubled.prompts[0].tokens == chat.prompts[0].tokens + 1


async def test_second_turn_begins_with_the_first(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """Turn two gets credit for turn one's blocks; template variables are honoured."""
    reader = make_reader(models={"tiny": tokenizer_directory})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    first = {"messages": HI, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    answer = {"role": "assistant", "content": "<think>\n\n</think>\n\nyes"}
    second = first | {"messages": [*HI, answer, {"role": "user", "content": "go on"}]}

    one = (await reader.read(fleet_of(), make_request(first))).prompts[0]
    two = (await reader.read(fleet_of(), make_request(second))).prompts[0]

    assert list(two.keys(1))[: one.tokens] == list(one.keys(1))


async def test_final_message_is_continued(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """The open message is the end of the prompt."""
    reader = make_reader(models={"tiny": tokenizer_directory})
    messages = [*HI, {"role": "assistant", "content": "well, "}]
    body = {
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nwell, "
    )

    opened = await reader.read(fleet_of(), make_request(body))
    plain = await reader.read(fleet_of(), make_request({"prompt": text}))

    assert list(opened.prompts[0].keys(1)) == list(plain.prompts[0].keys(1))


async def test_repeated_prompt_is_free(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """Sampling parameters don't matter, the text does."""
    reader = make_reader(models={"tiny": tokenizer_directory})

    first = await reader.read(fleet_of(), make_request({"prompt": "hello"}))
    again = await reader.read(fleet_of(), make_request({"prompt": "hello", "max_tokens": 5}))
    other = await reader.read(fleet_of(), make_request({"prompt": "hello!"}))

    assert [first.source, again.source, other.source] == ["local", "cache", "local"]
    assert list(again.prompts[0].keys(1)) == list(first.prompts[0].keys(1))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "multimodal",
            id="unknown-medium",
        ),
        pytest.param({"prompt": None, "prompt_embeds": "x"}, "prompt_embeds", id="embeds"),
        pytest.param({"prompt": "a " * 50, "truncate_prompt_tokens": 2}, "truncated", id="cut"),
        pytest.param({"prompt": "\ud800"}, "bad_prompt", id="no-utf8"),
        pytest.param({"messages": [{"role": "tool"}], "tools": [{}]}, "bad_prompt", id="bad-tool"),
        pytest.param(
            {
                "messages": HI,
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "refused",
            id="contradiction",
        ),
        pytest.param({"messages": HI, "chat_template": "x"}, "unsupported_field", id="template"),
    ],
)
async def test_what_cannot_be_scored_has_a_reason(
    body: dict[str, Any],
    reason: str,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """It is routed by load, and by how it begins; nothing is fetched and nothing raised."""
    reader = make_reader(models={"tiny": tokenizer_directory}, engine_fallback=False)

    view = await reader.read(fleet_of(), make_request(body))

    source = "none" if reason in {"bad_prompt", "prompt_embeds"} else "opening"
    assert (view.unscorable, view.source, view.prompts) == (reason, source, ())


SEES_PARTS = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{% if part.type == 'image' %}<|vision|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}"""


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat_about(*parts: dict[str, Any]) -> dict[str, Any]:
    """A system prompt, then one message of these parts."""
    system = {"role": "system", "content": "You look at pictures. " * 40}
    return {"messages": [system, {"role": "user", "content": list(parts)}]}


LOOK = {"type": "text", "text": "Here is one of many pictures that I took last summer: "}
WHAT = {"type": "text", "text": "What is it?"}


@pytest.mark.parametrize("sees_parts", [False, True], ids=["joined", "parts"])
async def test_text_before_a_picture_can_be_matched(
    sees_parts: bool,
    tmp_path: Path,
    make_reader: MakeReader,
    make_request: MakeRequest,
    tokenizer_directory: str,
) -> None:
    """F11: as far as any chat with that beginning, whatever the picture; and never further."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((Path(tokenizer_directory) / name).read_bytes())
    if sees_parts:
        (tmp_path / "chat_template.jinja").write_text(SEES_PARTS)
    reader = make_reader(models={"tiny": str(tmp_path)})

    async def read(*parts: dict[str, Any]) -> Prompt:
        view = await reader.read(Fleet(), make_request(chat_about(*parts)))
        assert view.unscorable is None
        return view.prompts[0]

    first = await read(LOOK, picture("http://a/1.png"), WHAT)
    second = await read(LOOK, picture("http://a/2.png"), WHAT)
    system_only = await read({"type": "text", "text": "No picture."})
    text_only = await read(LOOK, {"type": "text", "text": "none."})

    keys = list(first.keys(1))
    assert keys == list(second.keys(1))
    other = text_only if sees_parts else system_only
    assert keys == list(other.keys(1))[: len(keys)]
    assert (len(keys) > len(list(system_only.keys(1)))) == sees_parts
    assert first.tokens > 500 + len(keys)


@pytest.mark.parametrize("has_tokenizer", [False, True])
async def test_picture_that_nothing_comes_before_is_left_to_the_engine(
    has_tokenizer: bool,
    engine: Any,
    tmp_path: Path,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """F12: routed by load; nobody is asked to look at it, which would fetch it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(tokenizer_directory) / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(SEES_PARTS)
    reader = make_reader(models={"tiny": str(tmp_path)} if has_tokenizer else {})
    body = {"messages": [{"role": "user", "content": [picture("http://a/1.png"), WHAT]}]}

    view = await reader.read(fleet_of(engine), make_request(body))

    assert (view.unscorable, view.prompts) == ("multimodal", ())
    assert engine.calls("/tokenize") == 0


async def test_chat_with_a_picture_that_would_be_cut_is_unscorable(
    make_reader: MakeReader, make_request: MakeRequest, tokenizer_directory: str
) -> None:
    """Where it would be cut depends on how long the picture is."""
    reader = make_reader(models={"tiny": tokenizer_directory})
    body = {**chat_about(picture("http://a/1.png")), "truncate_prompt_tokens": 50}

    view = await reader.read(Fleet(), make_request(body))

    assert view.unscorable == "truncated"


async def test_deadline_passes_and_the_prompt_is_remembered(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """A long prompt costs its first request the overlap, and its repeat nothing."""
    reader = make_reader(models={"tiny": tokenizer_directory}, deadline_s=0.001)
    request = make_request({"prompt": "some words to read " * 30_000})

    first = await reader.read(fleet_of(), request)
    async with asyncio.timeout(10):
        view = await reader.read(fleet_of(), request)
        while view.source != "cache":
            await asyncio.sleep(0.01)
            view = await reader.read(fleet_of(), request)

    assert first.unscorable == "timeout"


async def test_full_queue_is_left_alone(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """More prompts than threads can take in time are routed by load at once."""
    reader = make_reader(models={"tiny": tokenizer_directory}, workers=1)
    text = "some words to read " * 10_000
    await reader.read(fleet_of(), make_request({"prompt": "load it"}))

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(reader.read(fleet_of(), make_request({"prompt": f"{number} {text}"})))
            for number in range(10)
        ]

    assert [task.result().unscorable for task in tasks].count("busy") == 5


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


async def test_template_that_loops_is_stopped_and_left_alone(
    tmp_path: Path, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """It costs a few renderings, never a thread; texts are read as ever."""
    copy_tokenizer(tmp_path)
    put(tmp_path, "chat_template.jinja", LOOPS)
    reader = make_reader(models={"tiny": str(tmp_path)}, workers=1, deadline_s=50.0)

    views = [await reader.read(fleet_of(), make_request({"messages": HI})) for _ in range(4)]
    text = await reader.read(fleet_of(), make_request({"prompt": "hi"}))

    assert {view.unscorable for view in views} == {"template_endless"}
    assert text.source == "local"


async def test_template_that_fails_refuses(
    tmp_path: Path, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """Whatever it stumbles over; the engine's own will, too."""
    copy_tokenizer(tmp_path)
    put(tmp_path, "chat_template.jinja", "{{ messages[0].nothing.at_all }}")
    reader = make_reader(models={"tiny": str(tmp_path)}, engine_fallback=False)

    view = await reader.read(fleet_of(), make_request({"messages": HI}))

    assert view.unscorable == "refused"


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_templates_of_clients_are_rendered_where_they_are_trusted(
    is_trusted: bool,
    engine: Any,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """As the engine does with its flag; else it is asked."""
    flags = {"tiny": EngineFlags(trust_request_chat_template=is_trusted)}
    reader = make_reader(models={"tiny": tokenizer_directory}, engine_flags=flags)
    own = [f"{{{{ messages[0].content }}}} {number}" for number in range(40)]
    bodies = [{"messages": HI, "chat_template": template} for template in (*own, own[0], "{% x")]

    views = [await reader.read(fleet_of(engine), make_request(body)) for body in bodies]
    plain = await reader.read(fleet_of(engine), make_request({"prompt": "hi 3"}))

    if is_trusted:
        assert same_tokens(views[3].prompts[0], list(tokens_of(tokenizer_directory, "hi 3")))
        assert [views[-2].source, plain.source] == ["cache", "cache"]
        assert views[-1].unscorable == "refused"
    else:
        assert {view.source for view in views[: len(own)]} == {"engine"}


def tokens_of(directory: str, text: str) -> Sequence[int]:
    shape = TextShape(texts=(text,), add_special_tokens=False)
    return load_tokenizer(Path(directory), str).encode(shape)[0]


async def test_short_prompts_do_not_wait_for_long_ones(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """F29: long texts that are new have a thread of their own."""
    reader = make_reader(models={"tiny": tokenizer_directory}, workers=1)
    await reader.read(fleet_of(), make_request({"prompt": "load it"}))
    ended: list[str] = []

    async def read(name: str, text: str) -> None:
        view = await reader.read(fleet_of(), make_request({"prompt": f"{name} {text}"}))
        assert view.source == "local"
        ended.append(name)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(read(f"long {number}", "some words to read " * 40_000))
        for number in range(2):
            group.create_task(read(f"short {number}", "some words"))

    assert ended[-1] == "long 2"


async def test_special_tokens_in_text_may_be_text(
    tmp_path: Path, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """`split_special_tokens`: then nothing is cut at them either."""
    copy_tokenizer(tmp_path)
    reader = make_reader(models={"tiny": str(tmp_path)})
    put(tmp_path, "tokenizer_config.json", {"split_special_tokens": True})
    text = "<|im_end|>"

    view = await reader.read(fleet_of(), make_request({"prompt": text}))

    assert view.prompts[0].tokens > 1


async def test_loop_stays_responsive_while_a_long_prompt_is_read(
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
) -> None:
    """Tokenising happens in threads that let go of the interpreter."""
    reader = make_reader(models={"tiny": tokenizer_directory})
    turns = 0

    async with asyncio.TaskGroup() as group:
        body = {"prompt": "some words to read " * 50_000}
        task = group.create_task(reader.read(fleet_of(), make_request(body)))
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1

    assert task.result().source == "local"
    # Held without a break, the interpreter would leave the loop one turn or two.
    assert turns > 20


async def test_broken_tokenizer_is_remembered(
    tmp_path: Path, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """One attempt to load, not one per request."""
    reader = make_reader(models={"tiny": str(tmp_path)}, engine_fallback=False)

    first = await reader.read(fleet_of(), make_request({"prompt": "a"}))
    copy_tokenizer(tmp_path)
    second = await reader.read(fleet_of(), make_request({"prompt": "a"}))

    assert [first.unscorable, second.unscorable] == ["tokenizer_failed"] * 2


async def test_engine_is_asked_without_a_tokenizer(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """With the body it knows, once per prompt."""
    reader = make_reader()

    first = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))
    again = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))

    assert [first.source, again.source] == ["engine", "cache"]
    assert same_tokens(first.prompts[0], [7, 8, 9])
    assert [body for path, body, _ in engine.received if path == "/tokenize"] == [
        {"model": "tiny", "prompt": "a", "add_special_tokens": True}
    ]


async def test_engine_stands_in_for_a_broken_tokenizer(
    engine: Any,
    tmp_path: Path,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """Also for what the local one can't do."""
    reader = make_reader(models={"tiny": str(tmp_path)})

    view = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))

    assert view.source == "engine"


async def test_engine_is_not_asked_where_the_operator_says_so(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """`engine_fallback: false`."""
    reader = make_reader(engine_fallback=False)

    view = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))

    assert view.unscorable == "no_tokenizer"
    assert engine.received == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param((400, b"{}"), "refused", id="refused"),
        pytest.param((500, b"{}"), "no_tokenizer", id="failed"),
        pytest.param((404, b"{}"), "no_tokenizer", id="no-such-path"),
        pytest.param((200, b"{"), "no_tokenizer", id="no-json"),
        pytest.param((200, b'{"tokens": "x"}'), "no_tokenizer", id="wrong-json"),
        pytest.param((200, b'{"tokens": [-1]}'), "no_tokenizer", id="wrong-ids"),
    ],
)
async def test_engine_that_cannot_tell_costs_no_request(
    answer: tuple[int, bytes],
    reason: str,
    engine: Any,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """Whatever it answers, the request goes on."""
    engine.answers["/tokenize"] = answer

    view = await make_reader().read(fleet_of(engine), make_request({"prompt": "a"}))

    assert view.unscorable == reason


async def test_slow_engine_opens_the_breaker(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """After some timeouts it is left alone until the cool-down is over."""
    engine.stall.add("/tokenize")
    reader = make_reader(deadline_s=0.05, breaker_failures=2, breaker_cool_down_s=5.0)
    views = [
        await reader.read(fleet_of(engine), make_request({"prompt": f"{number}"}))
        for number in range(5)
    ]

    assert [view.unscorable for view in views] == ["timeout"] * 2 + ["no_tokenizer"] * 3
    assert engine.calls("/tokenize") <= 2


async def test_breaker_closes_after_a_good_trial(
    engine: Any,
    now: list[float],
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """The engine is tried again, and used again."""
    engine.answers["/tokenize"] = (500, b"")
    reader = make_reader(breaker_failures=1, breaker_cool_down_s=5.0)
    await reader.read(fleet_of(engine), make_request({"prompt": "a"}))
    del engine.answers["/tokenize"]

    during = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))
    now[0] = 5.0
    after = await reader.read(fleet_of(engine), make_request({"prompt": "a"}))

    assert [during.unscorable, after.source] == ["no_tokenizer", "engine"]


async def test_another_engine_is_asked_when_one_is_gone(
    engine_factory: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """A refused connection is no reason to know nothing; who left the fleet is forgotten."""
    reader = make_reader(breaker_failures=1)
    async with engine_factory() as here:
        async with engine_factory() as gone:
            fleet = fleet_of(gone, here)
        views = [
            await reader.read(fleet, make_request({"prompt": f"{number}"})) for number in range(4)
        ]
        alone = await reader.read(fleet_of(here), make_request({"prompt": "alone"}))
        views.append(alone)

    assert {view.source for view in views} == {"engine"}


async def test_another_engine_is_asked_when_one_is_silent(
    engine_factory: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """Within the same deadline; and it is left alone after some of that."""
    reader = make_reader(deadline_s=2.0, breaker_failures=2, breaker_cool_down_s=60.0)
    async with engine_factory() as here, engine_factory() as hung:
        hung.stall.add("/tokenize")
        views = [
            await reader.read(fleet_of(hung, here), make_request({"prompt": f"{number}"}))
            for number in range(8)
        ]

    assert {view.source for view in views} == {"engine"}
    assert hung.calls("/tokenize") == 2


async def test_many_texts_are_not_worth_as_many_calls(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """A few are."""
    reader = make_reader()

    few = await reader.read(fleet_of(engine), make_request({"prompt": ["a", "b"]}))
    many = await reader.read(fleet_of(engine), make_request({"prompt": list("abcdefgh")}))

    assert len(few.prompts) == 2
    assert many.unscorable == "no_tokenizer"
    assert engine.calls("/tokenize") == 2


async def test_calls_to_engines_are_bounded(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """Tokenising must not compete with inference."""
    engine.stall.add("/tokenize")
    reader = make_reader(deadline_s=0.2, engine_concurrency=2, breaker_failures=100)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(reader.read(fleet_of(engine), make_request({"prompt": f"{number}"})))
            for number in range(5)
        ]

    assert (
        sorted(task.result().unscorable or "" for task in tasks) == ["busy"] * 3 + ["timeout"] * 2
    )


async def test_truncated_text_from_the_engine_is_unscorable(
    engine: Any, make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """`/tokenize` doesn't truncate."""
    body = {"prompt": "a", "truncate_prompt_tokens": 2}

    view = await make_reader().read(fleet_of(engine), make_request(body))

    assert view.unscorable == "truncated"


def copy_tokenizer(directory: Path) -> None:
    """The captures' tokenizer, to be changed."""
    for path in (Path(__file__).parents[2] / "tokenizer").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())


def add_bos(path: Path) -> None:
    """Make a tokenizer put a BOS before every text, as Llama's does."""
    tokenizer = json.loads(path.read_text("utf-8"))
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [4091], "tokens": ["<|endoftext|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer), "utf-8")


def put(directory: Path, name: str, value: object) -> None:
    """Write one file of a tokenizer directory."""
    text = value if isinstance(value, str) else json.dumps(value)
    (directory / name).write_text(text, "utf-8")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({"tokenizer.json": None}, "tokenizer.json is missing", id="missing"),
        pytest.param({"tokenizer.json": "{}"}, "not a tokenizer", id="no-tokenizer"),
        pytest.param({"tokenizer_config.json": "{"}, "tokenizer_config.json", id="broken-config"),
        pytest.param({"tokenizer_config.json": []}, "not a JSON object", id="config-list"),
        pytest.param({"chat_template.jinja": "{% for %}"}, "chat template", id="broken-template"),
    ],
)
def test_directory_that_cannot_be_used_is_refused(
    files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The message says which file is at fault."""
    copy_tokenizer(tmp_path)
    for name, value in files.items():
        (tmp_path / name).unlink(missing_ok=True)
        if value is not None:
            put(tmp_path, name, value)

    with pytest.raises(TokenizerLoadError, match=message):
        load_tokenizer(tmp_path, str)


TEMPLATES = [
    {"name": "default", "template": "plain"},
    {"name": "tool_use", "template": "with tools {{ eos_token }}"},
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("files", "fields", "expected"),
    [
        pytest.param(
            {"tokenizer_config.json": {"chat_template": "from config"}},
            {},
            "from config",
            id="config",
        ),
        pytest.param(
            {"chat_template.json": {"chat_template": "from json"}}, {}, "from json", id="json"
        ),
        pytest.param(
            {"tokenizer_config.json": {"chat_template": TEMPLATES}}, {}, "plain", id="named-default"
        ),
        pytest.param(
            {
                "tokenizer_config.json": {
                    "chat_template": TEMPLATES,
                    "eos_token": {"content": "<end>"},
                    "additional_special_tokens": ["<a>"],
                }
            },
            {"tools": TOOLS},
            "with tools <end>",
            id="named-tool-use",
        ),
        pytest.param({"tokenizer_config.json": {}}, {}, None, id="none"),
        pytest.param({"config.json": {"model_type": "gpt_oss"}}, {}, None, id="own-renderer"),
    ],
)
async def test_template_is_found_where_models_ship_it(
    files: dict[str, Any],
    fields: dict[str, Any],
    expected: str | None,
    tmp_path: Path,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """Without a template, or with a model that has none, chats are the engine's business."""
    copy_tokenizer(tmp_path)
    if "config.json" not in files:
        (tmp_path / "chat_template.jinja").unlink()
    for name, value in files.items():
        put(tmp_path, name, value)
    reader = make_reader(models={"tiny": str(tmp_path)}, engine_fallback=False)

    chat = await reader.read(fleet_of(), make_request({"messages": HI, **fields}))
    if expected is None:
        assert chat.unscorable == "no_tokenizer"
        return
    text = await reader.read(fleet_of(), make_request({"prompt": expected}))

    assert list(chat.prompts[0].keys(1)) == list(text.prompts[0].keys(1))


async def test_tokenizers_can_be_loaded_ahead(tmp_path: Path, tokenizer_directory: str) -> None:
    """A broken one doesn't keep the others from loading."""
    pool = TokenPool(
        {"bad": str(tmp_path), "tiny": tokenizer_directory},
        workers=1,
        cache_bytes=0,
        strftime_now=str,
    )

    await pool.load()

    shape = TextShape(texts=("hi",))
    assert len((await pool.encode("tiny", shape)).tokens) == 1
    with pytest.raises(UnscorableError):
        await pool.encode("bad", shape)
    pool.close()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({"chat_template.jinja": b"\xff"}, "chat_template.jinja", id="no-text"),
        pytest.param({"tokenizer_config.json": b"\xff"}, "tokenizer_config", id="no-json"),
    ],
)
def test_file_that_cannot_be_read_is_named(
    files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    """Whatever is in it."""
    copy_tokenizer(tmp_path)
    for name, value in files.items():
        (tmp_path / name).write_bytes(value)

    with pytest.raises(TokenizerLoadError, match=message):
        load_tokenizer(tmp_path, str)


ASKED = ChatShape(messages=HI)


@pytest.mark.parametrize(
    ("files", "flags", "expected"),
    [
        pytest.param(
            {"additional_chat_templates/tool_use.jinja": "tools", "chat_template.jinja": "plain"},
            EngineFlags(),
            ["plain", "tools"],
            id="more-templates",
        ),
        pytest.param(
            {"chat_template.json": {"chat_template": "processor"}, "chat_template.jinja": "own"},
            EngineFlags(),
            ["processor", "own"],
            id="processor-is-for-chats-without-tools",
        ),
        pytest.param(
            {"mine": "mine"}, EngineFlags(chat_template="mine"), ["mine", "mine"], id="operators"
        ),
    ],
)
def test_templates_are_chosen_as_engines_do(
    files: dict[str, Any],
    flags: EngineFlags,
    expected: list[str],
    tmp_path: Path,
) -> None:
    """By whether there are tools, and by what the operator says."""
    copy_tokenizer(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, value in files.items():
        put(tmp_path, name, value)
    if flags.chat_template is not None:
        flags = EngineFlags(chat_template=str(tmp_path / flags.chat_template))
    tokenizer = load_tokenizer(tmp_path, str, flags)

    found = [tokenizer.encode(shape) for shape in (ASKED, ChatShape(messages=HI, tools=TOOLS))]

    assert [list(ids[0]) for ids in found] == [
        list(tokens_of(str(tmp_path), text)) for text in expected
    ]


def test_named_template_is_found_by_a_client() -> None:
    """`chat_template: tool_use` names one of the model's own."""
    named = {
        name: ChatTemplate(name, special_tokens={}, strftime_now=str)
        for name in ("default", "tool_use")
    }
    templates = Templates(named, manner=TemplateManner(), compile_=lambda _: named["default"])
    shape = ChatShape(messages=HI, chat_template="tool_use")

    assert templates.find(shape).render(shape) == "tool_use"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param({"add_bos_token": True, "bos_token": "<|im_start|>"}, [4092], id="bos"),
        pytest.param({"add_bos_token": True, "bos_token": "no such token"}, [], id="unknown"),
        pytest.param({"add_bos_token": True}, [], id="unnamed"),
        pytest.param({"add_bos_token": False, "bos_token": "<|im_start|>"}, [], id="off"),
    ],
)
def test_ends_are_what_the_configuration_says(
    tokens: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    """Where it says anything; else the tokenizer's own."""
    copy_tokenizer(tmp_path)
    put(tmp_path, "tokenizer_config.json", tokens)
    text = TextShape(texts=("hi",))

    (ids,) = load_tokenizer(tmp_path, str).encode(text)

    assert list(ids) == [*expected, *tokens_of(str(tmp_path), "hi")]


@pytest.mark.parametrize(
    ("template", "system_first", "effort"),
    [
        pytest.param("{{ messages }}", False, "low", id="does-not-care"),
        pytest.param(
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('first') }}{% endif %}{% endfor %}{{ messages }}{{ enable_thinking }}",
            True,
            "none",
            id="wants-system-first",
        ),
    ],
)
def test_templates_are_tried_for_what_messages_need(
    template: str, system_first: bool, effort: str
) -> None:
    """As engines do: by rendering a few words."""
    compiled = ChatTemplate(template, special_tokens={}, strftime_now=str)
    ready = ReadyTemplate(compiled, TemplateManner())
    system = {"role": "system", "content": "b"}
    inside = ChatShape(messages=[*HI, system], merges_system=True)
    off = ChatShape(messages=HI, thinking_is_off=True)
    low = ChatShape(messages=HI, reasoning_effort=effort)
    moved = ChatShape(messages=[system, *HI])

    assert ready.render(off) == ready.render(low)
    assert (ready.render(inside) == ready.render(moved)) == system_first
