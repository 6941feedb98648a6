"""What of a conversation's last turn the next one's prefill may read, and what it must not."""

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.routing.conversations import (
    Answered,
    Conversations,
    LastTurn,
    read_answered,
    remember,
    usable_params,
)
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.types import InstanceId, RankId

RANK = RankId(InstanceId("http://d:1"), 0)
PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": "d",
    "remote_num_tokens": 100,
    "remote_block_ids": [list(range(10, 17))],
}
FIRST = [{"role": "user", "content": "hi"}]
SAID = {"role": "assistant", "content": "hello"}
NEXT = [*FIRST, SAID, {"role": "user", "content": "more"}]


def prompt(tokens: int, *, first: int = 0, salt: str | None = None) -> Prompt:
    return Prompt(Namespace(model="m", cache_salt=salt), range(first, first + tokens))


def turn(params: dict[str, Any] | None = None, text: str | None = "hello") -> LastTurn:
    """A prompt of five blocks and a bit, answered with text."""
    answered = Answered(params=params or PARAMS, text=text)
    return remember(answered, RANK, prompt(86), {"messages": FIRST}, 16)


def blocks(found: Any) -> int:
    """How many are used; tokens and ids say the same."""
    if found is None:
        return 0
    (ids,) = found["remote_block_ids"]
    assert found["remote_num_tokens"] == len(ids) * 16
    assert ids == PARAMS["remote_block_ids"][0][: len(ids)]
    assert found["remote_engine_id"] == "d"
    return len(ids)


def test_what_was_said_is_used_if_it_came_back_and_is_held() -> None:
    """Up to the last full block of what the engine kept."""
    assert blocks(usable_params(turn(), prompt(500), {"messages": NEXT}, 480)) == 6


def test_events_bound_what_was_said() -> None:
    """The same words may be other tokens: those that the rank holds are this prompt's."""
    assert blocks(usable_params(turn(), prompt(500), {"messages": NEXT}, 95)) == 5


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([*FIRST, {"role": "user", "content": "hello"}], id="not-the-assistant"),
        pytest.param([*FIRST, {**SAID, "content": "hello!"}], id="other-words"),
        pytest.param([*FIRST, {**SAID, "content": [{"type": "text"}]}], id="parts"),
        pytest.param([*FIRST, {**SAID, "tool_calls": [{}]}], id="tools"),
        pytest.param([*FIRST, "hello"], id="no-object"),
        pytest.param(FIRST, id="nothing-came-back"),
        pytest.param(None, id="completion"),
    ],
)
def test_what_was_said_counts_only_if_it_came_back_word_for_word(messages: Any) -> None:
    """Else the prompt alone, whatever the rank holds: it may be another conversation's."""
    assert blocks(usable_params(turn(), prompt(500), {"messages": messages}, 480)) == 5


def test_an_answer_of_more_than_text_never_comes_back() -> None:
    """Reasoning is stripped by clients, tool calls are rendered anew."""
    assert blocks(usable_params(turn(text=None), prompt(500), {"messages": NEXT}, 480)) == 5


def test_a_completion_counts_as_its_prompt() -> None:
    """Its answer isn't sent back apart."""
    ended = replace(turn(), messages=0)

    assert blocks(usable_params(ended, prompt(500), {"messages": NEXT}, 480)) == 5


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        pytest.param(prompt(500, first=1), 0, id="another-prompt"),
        pytest.param(prompt(500, salt="s"), 0, id="another-tenant"),
        pytest.param(prompt(40), 2, id="shorter"),
        pytest.param(
            Prompt(Namespace(model="m"), [*range(48), *range(900, 1300)]), 3, id="parts-ways"
        ),
    ],
)
def test_only_the_common_beginning_is_used(now: Prompt, expected: int) -> None:
    """Wherever the prompts part, and whatever the rank holds of the new one."""
    assert blocks(usable_params(turn(), now, {"messages": NEXT}, 480)) == expected


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"remote_num_tokens": None}, id="before-0.21"),
        pytest.param({"remote_block_ids": [[1], [2]]}, id="hybrid"),
        pytest.param({"remote_block_ids": None}, id="no-blocks"),
        pytest.param({"remote_num_tokens": 15}, id="less-than-a-block"),
    ],
)
def test_what_cant_be_cut_is_not_used(changed: dict[str, Any]) -> None:
    """Better computed again than read wrongly."""
    ended = turn({**PARAMS, **changed})

    assert usable_params(ended, prompt(500), {"messages": NEXT}, 480) is None


@given(common=st.integers(0, 90), length=st.integers(1, 300), held=st.integers(0, 299))
def test_never_more_than_the_prompts_have_in_common(common: int, length: int, held: int) -> None:
    """Law: without the answer's return, used tokens are a common beginning of both prompts."""
    tokens = [*range(min(common, length)), *range(10_000, 10_000 + max(0, length - common))]

    used = blocks(
        usable_params(turn(), Prompt(Namespace(model="m"), tokens), {"messages": FIRST}, held)
    )

    assert tokens[: used * 16] == list(range(86))[: used * 16]


def test_a_turn_is_used_once_and_in_time() -> None:
    """The next turn takes it; one that comes late finds nothing."""
    turns = Conversations()
    turns.put("a", turn(), now_s=0, expires_s=10)
    turns.put("b", turn(), now_s=0, expires_s=10)

    assert turns.take("a", 9.9) is not None
    assert turns.take("a", 9.9) is None
    assert turns.take("b", 10) is None
    assert len(turns) == 0


def test_the_oldest_conversation_leaves_first() -> None:
    """A turn of one that goes on is a new one."""
    turns = Conversations(limit=2)
    for name in ("a", "b", "a", "c"):
        turns.put(name, turn(), now_s=0, expires_s=10)

    assert turns.take("b", 0) is None
    assert turns.take("a", 0) is not None


def test_turns_whose_time_is_over_are_not_kept() -> None:
    """They leave with the next one, however few there are."""
    turns = Conversations()
    for second in range(5):
        turns.put(f"c{second}", turn(), now_s=second, expires_s=second + 2)

    assert len(turns) == 2


def test_tokens_of_all_turns_are_bounded() -> None:
    """However few turns; one that is taken counts no more."""
    tokens = turn().tokens
    turns = Conversations(max_tokens=2 * tokens)
    for name in "abc":
        turns.put(name, turn(), now_s=0, expires_s=10)
    after = len(turns)
    turns.take("b", 0)
    turns.put("d", turn(), now_s=0, expires_s=10)

    assert (tokens > 0, after) == (True, 2)
    assert turns.take("c", 0) is not None


def test_long_names_are_not_kept() -> None:
    """Of whatever characters; they are told apart all the same."""
    turns = Conversations()
    names = ["c" * 1_000_000 + end for end in ("a", "b", "\ud800")]
    tracemalloc.start()
    for name in names:
        turns.put(name, turn(), now_s=0, expires_s=10)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert kept_bytes < 100_000
    assert len(turns) == 3
    assert turns.take(names[2], 0) is not None


def stream(*chunks: Any) -> bytes:
    lines = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks]
    return b": ping\n\n" + b"".join(lines) + b"data: [DONE]\n\n"


def chunk(delta: Any, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta}], **fields}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        pytest.param(
            json.dumps({"choices": [{"message": SAID}], "kv_transfer_params": PARAMS}).encode(),
            "hello",
            id="whole",
        ),
        pytest.param(
            stream(
                chunk({"role": "assistant", "content": ""}),
                chunk({"content": "he"}),
                chunk({"content": "llo"}, kv_transfer_params=PARAMS),
                {"choices": [], "usage": {}},
            ),
            "hello",
            id="stream",
        ),
        pytest.param(
            stream(chunk({"reasoning": "hm"}), chunk({"content": "x"}, kv_transfer_params=PARAMS)),
            None,
            id="reasoning",
        ),
        pytest.param(
            stream({"choices": ["?"], "kv_transfer_params": PARAMS}), None, id="odd-choice"
        ),
        pytest.param(
            stream(chunk({"content": ["x"]}, kv_transfer_params=PARAMS)), None, id="odd-content"
        ),
        pytest.param(stream({"kv_transfer_params": PARAMS}), "", id="no-choices"),
    ],
)
def test_an_answer_tells_what_is_kept_and_what_was_said(raw: bytes, text: str | None) -> None:
    """From a JSON body, or from the chunks of a stream (0.33 and later)."""
    assert read_answered(raw) == Answered(params=PARAMS, text=text)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"{", id="no-json"),
        pytest.param(b"[]", id="no-object"),
        pytest.param(b'{"choices": []}', id="nothing-kept"),
        pytest.param(b"data: [1]\n\n", id="odd-chunk"),
        pytest.param(
            b'{"kv_transfer_params": {"do_remote_prefill": true, "do_remote_decode": false}}',
            id="a-prefill-engines",
        ),
    ],
)
def test_an_answer_that_keeps_nothing(raw: bytes) -> None:
    """Also one that can't be read."""
    assert read_answered(raw) is None
