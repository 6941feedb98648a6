"""Chat templates: where they are found, which is chosen, and what happens to bad ones."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from balancer.core.prompt.chat_template import ChatTemplate
from balancer.core.prompt.shape import ChatShape
from balancer.core.prompt.template_inputs import TemplateManner
from balancer.core.request import GenerateRequest
from balancer.core.settings.control import EngineFlags
from balancer.tokens.directory import load_tokenizer
from balancer.tokens.reader import PromptReader
from balancer.tokens.templates import ReadyTemplate, Templates
from indexer.core.index import Prompt

SameTokens = Callable[[Prompt, list[int]], bool]
TokensOf = Callable[[str, str], Sequence[int]]
Put = Callable[[Path, str, object], None]

Read = Callable[..., Awaitable[Any]]
MakeRequest = Callable[..., GenerateRequest]
MakeReader = Callable[..., PromptReader]
FleetOf = Callable[..., Any]

HI = [{"role": "user", "content": "hi"}]

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


async def test_template_that_loops_is_stopped_and_left_alone(
    read: Read, tokenizer_copy: Path, make_reader: MakeReader, put: Put
) -> None:
    """It costs a few renderings, never a thread; texts are read as ever."""
    put(tokenizer_copy, "chat_template.jinja", LOOPS)
    reader = make_reader(models={"tiny": str(tokenizer_copy)}, workers=1, deadline_s=50.0)

    views = [await read(reader, {"messages": HI}) for _ in range(4)]
    text = await read(reader, {"prompt": "hi"})

    assert {view.unscorable for view in views} == {"template_endless"}
    assert text.source == "local"


async def test_template_that_fails_refuses(
    read: Read, tokenizer_copy: Path, make_reader: MakeReader, put: Put
) -> None:
    """Whatever it stumbles over; the engine's own will, too."""
    put(tokenizer_copy, "chat_template.jinja", "{{ messages[0].nothing.at_all }}")
    reader = make_reader(models={"tiny": str(tokenizer_copy)}, engine_fallback=False)

    view = await read(reader, {"messages": HI})

    assert view.unscorable == "refused"


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_templates_of_clients_are_rendered_where_they_are_trusted(
    is_trusted: bool,
    engine: Any,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    tokenizer_directory: str,
    same_tokens: SameTokens,
    tokens_of: TokensOf,
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


TEMPLATES = [
    {"name": "default", "template": "plain"},
    {
        "name": "tool_use",
        "template": "with tools {{ eos_token }}"
        "{{ additional_special_tokens if additional_special_tokens is defined }}",
    },
]
PRINTS_ALL = "{{ [eos_token, image_token, audio_token, eoi] | join('|') }}"
ADDED = {"__type": "AddedToken", "content": "<i>", "special": True}
# What `special_tokens_map` of transformers 5.19 is for them, which its templates see.
OWN_TOKENS: list[tuple[str, dict[str, Any], str]] = [
    ("own-none", {}, "<e>|||"),
    ("own-fields", {"image_token": "<i>", "audio_token": ADDED}, "<e>|<i>|<i>|"),
    ("own-table", {"extra_special_tokens": {"image_token": ADDED, "eoi": "<o>"}}, "<e>|<i>||<o>"),
    (
        "own-both",
        {"audio_token": "<a>", "extra_special_tokens": {"audio_token": "<b>", "eoi": "<o>"}},
        "<e>||<b>|<o>",
    ),
    ("own-list", {"extra_special_tokens": ["<i>"]}, "<e>|||"),
    ("own-old-table", {"additional_special_tokens": {"image_token": "<i>"}}, "<e>|<i>||"),
    ("own-saved", {"model_specific_special_tokens": {"image_token": "<i>"}}, "<e>|<i>||"),
    (
        "own-saved-and-field",
        {"model_specific_special_tokens": {"image_token": "<i>"}, "audio_token": "<a>"},
        "<e>||<a>|",
    ),
    ("own-over-usual", {"extra_special_tokens": {"eos_token": "<z>"}}, "<z>|||"),
    ("own-no-tokens", {"image_token": None, "audio_token": {"content": "<a>"}}, "<e>|||"),
    ("own-flag", {"add_eos_token": False, "image_token": ""}, "<e>|||"),
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
        *(
            pytest.param(
                {"tokenizer_config.json": {"chat_template": PRINTS_ALL, "eos_token": "<e>"} | told},
                {},
                expected,
                id=name,
            )
            for name, told, expected in OWN_TOKENS
        ),
        pytest.param({"tokenizer_config.json": {}}, {}, None, id="none"),
        pytest.param({"config.json": {"model_type": "gpt_oss"}}, {}, None, id="own-renderer"),
    ],
)
async def test_template_is_found_where_models_ship_it(
    read: Read,
    files: dict[str, Any],
    fields: dict[str, Any],
    expected: str | None,
    tokenizer_copy: Path,
    make_reader: MakeReader,
    put: Put,
) -> None:
    """Without a template, or with a model that has none, chats are the engine's business."""
    if "config.json" not in files:
        (tokenizer_copy / "chat_template.jinja").unlink()
    for name, value in files.items():
        put(tokenizer_copy, name, value)
    reader = make_reader(models={"tiny": str(tokenizer_copy)}, engine_fallback=False)

    chat = await read(reader, {"messages": HI, **fields})
    if expected is None:
        assert chat.unscorable == "no_tokenizer"
        return
    text = await read(reader, {"prompt": expected})

    assert list(chat.prompts[0].keys(1)) == list(text.prompts[0].keys(1))


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
    tokenizer_copy: Path,
    tokens_of: TokensOf,
    put: Put,
) -> None:
    """By whether there are tools, and by what the operator says."""
    (tokenizer_copy / "additional_chat_templates").mkdir()
    for name, value in files.items():
        put(tokenizer_copy, name, value)
    if flags.chat_template is not None:
        flags = EngineFlags(chat_template=str(tokenizer_copy / flags.chat_template))
    tokenizer = load_tokenizer(tokenizer_copy, str, flags)

    found = [tokenizer.encode(shape) for shape in (ASKED, ChatShape(messages=HI, tools=TOOLS))]

    assert [list(ids[0]) for ids in found] == [
        list(tokens_of(str(tokenizer_copy), text)) for text in expected
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
