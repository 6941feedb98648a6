"""What the audit learns of engines and requests from a capture's rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from indexer.core.hashing import Namespace
from indexer.core.types import InstanceId, RankId
from kvlb.audit.capture import Capture, RequestRow
from kvlb.audit.engines import Engine, Version, read_engines
from kvlb.audit.sent import find_rank, incomparable_reason, known_tokens, reported_tokens


def request_row(**fields: Any) -> RequestRow:
    defaults: dict[str, Any] = {"i": 1, "src": "w0", "path": "/v1/completions", "t0": 1.0}
    return RequestRow(**(defaults | {"status": 200, "body": {"model": "tiny"}} | fields))


def engine(
    *notes: Mapping[str, Any], row: RequestRow | None = None, payload: bytes | None = None
) -> Engine:
    """The one engine of a capture with these notes and, unless told, a plain request."""
    row = row or request_row()
    capture = Capture(messages=[], requests=[row], replayed=[], notes=list(notes))
    return read_engines(capture, {} if payload is None else {row.src: payload})[row.src]


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def stored(fields: int) -> Sequence[object]:
    """An array-shaped store of that many fields."""
    return ["BlockStored", [7], None, [1, 2], 2, *[None] * (fields - 4)]


# --- versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response",
    [
        pytest.param({"system_fingerprint": "vllm-0.29.1-dp2-54146a9c"}, id="json"),
        pytest.param(['{"system_fingerprint":"vllm-0.29.1-54146a9c"}', "[DONE]"], id="stream"),
    ],
)
def test_an_answer_tells_its_engine_s_version(response: object) -> None:
    """The fingerprint beats what was noted at the start."""
    noted = {"version": {"version": "0.16.0"}}

    assert engine(noted, row=request_row(response=response)).version == (0, 29)


@pytest.mark.parametrize(
    "version",
    [
        pytest.param({"version": "0.16.0"}, id="answer"),
        pytest.param("0.16.2rc1", id="text"),
        pytest.param([{"version": "0.16.0"}], id="one-per-engine"),
    ],
)
def test_a_noted_version_is_read(version: object) -> None:
    """As `/version` answered, as text, or one for each engine."""
    assert engine({"version": version}).version == (0, 16)


@pytest.mark.parametrize(
    ("payload", "version"),
    [
        pytest.param(batch(stored(5)), (0, 9), id="five-fields"),
        pytest.param(batch(stored(7)), (0, 14), id="seven-fields"),
        pytest.param(batch(stored(8)), (0, 17), id="extra-keys"),
        pytest.param(batch(["AllBlocksCleared"], stored(11)), (0, 22), id="kinds"),
        pytest.param(batch({"type": "AllBlocksCleared"}), (0, 24), id="maps"),
        pytest.param(batch(["AllBlocksCleared"]), None, id="nothing-stored"),
        pytest.param(b"\xc1", None, id="undecodable"),
        pytest.param(batch(7), None, id="no-event"),
        pytest.param(None, None, id="no-batch"),
    ],
)
def test_the_shape_of_events_bounds_the_version(
    payload: bytes | None, version: Version | None
) -> None:
    """The first release that wrote events like these."""
    assert engine(payload=payload).version == version


# --- models ------------------------------------------------------------------------------------

CARDS = {
    "models": {
        "data": [
            {"id": "tiny", "parent": None},
            {"id": "sql", "parent": "tiny"},
            {"id": "chat", "parent": "tiny"},
        ]
    }
}


@pytest.mark.parametrize(
    ("model", "event_loras", "lora"),
    [
        pytest.param("tiny", {"sql"}, None, id="base"),
        pytest.param("chat", {"sql", "chat"}, "chat", id="named"),
        pytest.param("chat", {"#1", "#2"}, "#2", id="numbered"),
        pytest.param("chat", set(), "chat", id="no-event-yet"),
        pytest.param("late", {"late"}, "late", id="loaded-later"),
        pytest.param(None, {"sql"}, None, id="no-model"),
    ],
)
def test_an_adapter_is_named_as_events_name_it(
    model: str | None, event_loras: set[str], lora: str | None
) -> None:
    """By name; by number where events have no names; never the base model."""
    namespace = engine(CARDS).namespace(model, "s", event_loras)

    assert namespace == Namespace(model="tiny", lora=lora, cache_salt="s")


def test_without_a_model_list_the_first_request_names_the_base() -> None:
    """Any name does, as long as blocks and prompts are hashed under the same one."""
    assert engine().namespace("tiny", 7, ()) == Namespace(model="tiny")


# --- roles -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "note", "loads", "saves"),
    [
        pytest.param("w0", {}, False, False, id="plain"),
        pytest.param("p", {}, False, True, id="p-by-convention"),
        pytest.param("d1", {}, True, False, id="d-by-convention"),
        pytest.param("d", {"d": {"kv_role": "kv_both"}}, True, True, id="noted-by-instance"),
        pytest.param(
            "w0",
            {"kv_transfer_config": {"kv_role": "kv_consumer"}},
            True,
            False,
            id="noted-for-all",
        ),
        pytest.param("w0", {"w0": {"kv_role": 7}}, False, False, id="nonsense"),
    ],
)
def test_a_role_tells_who_loads_and_who_saves(
    src: str, note: Mapping[str, Any], loads: bool, saves: bool
) -> None:
    """From the settings, else from what captures call their instances."""
    found = engine(note, row=request_row(src=src))

    assert (found.loads_remote, found.saves_remote) == (loads, saves)


@pytest.mark.parametrize(
    ("extra", "drafts"),
    [
        (["--speculative-config", '{"method": "eagle3"}'], True),
        (["--speculative-config", '{"method": "ngram"}'], False),
        ([], False),
    ],
)
def test_only_heads_that_read_states_drop_a_block(extra: list[str], drafts: bool) -> None:
    """An n-gram draft takes nothing from the cache."""
    assert engine({"extra": extra}).drafts is drafts


@pytest.mark.parametrize(
    ("sources", "ranks"),
    [
        pytest.param({"0": {}, "1": {}}, (0, 1), id="one-engine"),
        pytest.param([{"0": {}}, {"1": {}}], (0,), id="one-per-engine"),
        pytest.param({"detail": "Not Found"}, (), id="older-engine"),
    ],
)
def test_an_engine_declares_its_ranks(sources: object, ranks: tuple[int, ...]) -> None:
    """As `/kv_event_sources` answered."""
    assert engine({"sources": sources}).ranks == ranks


# --- requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "ranks", "rank"),
    [
        pytest.param(None, [0], 0, id="only-one"),
        pytest.param(None, [0, 1], None, id="which-one"),
        pytest.param({"x-Data-Parallel-Rank": "1"}, [0, 1], 1, id="pinned"),
        pytest.param({"X-data-parallel-rank": 1}, [4, 5], 5, id="local-index"),
        pytest.param({"X-data-parallel-rank": "7"}, [0, 1], 7, id="never-heard-of"),
        pytest.param({"X-data-parallel-rank": "x"}, [0, 1], None, id="ignored-by-engines"),
    ],
)
def test_the_header_tells_the_rank(
    headers: dict[str, Any] | None, ranks: list[int], rank: int | None
) -> None:
    """An instance of several ranks must be told which one; one of a single rank needn't."""
    expected = None if rank is None else RankId(InstanceId("w0"), rank)

    assert find_rank(request_row(headers=headers), ranks) == expected


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        pytest.param({"tokenize": [1, 2], "body": {"prompt": [3, 4]}}, (1, 2), id="tokenize-first"),
        pytest.param({"body": {"prompt": [3, 4]}}, (3, 4), id="body"),
        pytest.param({"body": {"prompt": [[3, 4]]}}, (3, 4), id="body-list-of-one"),
        pytest.param({"response": {"prompt_token_ids": [5]}}, (5,), id="chat-answer"),
        pytest.param(
            {"response": {"choices": [{"prompt_token_ids": [6]}]}}, (6,), id="completion-answer"
        ),
        pytest.param(
            {"tokenize": [1, 2, 3], "usage": {"prompt_tokens": 1}, "response": {"choices": [5]}},
            None,
            id="engine-counted-others",
        ),
        pytest.param(
            {
                "tokenize": [1, 2, 3],
                "usage": {"prompt_tokens": 2},
                "body": {"truncate_prompt_tokens": 2},
            },
            (2, 3),
            id="truncated",
        ),
        pytest.param({"body": {"prompt": "text"}, "response": []}, None, id="unknown"),
    ],
)
def test_token_ids_come_from_the_best_source(
    fields: dict[str, Any], tokens: tuple[int, ...] | None
) -> None:
    """`/tokenize`, the body, the answer: the first that is as long as the engine counted."""
    assert known_tokens(request_row(**fields)) == tokens


@pytest.mark.parametrize(
    ("path", "usage", "reported"),
    [
        ("/v1/completions", {"prompt_tokens_details": {"cached_tokens": 32}}, 32),
        ("/v1/completions", {"prompt_tokens_details": None}, 0),
        ("/v1/chat/completions", {"prompt_tokens_details": {"cached_tokens": None}}, 0),
        ("/v1/responses", {"input_tokens_details": {"cached_tokens": 16}}, 16),
        ("/v1/messages", {"cache_read_input_tokens": 288}, 288),
        ("/v1/messages", {"input_tokens": 5}, None),
        ("/v1/embeddings", {"prompt_tokens": 5}, None),
    ],
)
def test_each_path_reports_in_its_own_words(
    path: str, usage: dict[str, Any], reported: int | None
) -> None:
    """Silence means 0 on the completions paths, and nothing elsewhere."""
    assert reported_tokens(request_row(path=path, usage=usage)) == reported


USED = {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param({"usage": USED}, None, id="comparable"),
        pytest.param({"usage": USED, "status": 400}, "status", id="refused"),
        pytest.param({}, "no_usage", id="cut"),
        pytest.param(
            {"usage": USED, "body": {"prompt": ["a", "b"]}}, "several_prompts", id="several"
        ),
        pytest.param({"usage": USED, "body": {"prompt": ["a"]}}, None, id="list-of-one"),
        pytest.param({"usage": USED, "body": {"prompt_embeds": "x"}}, "prompt_embeds", id="embeds"),
        pytest.param(
            {"usage": USED, "body": {"messages": [{"content": [{"type": "image_url"}]}]}},
            "multimodal",
            id="image",
        ),
        pytest.param(
            {"usage": USED, "body": {"messages": [{"content": [{"type": "text"}, 7]}, 7]}},
            None,
            id="text-parts",
        ),
    ],
)
def test_what_cannot_be_compared_has_a_reason(fields: dict[str, Any], reason: str | None) -> None:
    """Everything else is compared."""
    assert incomparable_reason(request_row(**fields)) == reason
