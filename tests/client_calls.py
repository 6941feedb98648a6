"""Calls of the `openai` and `anthropic` packages, made once to an engine and once through kvlb.

Loaded by tests/conftest.py (`client_call`). Every call returns something whose fields are compared;
an exception of the package counts as such. What differs from one call to the next anyway (ids,
times) is named in `VOLATILE` and left out on both sides, nothing else is.
"""

import base64
import json
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import yaml

MODEL = "sim"
VOLATILE = frozenset({"id", "created", "created_at", "item_id", "request_id", "completed_at"})
OWN_ERRORS = frozenset({"model_not_found", "response_not_found", "path_not_found"})
"""Codes of errors that kvlb tells itself; engines repeat the status there."""
SAID = frozenset({"text", "content", "delta", "token_ids"})
OWN_HEADERS = frozenset({"date", "server", "connection", "keep-alive", "x-request-id"})
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tell the weather.", "parameters": CITY},
    }
]
HELLO: Any = [{"role": "user", "content": "hello there"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 6, "temperature": 0}
LONG = "x" * 70_000
SOUND = b"RIFF" + bytes(range(256)) * 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """One base URL, and the packages that speak to it."""

    url: str
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    http: httpx.Client


@contextmanager
def opened(url: str) -> Iterator[Clients]:
    """Clients without retries, which would hide errors, and without the environment's proxies."""
    # A context without certificates: reading them costs more than a call.
    bare: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with (
        openai.OpenAI(
            base_url=f"{url}/v1",
            websocket_base_url=f"{url}/v1".replace("http", "ws", 1),
            api_key="key",
            max_retries=0,
            timeout=30,
            http_client=openai.DefaultHttpxClient(trust_env=False, verify=bare),
        ) as for_openai,
        anthropic.Anthropic(
            base_url=url,
            api_key="key",
            max_retries=0,
            timeout=30,
            http_client=anthropic.DefaultHttpxClient(trust_env=False, verify=bare),
        ) as for_anthropic,
        httpx.Client(base_url=url, trust_env=False, timeout=30, verify=bare) as plain,
    ):
        yield Clients(url=url, openai=for_openai, anthropic=for_anthropic, http=plain)


Call = Callable[[Clients], Any]


def outcome(call: Call, clients: Clients) -> Any:
    """What came of a call, without what is different every time."""
    try:
        return scrub(plain(call(clients)))
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        told = {
            "raised": type(error).__name__,
            "status": error.status_code,
            "body": error.body,
            "type": error.response.headers.get("content-type"),
        }
        return scrub(plain(told))


def plain(value: Any) -> Any:
    """The value in the types of JSON."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, Iterable):
        return [plain(each) for each in value]
    return repr(value)


def scrub(value: Any) -> Any:
    """The value without ids and times. Chat and model have no other fields of these names."""
    if isinstance(value, dict):
        return {key: scrub(each) for key, each in value.items() if key not in VOLATILE}
    return [scrub(each) for each in value] if isinstance(value, list) else value


def gist(told: Any) -> Any:
    """A stream without its cuts (engines in a hurry put tokens together), and its last event's stamp."""
    if isinstance(told, dict) and "stream" in told.get("headers", {}).get("content-type", ""):
        events = [each for each in told["body"] if isinstance(each, dict)]
        names: set[str] = set().union(*events) - {"system_fingerprint"}
        return told | {"body": ["".join(_texts(events)), sorted(names)]}
    if not isinstance(told, list) or not all(isinstance(each, dict) for each in told):
        return told
    kinds: list[Any] = []
    for each in told:
        kind = (each.get("type") or each.get("object"), sorted(each))
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    # Choices of one stream take turns as they like.
    ordered = sorted(told, key=lambda each: [each["index"] for each in each.get("choices") or ()])
    return {"text": "".join(_texts(ordered)), "kinds": kinds}


def _texts(value: Any, name: str = "") -> Iterator[str]:
    """Whatever an event says in words, in order."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, name)
    elif isinstance(value, str | int) and name in SAID:
        yield str(value)


def without_own_words(told: Any) -> Any:
    """An error without its `code`, where kvlb has a word for it and engines a number."""
    if not isinstance(told, dict):
        return told
    cut = {key: without_own_words(each) for key, each in told.items()}
    if cut.get("code") in OWN_ERRORS or cut.get("code") == cut.get("status", 404):
        del cut["code"]
    return cut


def _raw(method: str, path: str, **options: Any) -> Call:
    """A request without a package: status, end-to-end headers and bytes."""

    def call(clients: Clients) -> Any:
        answer = clients.http.request(method, path, **options)
        headers = {
            name: value
            for name, value in answer.headers.items()
            if name not in OWN_HEADERS and not name.startswith("x-kvlb-")
        }
        kind = headers.get("content-type", "")
        body = _events(answer) if kind.startswith("text/event-stream") else answer.text
        if kind.startswith("application/json"):
            headers.pop("content-length", None)  # ids and times differ in length, too
            body = answer.json()
        return {"status": answer.status_code, "headers": headers, "body": body}

    return call


def _events(answer: httpx.Response) -> list[Any]:
    """Every line of a stream; what is JSON in it, read."""
    lines = [each.removeprefix("data: ") for each in answer.text.splitlines()]
    return [json.loads(each) if each.startswith("{") else each for each in lines]


def _plain_call(told: Mapping[str, Any]) -> Call:
    """A call of plain_calls.yaml."""
    path = told.get("post") or told["get"]
    if "content" in told:
        return _raw("POST", path, content=told["content"], headers={"content-type": told["type"]})
    if "get" in told:
        return _raw("GET", path)
    body = {"model": MODEL, **told["json"]}
    return _raw("POST", path, json={name: each for name, each in body.items() if each is not None})


def _rendered_and_back(clients: Clients) -> Any:
    """A chat over four calls, as prefill, decode and tokenizer apart from each other have it."""

    def ask(path: str, asked: Any) -> Any:
        return clients.http.post(path, json=asked).raise_for_status().json()

    rendered = ask("/v1/chat/completions/render", CHAT)
    said = ask("/inference/v1/generate", rendered)
    told = ask("/v1/chat/completions/derender", {"generate_response": said})
    straight = ask("/v1/chat/completions", CHAT)
    assert told["choices"][0]["message"] == straight["choices"][0]["message"]
    return [rendered, said, told]


def _chat(**fields: Any) -> Call:
    return lambda clients: clients.openai.chat.completions.create(**{**CHAT, **fields})


def _complete(**fields: Any) -> Call:
    asked = {"model": MODEL, "prompt": "once upon", "max_tokens": 6, "temperature": 0, **fields}
    return lambda clients: clients.openai.completions.create(**asked)


def _respond(**fields: Any) -> Call:
    asked = {"model": MODEL, "input": "hello", "max_output_tokens": 6, "temperature": 0, **fields}
    return lambda clients: clients.openai.responses.create(**asked)


def _message(**fields: Any) -> Call:
    # The package no longer knows the field; without it a real engine draws.
    greedy = {"extra_body": {"temperature": 0}}
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 6, **greedy, **fields}
    return lambda clients: clients.anthropic.messages.create(**asked)


def _embed(**fields: Any) -> Call:
    asked = {"model": MODEL, "input": "hello", **fields}
    return lambda clients: clients.openai.embeddings.create(**asked)


def _transcribe(**fields: Any) -> Call:
    asked = {"model": MODEL, "file": ("a.wav", SOUND, "audio/wav"), **fields}
    return lambda clients: clients.openai.audio.transcriptions.create(**asked)


def _conversation(clients: Clients) -> Any:
    """Three turns that go on from each other, and what was kept of them."""
    create = clients.openai.responses.create
    first = create(model=MODEL, input="hello", max_output_tokens=4, temperature=0)
    second = create(
        model=MODEL, input="and?", max_output_tokens=4, previous_response_id=first.id, temperature=0
    )
    kept = clients.openai.responses.retrieve(second.id)
    told = [plain(first), plain(second), plain(kept)]
    for each in told[1:]:
        assert each["previous_response_id"] == first.id
        each["previous_response_id"] = "the first"
    try:
        clients.openai.responses.cancel(second.id)
    except openai.APIStatusError as error:
        told.append(plain(error.body))
    return told


def _realtime(clients: Clients) -> Any:
    """One utterance, said in pieces."""
    sound = base64.b64encode(SOUND).decode()
    append: Any = {"type": "input_audio_buffer.append", "audio": sound}
    beginning: list[Any] = [
        {"type": "nonsense"},
        {"type": "session.update", "model": "nope"},
        {"type": "session.update", "model": MODEL},
        {"type": "input_audio_buffer.commit"},
    ]
    end: Any = {"type": "input_audio_buffer.commit", "final": True}
    events: list[Any] = []
    with clients.openai.realtime.connect(model=MODEL) as session:
        for event in (*beginning, append, append, append, end):
            session.send(event)
        while not events or events[-1]["type"] != "transcription.done":
            events.append(json.loads(session.recv_bytes()))
    return events


_PLAIN = yaml.safe_load(Path(__file__).with_name("plain_calls.yaml").read_text())
REFUSED = frozenset(
    {
        *(name for calls in _PLAIN.values() for name, told in calls.items() if told.get("refused")),
        "chat-stream-options-alone",
        "chat-bad-temperature",
        "chat-no-tokens",
        "chat-too-long",
        "chat-stream-too-long",
        "completion-bad-ids",
        "completion-too-long",
        "completion-no-answers",
        "background",
        "too-long",
        "message-too-long",
        "message-no-tokens",
        "embedding-dimensions",
        "embedding-too-long",
        "no-file",
    }
)
"""Calls that a simulated engine refuses; all others get what they ask for."""

CALLS: dict[str, dict[str, Call]] = {
    "openai": {
        "chat": _chat(),
        "chat-several": _chat(n=3),
        "chat-logprobs": _chat(logprobs=True, top_logprobs=2),
        "chat-tools": _chat(tools=TOOLS, tool_choice="auto"),
        "chat-stop": _chat(stop=["a", "e"], max_tokens=40),
        "chat-max-completion": _chat(max_completion_tokens=3),
        "chat-stream": _chat(stream=True),
        "chat-stream-usage": _chat(stream=True, stream_options={"include_usage": True}),
        "chat-stream-usage-each": _chat(
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        "chat-stream-no-usage": _chat(stream=True, stream_options={"include_usage": False}),
        "chat-stream-several": _chat(stream=True, n=2),
        "chat-stream-logprobs": _chat(stream=True, logprobs=True),
        "chat-token-ids": _chat(extra_body={"return_token_ids": True}),
        "chat-surrogate": lambda each: each.openai.post(
            "/chat/completions",
            cast_to=object,
            content=b'{"model":"%b","messages":[{"role":"user","content":"\\ud800"}],"max_tokens":2}'
            % MODEL.encode(),
            options={"headers": {"content-type": "application/json"}},
        ),
        "chat-stream-options-alone": _chat(stream_options={"include_usage": True}),
        "chat-bad-temperature": _chat(temperature=-1),
        "chat-no-tokens": _chat(max_tokens=0),
        "chat-too-long": _chat(messages=[{"role": "user", "content": LONG}]),
        "chat-stream-too-long": _chat(messages=[{"role": "user", "content": LONG}], stream=True),
        "completion": _complete(),
        "completion-ids": _complete(prompt=[1, 2, 3]),
        "completion-list": _complete(prompt=["one", "two"], n=2),
        "completion-echo": _complete(echo=True, logprobs=1),
        "completion-stream": _complete(stream=True, stream_options={"include_usage": True}),
        "completion-stream-list": _complete(prompt=["one", "two"], stream=True),
        "completion-bad-ids": _complete(prompt=[10**9]),
        "completion-too-long": _complete(prompt=LONG),
        "completion-no-answers": _complete(n=0),
        "models": lambda each: list(each.openai.models.list()),
    },
    "responses": {
        "text": _respond(),
        "items": _respond(input=[{"role": "user", "content": "hello"}], instructions="be brief"),
        "parts": _respond(
            input=[{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
        ),
        "complete": _respond(max_output_tokens=400),
        "metadata": _respond(metadata={"a": "b"}, user="u", truncation="auto"),
        "stream": _respond(stream=True),
        "background": _respond(background=True),
        "too-long": _respond(input=LONG),
        "conversation": _conversation,
    },
    "scale-out": {"rendered-and-back": _rendered_and_back},
    "anthropic": {
        "message": _message(),
        "message-system": _message(system="be brief"),
        "message-blocks": _message(
            messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
        ),
        "message-stop": _message(stop_sequences=["a", "e"], max_tokens=40),
        "message-tools": _message(tools=[{"name": "weather", "input_schema": {"type": "object"}}]),
        "message-stream": _message(stream=True),
        "message-too-long": _message(messages=[{"role": "user", "content": LONG}]),
        "message-no-tokens": _message(max_tokens=0),
        "count": lambda each: each.anthropic.messages.count_tokens(model=MODEL, messages=HELLO),
    },
    "unknown-model": {
        "chat": _chat(model="nope"),
        "chat-stream": _chat(model="nope", stream=True),
        "completion": _complete(model="nope"),
        "response": _respond(model="nope"),
    },
    "unknown-response": {
        "retrieve": lambda each: each.openai.responses.retrieve("resp_none"),
        "cancel": lambda each: each.openai.responses.cancel("resp_none"),
        "go-on": _respond(previous_response_id="resp_none"),
    },
    "pooling": {
        "embedding": _embed(),
        "embedding-floats": _embed(encoding_format="float"),
        "embedding-list": _embed(input=["one", "two"]),
        "embedding-ids": _embed(input=[[1, 2], [3]]),
        "embedding-dimensions": _embed(dimensions=2),
        "embedding-too-long": _embed(input=LONG),
    },
    "speech": {
        "transcription": _transcribe(),
        "transcription-text": _transcribe(response_format="text"),
        "transcription-stream": _transcribe(stream=True),
        "translation": lambda each: each.openai.audio.translations.create(
            model=MODEL, file=("a.wav", SOUND, "audio/wav")
        ),
        "no-file": _raw("POST", "/v1/audio/transcriptions", files={"model": (None, MODEL)}),
        "session": _realtime,
    },
}
for _group, _calls in _PLAIN.items():
    CALLS.setdefault(_group, {}).update((name, _plain_call(each)) for name, each in _calls.items())
