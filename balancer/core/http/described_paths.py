"""The engines' paths as `/openapi.json` shows them: written by hand, since FastAPI never sees them.

Rules:

1. Every path that the data plane takes is here (`engine_paths.every_path`), and no other; a test
   compares the two. Methods are told by that table.
2. Bodies are as loose as engines take them, unknown fields included: what is no body by this
   description, an engine refuses if kvlb doesn't.
3. Of an answer only what all engines have is told. Errors of kvlb's own are told by status; an
   engine's pass as they are, so any status may come (`default`).

Cost: built once per process, when `/openapi.json` is first asked for.
"""

from typing import Any, Final

import msgspec

from balancer.core.http.engine_paths import RESPONSE_ID, EnginePath, PathUse, every_path
from balancer.core.http.lax_bool import FALSE_WORDS, TRUE_WORDS

Schema = dict[str, Any]

_NULL: Final[Schema] = {"type": "null"}
_TEXT: Final[Schema] = {"type": "string"}
_NAME: Final[Schema] = {"type": ["string", "null"], "description": "Model, alias or adapter."}
_LIST: Final[Schema] = {"type": "array"}
_OBJECT: Final[Schema] = {"type": "object"}
_OBJECTS: Final[Schema] = {"type": "array", "items": _OBJECT}
_TEXTS: Final[Schema] = {"type": "array", "items": _TEXT}
_INPUT: Final[Schema] = {"anyOf": [_TEXT, _LIST]}
_IDS: Final[Schema] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_FLAG: Final[Schema] = {
    "anyOf": [
        {"type": "boolean"},
        {"enum": [0, 1]},
        {
            "type": "string",
            "pattern": "^("
            + "|".join(
                "".join(f"[{each.upper()}{each}]" if each.isalpha() else each for each in word)
                for word in sorted(TRUE_WORDS | FALSE_WORDS)
            )
            + ")$",
        },
        _NULL,
    ]
}
_STREAM: Final[Schema] = {
    "stream": _FLAG,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _FLAG, "continuous_usage_stats": _FLAG},
        "description": "For streams only.",
    },
}
_FORWARDED: Final = "Handed whole to one capable instance."
_SCALE_OUT: Final = "Engines serve it with `--enable-scale-out` only."


class _Described(msgspec.Struct, frozen=True):
    """What is told of one path."""

    summary: str
    fields: Schema = {}
    """Of its JSON body beside `model`; by a leading `!` those that it must have."""
    notes: str = _FORWARDED
    is_form: bool = False
    streams: bool = False
    has_body: bool = True


def _rerank() -> _Described:
    return _Described(
        "Order documents by how well they answer a query.",
        {"!query": {}, "!documents": {"anyOf": [_LIST, _OBJECT]}, "top_n": {}},
    )


def _score() -> _Described:
    return _Described("Score pairs of texts.", {})


def _rendered(what: str, **fields: Schema) -> _Described:
    needed = {f"!{name}": schema for name, schema in fields.items()}
    return _Described(f"What {what} would be run as.", needed, f"{_FORWARDED} {_SCALE_OUT}")


def _derendered(what: str) -> _Described:
    return _Described(f"Make {what} of token ids.", {}, f"{_FORWARDED} {_SCALE_OUT}")


def _spoken(what: str) -> _Described:
    fields = {"!file": {"type": "string", "format": "binary"}, "model": _TEXT}
    return _Described(what, fields, is_form=True, streams=True)


_SCORED: Final = "Handed whole to the rank that cache and load speak for."

_PATHS: Final = {
    "/v1/chat/completions": _Described(
        "Answer a chat.",
        {"!messages": _OBJECTS, **_STREAM},
        "Routed by cache and load, over two legs where that pays.",
        streams=True,
    ),
    "/v1/completions": _Described(
        "Continue a prompt.",
        {"prompt": {"anyOf": [_TEXT, _LIST, _NULL]}, "prompt_embeds": {}, **_STREAM},
        "Routed by cache and load, over two legs where that pays. `prompt` or `prompt_embeds`.",
        streams=True,
    ),
    "/v1/messages": _Described(
        "Answer a chat, in Anthropic's form.",
        {"!messages": _OBJECTS, "!max_tokens": {}, "stream": _FLAG},
        _SCORED,
        streams=True,
    ),
    "/v1/responses": _Described(
        "Make a response.",
        {"!input": _INPUT, "previous_response_id": {"type": ["string", "null"]}, "stream": _FLAG},
        f"{_SCORED} With `previous_response_id`: to the instance that keeps it.",
        streams=True,
    ),
    "/inference/v1/generate": _Described(
        "Continue token ids.",
        {"token_ids": {}, "!sampling_params": _OBJECT, "stream": _FLAG},
        f"{_SCORED} {_SCALE_OUT}",
        streams=True,
    ),
    "/v1/responses/{response_id}": _Described(
        "A kept response.", notes="Asked of the instance that keeps it.", has_body=False
    ),
    "/v1/responses/{response_id}/cancel": _Described(
        "Cancel a response.", notes="Asked of the instance that keeps it.", has_body=False
    ),
    "/v1/chat/completions/batch": _Described(
        "Answer several chats at once.", {"!messages": {"type": "array", "items": _OBJECTS}}
    ),
    "/invocations": _Described("SageMaker's path: what the body is of decides."),
    "/v1/messages/count_tokens": _Described("Count a prompt's tokens.", {"!messages": _OBJECTS}),
    "/v1/embeddings": _Described("Embed texts.", {"input": _INPUT, "messages": _OBJECTS}),
    "/v2/embed": _Described(
        "Embed texts, in Cohere's form.", {"texts": {"anyOf": [_TEXTS, _NULL]}}
    ),
    "/pooling": _Described("Pool hidden states.", {"input": {}, "messages": _OBJECTS}),
    "/classify": _Described("Classify texts.", {"input": {}, "messages": _OBJECTS}),
    "/score": _score(),
    "/v1/score": _score(),
    "/rerank": _rerank(),
    "/v1/rerank": _rerank(),
    "/v2/rerank": _rerank(),
    "/generative_scoring": _Described("Score items by the next token's probability."),
    "/v1/systemone": _Described("Take a structured decision."),
    "/v1/decisions": _Described("Take structured decisions."),
    "/v1/audio/transcriptions": _spoken("Write down what is said."),
    "/v1/audio/translations": _spoken("Write down in English what is said."),
    "/tokenize": _Described("Token ids of a prompt.", {"prompt": _TEXT, "messages": _OBJECTS}),
    "/detokenize": _Described("Text of token ids.", {"!tokens": _IDS}),
    "/tokenizer_info": _Described("The tokenizer's configuration.", has_body=False),
    "/v1/chat/completions/render": _rendered("a chat", messages=_OBJECTS),
    "/v1/completions/render": _rendered("a completion"),
    "/v1/responses/render": _rendered("a response", input=_INPUT),
    "/v1/messages/render": _rendered("a message", messages=_OBJECTS),
    "/cohere/v2/chat": _Described(
        "Answer a chat, in Cohere's form.",
        {"!messages": _OBJECTS, "stream": _FLAG},
        f"{_FORWARDED} Engines serve it with `VLLM_ENABLE_COHERE_API=1` only.",
        streams=True,
    ),
    "/cohere/v2/chat/render": _rendered("a chat of Cohere's", messages=_OBJECTS),
    "/v1/chat/completions/derender": _derendered("a chat's answer"),
    "/v1/completions/derender": _derendered("a completion"),
    "/v1/realtime": _Described("Speak and be written down: a WebSocket.", has_body=False),
}

_HEADERS: Final = {
    "x-request-id": "The request's id: the client's own, or one made up.",
    "x-kvlb-instance": "Alias of the instance that answered.",
    "x-kvlb-prefill": "Alias of the instance of the prefill leg, or `none`.",
    "x-kvlb-reason": "Why it was routed like that.",
    "x-kvlb-overlap-tokens": "How much of the prompt was expected to be cached.",
    "x-kvlb-trust": "How far that can be believed.",
    "x-kvlb-trust-reason": "Why no further, if the index couldn't be asked or nobody keeps it up.",
    "x-kvlb-retries": "How often something was tried again.",
}
_REFUSALS: Final = {
    400: "The request is wrong, in kvlb's or the engine's words.",
    404: "No such model, path or response.",
    408: "The rest of the request didn't come.",
    413: "The body is over `dataplane.max_body_bytes`.",
    414: "The target is too long.",
    431: "The head is over `dataplane.max_head_bytes`.",
    502: "The engine broke off, or spoke no HTTP.",
    503: "No instance can take it now; `Retry-After` if all are full.",
    504: "The engine didn't answer in time.",
    508: "Another balancer sent it.",
}
_ERROR_FIELDS: Final[Schema] = {
    "message": _TEXT,
    "type": _TEXT,
    "param": {"type": ["string", "null"]},
    "code": {"type": ["string", "integer", "null"]},
}
_ERROR: Final[Schema] = {
    "type": "object",
    "description": "OpenAI's form; Anthropic's under `/v1/messages`, with `type: error`.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": _ERROR_FIELDS,
        }
    },
}
_FAILED: Final[Schema] = {
    "description": "What is wrong.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_RETRY_AFTER: Final[Schema] = {"description": "Seconds.", "schema": _TEXT}


def with_engine_paths(document: Schema) -> Schema:
    """Return what FastAPI tells of its own paths, with the engines' first, and with errors as they are here.

    FastAPI describes a 422 of its own, which nobody gets: what is wrong is a 400 in OpenAI's form.
    """
    told = describe_engine_paths()
    own = document["paths"]
    for item in own.values():
        for operation in item.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _FAILED
    components = document.get("components", {})
    schemas = {
        name: each
        for name, each in components.get("schemas", {}).items()
        if name not in {"HTTPValidationError", "ValidationError"}
    }
    told["components"]["schemas"] |= schemas
    return document | {"paths": told["paths"] | own, "components": components | told["components"]}


def describe_engine_paths() -> Schema:
    """Paths and components, to be merged into the document that FastAPI makes."""
    return {
        "paths": {path: _describe(path, use) for path, use in every_path().items()},
        "components": {
            "schemas": {"Error": _ERROR},
            "headers": {
                name: {"description": what, "schema": _TEXT} for name, what in _HEADERS.items()
            },
        },
    }


def _describe(path: str, use: EnginePath) -> Schema:
    told = _PATHS[path]
    methods = ("GET",) if use.use is PathUse.SESSION else use.methods
    item: Schema = {each.lower(): _operation(path, told, use, each) for each in methods}
    if use.response is not None:
        schema = {"type": "string", "pattern": f"^{RESPONSE_ID}$"}
        item["parameters"] = [
            {"name": "response_id", "in": "path", "required": True, "schema": schema}
        ]
    return item


def _operation(path: str, told: _Described, use: EnginePath, method: str) -> Schema:
    operation: Schema = {
        "tags": ["engines"],
        "operationId": f"{method.lower()}_{path.strip('/').translate(_PLAIN)}",
        "summary": told.summary,
        "description": told.notes,
        "responses": _answers(told, use, method),
    }
    if told.has_body:
        operation["requestBody"] = {"required": True, "content": _body(told)}
    return operation


_PLAIN: Final = str.maketrans("/", "_", "{}")


def _body(told: _Described) -> Schema:
    schema: Schema = {
        "type": "object",
        "properties": {"model": _NAME}
        | {name.lstrip("!"): each for name, each in told.fields.items()},
    }
    required = [name[1:] for name in told.fields if name.startswith("!")]
    if required:
        schema["required"] = required
    return {("multipart/form-data" if told.is_form else "application/json"): {"schema": schema}}


def _answers(told: _Described, use: EnginePath, method: str) -> Schema:
    if use.use is PathUse.SESSION:
        found: Schema = {"101": {"description": "Both may speak now."}}
    else:
        found = {
            "200": {"description": "The engine's answer, as it is.", "headers": _own_headers()}
        }
        if method != "HEAD":
            found["200"]["content"] = _content(told)
    for status, what in _REFUSALS.items():
        found[str(status)] = {"description": what, "headers": _own_headers()}
        if method != "HEAD":
            found[str(status)]["content"] = _FAILED["content"]
    found["503"]["headers"]["retry-after"] = _RETRY_AFTER
    found["default"] = {"description": "Whatever else the engine says, as it is."}
    return found


def _content(told: _Described) -> Schema:
    content: Schema = {"application/json": {}}
    if told.is_form:
        content["text/plain"] = {}
    if told.streams:
        content["text/event-stream"] = {}
    return content


def _own_headers() -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in _HEADERS}
