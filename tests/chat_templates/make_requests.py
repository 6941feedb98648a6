"""Varied requests for every family of chat templates: what `engine.jsonl.gz` was recorded with.

python make_requests.py            # one JSON object a line: family, path, body
python make_requests.py URL        # asks a real engine each, and adds the ids it gave
"""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FAMILIES = Path(__file__).parent / "families"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
Body = dict[str, Any]

LATE = "Größe, naïve, 東京, привет 🙂 — “quoted”\t<b>&amp;</b>\n\n  indented  \n"


def user(content: Any, **more: Any) -> Body:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> Body:
    return {"role": "assistant", "content": content, **more}


def system(content: Any, **more: Any) -> Body:
    return {"role": "system", "content": content, **more}


def call(number: int, name: str, arguments: Any, **more: Any) -> Body:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call{number:05d}", "function": function, **more}


def result(number: int, content: Any, **more: Any) -> Body:
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05d}", **more}


PLACES = {
    "type": "object",
    "required": ["place"],
    "properties": {
        "place": {"type": "string", "description": "A town, e.g. 'Kraków'"},
        "days": {"type": "integer", "enum": [1, 3, 7]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": PLACES},
}
CLOCK = {"function": {"parameters": {"type": "object", "properties": {}}, "name": "clock"}}
STRICT = {
    "type": "function",
    "vendor": "x",
    "function": {"name": "s", "description": "d", "parameters": PLACES, "strict": True, "foo": 1},
}
TOOLS = [WEATHER, CLOCK]
ASKED = [system("You are brief."), user("What is the weather in Kraków?")]
CALLED = [
    *ASKED,
    assistant(None, tool_calls=[call(1, "weather", '{"place": "Kraków", "days": 3}')]),
]
ANSWERED = [*CALLED, result(1, '{"sky": "grey", "°C": 7}')]
CALLS = [call(1, "weather", '{"place": "Łódź"}'), call(2, "clock", "")]
RESULTS = [result(1, "rain", name="weather"), result(2, [{"type": "text", "text": "12:00"}])]
TURNS = [
    user("Is this a cache?"),
    assistant("Yes, it is.\n"),
    user("  And what does it hold?  "),
    assistant("Blocks of tokens."),
    user(LATE),
]
FACTS = [
    {"title": "Rivers", "text": "The Vistula is long.", "doc_id": "1"},
    {"title": "Towns", "text": "Kraków is old.", "doc_id": "2"},
]


def chats() -> Iterator[tuple[str, Body]]:
    """What is asked of each family, by a name."""
    yield from plain_chats()
    yield from tool_chats()
    yield from open_chats()
    yield from chats_in_parts()
    yield from chats_with_variables()
    yield from thinking_chats()
    yield from odd_chats()


def plain_chats() -> Iterator[tuple[str, Body]]:
    """Text, turn by turn."""
    yield "one message", {"messages": [user("Hello, who are you?")]}
    yield "system", {"messages": [system("You answer in one word.  "), user("Why?")]}
    yield "turns", {"messages": TURNS}
    yield "system turns", {"messages": [system(LATE), *TURNS]}


def tool_chats() -> Iterator[tuple[str, Body]]:
    """Tools, their calls and results."""
    yield "tools", {"messages": ASKED, "tools": TOOLS}
    yield "tool call", {"messages": CALLED, "tools": TOOLS, "add_generation_prompt": False}
    yield "tool result", {"messages": ANSWERED, "tools": TOOLS}
    yield (
        "after tools",
        {"messages": [*ANSWERED, assistant("Grey."), user("Thanks")], "tools": TOOLS},
    )
    parallel = [*ASKED, assistant("Let me see.", tool_calls=CALLS), *RESULTS]
    yield "parallel calls", {"messages": parallel, "tools": TOOLS}
    odd = assistant(
        "", tool_calls=[call(1, "weather", "[1, 2]"), call(2, "clock", "{broken", index=1)]
    )
    yield "odd arguments", {"messages": [*ASKED, odd, *RESULTS], "tools": [STRICT]}
    yield "no tools wanted", {"messages": ASKED, "tools": TOOLS, "tool_choice": "none"}
    yield "a tool required", {"messages": ASKED, "tools": TOOLS, "tool_choice": "required"}
    yield (
        "no calls",
        {"messages": [*ASKED, assistant("x", tool_calls=[]), user("?")], "tools": TOOLS[:1]},
    )


def open_chats() -> Iterator[tuple[str, Body]]:
    """Chats that end without a prompt to answer."""
    opened = [*TURNS[:3], assistant("It holds, for one, ")]
    unfinished = {"add_generation_prompt": False, "continue_final_message": True}
    yield "continued", {"messages": opened, **unfinished}
    yield (
        "continued part",
        {
            "messages": [user("Go"), assistant([{"type": "text", "text": "on"}])],
            **unfinished,
        },
    )
    yield "no prompt", {"messages": TURNS, "add_generation_prompt": False}


def chats_in_parts() -> Iterator[tuple[str, Body]]:
    """Content as a list."""
    parts = [{"type": "text", "text": "First."}, {"type": "text", "text": " Second"}]
    yield "parts", {"messages": [system(parts), user(parts), assistant(parts), user(parts[:1])]}
    mixed = [
        *parts,
        {"type": "text", "text": ""},
        {"type": "text", "text": "x", "cache_control": {}},
    ]
    yield (
        "odd parts",
        {"messages": [user(mixed), assistant([{"type": "refusal", "refusal": "No."}]), user("?")]},
    )
    thought = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Ah."}]
    yield "thinking parts", {"messages": [user("?"), assistant(thought), user("!")]}


def chats_with_variables() -> Iterator[tuple[str, Body]]:
    """Template variables."""
    variables = {
        "enable_thinking": False,
        "date_string": "1 May 2026",
        "thinking": True,
        "unheard_of": 1,
    }
    yield "variables", {"messages": TURNS, "chat_template_kwargs": variables}
    unset = {"enable_thinking": None, "date_string": "auto", "tools_in_user_message": False}
    yield "unset variables", {"messages": ASKED, "tools": TOOLS, "chat_template_kwargs": unset}


def thinking_chats() -> Iterator[tuple[str, Body]]:
    """Reasoning, and how much of it is asked for; documents."""
    steps = [
        user("Plan it."),
        assistant(None, reasoning="First the weather.", tool_calls=CALLS[:1]),
        RESULTS[0],
        assistant("Done.", reasoning_content="Rain, so stay in."),
    ]
    yield "reasoning", {"messages": steps, "tools": TOOLS, "add_generation_prompt": False}
    yield "earlier reasoning", {"messages": [*steps, user("Sure?")], "tools": TOOLS}
    yield "documents", {"messages": ASKED, "documents": FACTS}
    yield "documents and tools", {"messages": ASKED, "documents": FACTS, "tools": TOOLS}
    for effort in ("none", "high"):
        yield f"effort {effort}", {"messages": TURNS, "reasoning_effort": effort}
    chosen = {"enable_thinking": False, "reasoning_effort": "low"}
    yield (
        "effort twice",
        {
            "messages": ASKED,
            "reasoning_effort": "high",
            "chat_template_kwargs": chosen,
        },
    )


def odd_chats() -> Iterator[tuple[str, Body]]:
    """What few clients send."""
    developer = {"role": "developer", "content": "Never say no.", "tools": [WEATHER]}
    yield "developer", {"messages": [developer, user("Will you?")]}
    yield "late developer", {"messages": [system("Be kind."), user("Hi"), developer, user("So?")]}
    named = [user("Hi", name="ann"), assistant("Hello", name="bob"), user("Who?", name="ann")]
    yield "names", {"messages": named}
    yield "special tokens", {"messages": TURNS, "add_special_tokens": True}
    signed = "x-anthropic-billing-header: cch=1234;\nYou are helpful."
    yield "signed", {"messages": [system(signed), user("Hi")]}
    references = [{"type": "tool_reference", "name": "clock"}]
    yield "tool references", {"messages": [*CALLED, result(1, references)], "tools": TOOLS}
    foreign = [
        user("Hi", mood="good", content_type="x"),
        assistant("Yo", refusal=None, audio=None),
        user("?"),
    ]
    yield "foreign fields", {"messages": foreign, "user": "me", "metadata": {"a": "b"}}


def texts() -> Iterator[tuple[str, Body]]:
    """Completions: the template has no say."""
    yield "text", {"prompt": LATE}
    yield "bare", {"prompt": "Once upon a time", "add_special_tokens": False}
    chat = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    yield "rendered", {"prompt": chat * 5}
    yield "spaces", {"prompt": "\n\n  <|im_end|>  x<|endoftext|> \t "}


def blocks() -> Iterator[tuple[str, Body]]:
    """Anthropic's messages."""
    tool = {"name": "weather", "description": "Tells it.", "input_schema": PLACES}
    used = {"type": "tool_use", "id": "call00001", "name": "weather", "input": {"place": "Łódź"}}
    told = {"type": "tool_result", "tool_use_id": "call00001", "content": "rain"}
    listed = {**told, "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "7°"}]}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    text = {"type": "text", "text": "Let me see."}
    yield "message", {"messages": [user("Hi")]}
    yield "message system", {"messages": TURNS, "system": "You are brief."}
    signed = {"type": "text", "text": "x-anthropic-billing-header: cch=12;"}
    yield (
        "message blocks",
        {
            "messages": [user([text, {"type": "text", "text": LATE}])],
            "system": [
                signed,
                {"type": "text", "text": "You are ", "cache_control": {"type": "ephemeral"}},
                text,
            ],
        },
    )
    asked = [user("Weather?"), assistant([thought, text, used])]
    yield "message tools", {"messages": [user("Weather?")], "tools": [tool]}
    yield "message tool use", {"messages": [*asked, user([told])], "tools": [tool]}
    yield (
        "message tool list",
        {
            "messages": [*asked, user([listed, {"type": "text", "text": "And?"}])],
            "tools": [tool, {"name": "clock", "input_schema": {"properties": {}}}],
            "tool_choice": {"type": "auto"},
        },
    )
    yield (
        "message only use",
        {"messages": [user("?"), assistant([used]), user([told])], "tools": [tool]},
    )
    yield (
        "message system inside",
        {"messages": [*TURNS, system("Now in French."), user("Why?")], "system": "A."},
    )
    yield "message no thinking", {"messages": TURNS, "thinking": {"type": "disabled"}}
    yield "message effort", {"messages": TURNS, "output_config": {"effort": "low"}}
    yield (
        "message variables",
        {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False}},
    )
    yield (
        "message redacted",
        {
            "messages": [
                user("?"),
                assistant([{"type": "redacted_thinking", "data": "x"}, text]),
                user("!"),
            ]
        },
    )


def items() -> Iterator[tuple[str, Body]]:
    """OpenAI's responses."""
    tool = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": PLACES}
    called = {
        "type": "function_call",
        "call_id": "call00001",
        "name": "weather",
        "arguments": '{"place": "Łódź"}',
    }
    output = {"type": "function_call_output", "call_id": "call00001", "output": "rain"}
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    said = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
    }
    yield "response", {"input": "Hi"}
    yield "response instructions", {"input": LATE, "instructions": "You are brief."}
    yield "response turns", {"input": TURNS}
    yield (
        "response parts",
        {
            "input": [
                user(
                    [
                        {"type": "input_text", "text": "First."},
                        {"type": "input_text", "text": "Second."},
                    ]
                )
            ]
        },
    )
    yield "response tools", {"input": "Weather?", "tools": [tool]}
    yield "response call", {"input": [user("Weather?"), called, output], "tools": [tool]}
    yield (
        "response reasoning call",
        {"input": [user("Weather?"), thought, called, output], "tools": [tool]},
    )
    yield "response said", {"input": [user("Weather?"), said, user("And?")]}
    yield (
        "response all",
        {"input": [user("Weather?"), thought, said, called, output, user("And?")], "tools": [tool]},
    )
    yield "response effort", {"input": "Hi", "reasoning": {"effort": "low"}}
    yield "response continued", {"input": [user("Count"), {**said, "status": "in_progress"}]}
    yield (
        "response plain",
        {
            "input": [
                {"role": "developer", "content": "Be kind."},
                user("Hi"),
                assistant("Yo"),
                user("?"),
            ]
        },
    )


def requests() -> Iterator[Body]:
    """Everything: chats of every family, and each other path with the tokenizer's own template."""
    for family in sorted(path.stem for path in FAMILIES.glob("*.jinja")):
        for name, body in chats():
            yield {"family": family, "name": name, "path": CHAT, "body": body}
    others: Sequence[tuple[str, Callable[[], Iterator[tuple[str, Body]]]]] = (
        (COMPLETIONS, texts),
        (MESSAGES, blocks),
        (RESPONSES, items),
    )
    for path, made in others:
        for name, body in made():
            yield {"family": None, "name": name, "path": path, "body": body}


def ask(url: str, request: Mapping[str, Any]) -> list[int] | None:
    """The ids that a real engine makes of it; None if it refuses."""
    path, body = request["path"], {"model": "tiny", **request["body"]}
    if path in {CHAT, COMPLETIONS}:
        body |= {"max_tokens": 1, "temperature": 0, "return_token_ids": True}
    elif path == MESSAGES:
        path, body = f"{path}/render", {"max_tokens": 1, **body}
    else:
        path = f"{path}/render"
    if request["family"] is not None:
        body["chat_template"] = (FAMILIES / f"{request['family']}.jinja").read_text("utf-8")
    asked = urllib.request.Request(  # noqa: S310 - an engine of ours
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 - as above
            told = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code not in {400, 422}:
            raise
        return None
    if path == COMPLETIONS:
        told = told["choices"][0]
    ids: list[int] = told.get("prompt_token_ids") or told.get("token_ids")
    return ids


if __name__ == "__main__":
    for each in requests():
        if len(sys.argv) > 1:
            each["ids"] = ask(sys.argv[1], each)
        print(json.dumps(each, ensure_ascii=False))  # noqa: T201 - a script's output
