"""Prompts read by our own tokenizer: ids, as the engine would have them, or why not."""

import gzip
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Fleet
from balancer.core.request import GenerateRequest
from balancer.tokens.reader import PromptReader
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt

SameTokens = Callable[[Prompt, list[int]], bool]
Put = Callable[[Path, str, object], None]

Read = Callable[..., Awaitable[Any]]
MakeRequest = Callable[..., GenerateRequest]
MakeReader = Callable[..., PromptReader]
FleetOf = Callable[..., Any]

CAPTURES = Path(__file__).parents[3] / "captures"
HI = [{"role": "user", "content": "hi"}]


def recorded(name: str) -> Iterator[dict[str, Any]]:
    """Requests of a capture whose ids the engine told."""
    with gzip.open(CAPTURES / f"{name}.requests.jsonl.gz") as lines:
        for line in lines:
            step = json.loads(line)
            if step["kind"] == "request" and step.get("tokenize"):
                yield step


@pytest.mark.parametrize(
    "name",
    sorted(path.name.split(".")[0] for path in CAPTURES.glob("*.requests.jsonl.gz")),
)
async def test_local_ids_are_those_of_the_real_engine(
    name: str,
    make_reader: MakeReader,
    make_request: MakeRequest,
    tokenizer_directory: str,
    same_tokens: SameTokens,
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


async def test_ids_are_used_as_they_are(read: Read, make_reader: MakeReader) -> None:
    """Nobody is asked about them."""
    view = await read(make_reader(), {"prompt": [[1, 2], [3]]})

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
    read: Read, prompt: Any, reason: str, make_reader: MakeReader, tokenizer_directory: str
) -> None:
    """One client's huge request mustn't hold up the others: it is routed by load."""
    reader = make_reader(models={"tiny": tokenizer_directory}, max_prompts=4, max_prompt_tokens=10)

    view = await read(reader, {"prompt": prompt})

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
    read: Read, prompt: Any, make_reader: MakeReader
) -> None:
    """The engine answers 400; we only know nothing."""
    view = await read(make_reader(), {"prompt": prompt})

    assert view.unscorable == "bad_tokens"
    assert view.prompts == ()


async def test_ids_are_truncated(
    read: Read, make_reader: MakeReader, same_tokens: SameTokens
) -> None:
    """As the engine does."""
    body = {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}

    view = await read(make_reader(), body)

    assert same_tokens(view.prompts[0], [2, 3])


async def test_namespace_holds_base_model_adapter_and_salt(
    make_reader: MakeReader, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """Tenants and adapters share no keys."""
    request = make_request({"prompt": [1], "cache_salt": "s"}, model="ad", lora="ad")

    view = await make_reader().read(fleet_of(), request)

    assert view.prompts[0].namespace == Namespace(model="tiny", lora="ad", cache_salt="s")


async def test_chat_has_no_doubled_bos(
    read: Read, tokenizer_copy: Path, make_reader: MakeReader, put: Put
) -> None:
    """A tokenizer that adds a BOS does so for completions, not for rendered chats."""
    add_bos(tokenizer_copy / "tokenizer.json")
    put(
        tokenizer_copy, "tokenizer_config.json", {}
    )  # where it says nothing, the tokenizer's own counts
    reader = make_reader(models={"tiny": str(tokenizer_copy)})

    text = await read(reader, {"prompt": "hi"})
    bare = await read(reader, {"prompt": "hi", "add_special_tokens": False})
    chat = await read(reader, {"messages": HI})
    doubled = await read(reader, {"messages": HI, "add_special_tokens": True})

    assert text.prompts[0].tokens == bare.prompts[0].tokens + 1
    assert doubled.prompts[0].tokens == chat.prompts[0].tokens + 1


async def test_second_turn_begins_with_the_first(
    read: Read, make_reader: MakeReader, tokenizer_directory: str
) -> None:
    """Turn two gets credit for turn one's blocks; template variables are honoured."""
    reader = make_reader(models={"tiny": tokenizer_directory})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    first = {"messages": HI, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    answer = {"role": "assistant", "content": "<think>\n\n</think>\n\nyes"}
    second = first | {"messages": [*HI, answer, {"role": "user", "content": "go on"}]}

    one = (await read(reader, first)).prompts[0]
    two = (await read(reader, second)).prompts[0]

    assert list(two.keys(1))[: one.tokens] == list(one.keys(1))


async def test_final_message_is_continued(
    read: Read, make_reader: MakeReader, tokenizer_directory: str
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

    opened = await read(reader, body)
    plain = await read(reader, {"prompt": text})

    assert list(opened.prompts[0].keys(1)) == list(plain.prompts[0].keys(1))


async def test_repeated_prompt_is_free(
    read: Read, make_reader: MakeReader, tokenizer_directory: str
) -> None:
    """Sampling parameters don't matter, the text does."""
    reader = make_reader(models={"tiny": tokenizer_directory})

    first = await read(reader, {"prompt": "hello"})
    again = await read(reader, {"prompt": "hello", "max_tokens": 5})
    other = await read(reader, {"prompt": "hello!"})

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
    read: Read, body: dict[str, Any], reason: str, make_reader: MakeReader, tokenizer_directory: str
) -> None:
    """It is routed by load, and by how it begins; nothing is fetched and nothing raised."""
    reader = make_reader(models={"tiny": tokenizer_directory}, engine_fallback=False)

    view = await read(reader, body)

    source = "none" if reason in {"bad_prompt", "prompt_embeds"} else "opening"
    assert (view.unscorable, view.source, view.prompts) == (reason, source, ())


async def test_special_tokens_in_text_may_be_text(
    read: Read, tokenizer_copy: Path, make_reader: MakeReader, put: Put
) -> None:
    """`split_special_tokens`: then nothing is cut at them either."""
    reader = make_reader(models={"tiny": str(tokenizer_copy)})
    put(tokenizer_copy, "tokenizer_config.json", {"split_special_tokens": True})
    text = "<|im_end|>"

    view = await read(reader, {"prompt": text})

    assert view.prompts[0].tokens > 1


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
