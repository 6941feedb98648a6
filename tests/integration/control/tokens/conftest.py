"""Tokenizer directories that a test may change, and prompts that are compared by their tokens."""

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from balancer.core.prompt.shape import TextShape
from balancer.core.request import GenerateRequest, PromptView
from balancer.tokens.directory import load_tokenizer
from balancer.tokens.reader import PromptReader
from indexer.core.index import Prompt


@pytest.fixture
def same_tokens() -> Callable[[Prompt, list[int]], bool]:
    """Compare through the keys of one-token blocks: a prompt doesn't give its ids back."""

    def compare(prompt: Prompt, ids: list[int]) -> bool:
        other = Prompt(prompt.namespace, ids)
        return prompt.tokens == other.tokens and list(prompt.keys(1)) == list(other.keys(1))

    return compare


@pytest.fixture
def tokens_of() -> Callable[[str, str], Sequence[int]]:
    """Ids of a text, by the tokenizer of a directory."""

    def encode(directory: str, text: str) -> Sequence[int]:
        shape = TextShape(texts=(text,), add_special_tokens=False)
        return load_tokenizer(Path(directory), str).encode(shape)[0]

    return encode


@pytest.fixture
def copy_tokenizer(tokenizer_directory: str) -> Callable[[Path], None]:
    """The captures' tokenizer, to be changed."""

    def copy(directory: Path) -> None:
        for path in Path(tokenizer_directory).iterdir():
            (directory / path.name).write_bytes(path.read_bytes())

    return copy


@pytest.fixture
def put() -> Callable[[Path, str, object], None]:
    """Write one file of a tokenizer directory."""

    def write(directory: Path, name: str, value: object) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        (directory / name).write_text(text, "utf-8")

    return write


@pytest.fixture
def tokenizer_copy(tmp_path: Path, copy_tokenizer: Callable[[Path], None]) -> Path:
    """A tokenizer's directory that a test may change."""
    copy_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def read(
    make_request: Callable[..., GenerateRequest], fleet_of: Callable[..., Any]
) -> Callable[..., Awaitable[PromptView]]:
    """Have a reader read the prompt of a request."""

    async def ask(reader: PromptReader, body: object, **request: Any) -> PromptView:
        return await reader.read(fleet_of(), make_request(body, **request))

    return ask
