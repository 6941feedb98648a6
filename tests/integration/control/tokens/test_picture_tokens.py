"""Chats with pictures: the text before the first one can be matched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Fleet
from balancer.core.request import GenerateRequest
from balancer.tokens.reader import PromptReader
from indexer.core.index import Prompt

MakeRequest = Callable[..., GenerateRequest]
MakeReader = Callable[..., PromptReader]
FleetOf = Callable[..., Any]

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
