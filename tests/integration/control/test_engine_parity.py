"""Our ids beside those that a real engine gave for the same requests: tests/chat_templates/README.md."""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from balancer.core.prompt.messages_shape import shape_messages
from balancer.core.prompt.request_shape import shape_chat, shape_completion
from balancer.core.prompt.responses_shape import shape_responses
from balancer.core.prompt.shape import ChatShape, PromptShape, TextShape
from balancer.core.settings.control import EngineFlags
from balancer.tokens.directory import load_tokenizer
from balancer.tokens.local import LocalTokenizer
from balancer.tokens.text import Reading

RECORDED = Path(__file__).parents[2] / "chat_templates"
FAMILIES = sorted(path.stem for path in (RECORDED / "families").glob("*.jinja"))
SHAPES: Mapping[str, Callable[[Mapping[str, Any]], PromptShape]] = {
    "/v1/chat/completions": shape_chat,
    "/v1/completions": shape_completion,
    "/v1/messages": shape_messages,
    "/v1/responses": shape_responses,
}


@cache
def recorded() -> Sequence[Mapping[str, Any]]:
    with gzip.open(RECORDED / "engine.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture
def tokenizer(tokenizer_directory: str) -> LocalTokenizer:
    """The recorded engine's own."""
    flags = EngineFlags(trust_request_chat_template=True)
    return load_tokenizer(Path(tokenizer_directory), lambda _: "2026", flags)


def shaped(row: Mapping[str, Any]) -> TextShape | ChatShape:
    body = dict(row["body"])
    if row["family"] is not None:
        body["chat_template"] = (RECORDED / "families" / f"{row['family']}.jinja").read_text(
            "utf-8"
        )
    shape = SHAPES[row["path"]](body)
    assert isinstance(shape, TextShape | ChatShape)
    return shape


@pytest.mark.parametrize("family", [*FAMILIES, None])
def test_ids_are_the_engines(family: str | None, tokenizer: LocalTokenizer) -> None:
    """All that it answered: turns, tools, parts, reasoning, documents; and every other path."""
    rows = [row for row in recorded() if row["family"] == family and row["ids"] is not None]

    ours = {row["name"]: list(tokenizer.encode(shaped(row))[0]) for row in rows}

    assert len(ours) >= 15
    assert ours == {row["name"]: row["ids"] for row in rows}


def test_enough_was_recorded() -> None:
    """A dozen families and more, each with most of the requests."""
    answered = [row for row in recorded() if row["ids"] is not None]

    assert len({row["family"] for row in answered}) > 12
    assert len(answered) > 500


class Remembered(dict[bytes, Any]):
    """All that was ever read."""

    def recall(self, key: bytes, /) -> Any:
        return self.get(key)

    def remember(self, key: bytes, tokens: Any, /) -> None:
        self[key] = tokens


def conversation(turns: int) -> list[dict[str, Any]]:
    texts = [f"Turn {number}: " + "some words to read, " * 100 for number in range(turns)]
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


def test_next_turn_reads_what_is_new(tokenizer: LocalTokenizer) -> None:
    """However long the conversation is by then, and with the same ids as if it were all new."""
    known = Remembered()
    unread: list[int] = []
    for turns in range(1, 40, 2):
        shape = ChatShape(messages=conversation(turns))
        reading: Reading = tokenizer.look_up(shape, known)
        unread.append(reading.unread_chars)
        assert tokenizer.read(shape, reading, known) == tokenizer.encode(shape)

    two_turns = 2 * len(conversation(1)[0]["content"]) + 500
    assert max(unread) <= two_turns
    assert unread[-1] <= unread[1] + 100


def test_repeated_chat_reads_nothing(tokenizer: LocalTokenizer) -> None:
    """All its pieces are known."""
    known = Remembered()
    shape = ChatShape(messages=conversation(5))
    tokenizer.encode(shape, known)

    assert tokenizer.look_up(shape, known).unread_chars == 0


def test_ends_are_put_once_around_the_pieces(tokenizer_directory: str, tmp_path: Path) -> None:
    """BOS before the first piece, whichever pieces are known; never two of them."""
    for path in Path(tokenizer_directory).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"add_bos_token": True, "bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path, str)
    text = "<|im_start|>user\n" + "words " * 100 + "<|im_end|>\n"

    (bare,) = tokenizer.encode(TextShape(texts=(text * 3,), add_special_tokens=False))
    known = Remembered()
    for _ in range(2):
        (full,) = tokenizer.encode(TextShape(texts=(text * 3,)), known)
        assert list(full) == [4091, *bare]
