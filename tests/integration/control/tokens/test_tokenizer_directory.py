"""A tokenizer's directory: what is read of it, and what is wrong with it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from balancer.core.prompt.shape import TextShape, UnscorableError
from balancer.core.request import GenerateRequest
from balancer.tokens.directory import TokenizerLoadError, load_tokenizer
from balancer.tokens.pool import TokenPool
from balancer.tokens.reader import PromptReader

TokensOf = Callable[[str, str], Sequence[int]]
CopyTokenizer = Callable[[Path], None]
Put = Callable[[Path, str, object], None]

MakeRequest = Callable[..., GenerateRequest]
MakeReader = Callable[..., PromptReader]
FleetOf = Callable[..., Any]


async def test_broken_tokenizer_is_remembered(
    tmp_path: Path,
    make_reader: MakeReader,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    copy_tokenizer: CopyTokenizer,
) -> None:
    """One attempt to load, not one per request."""
    reader = make_reader(models={"tiny": str(tmp_path)}, engine_fallback=False)

    first = await reader.read(fleet_of(), make_request({"prompt": "a"}))
    copy_tokenizer(tmp_path)
    second = await reader.read(fleet_of(), make_request({"prompt": "a"}))

    assert [first.unscorable, second.unscorable] == ["tokenizer_failed"] * 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({"tokenizer.json": None}, "tokenizer.json is missing", id="missing"),
        pytest.param({"tokenizer.json": "{}"}, "not a tokenizer", id="no-tokenizer"),
        pytest.param({"tokenizer_config.json": "{"}, "tokenizer_config.json", id="broken-config"),
        pytest.param({"tokenizer_config.json": []}, "not a JSON object", id="config-list"),
        pytest.param({"chat_template.jinja": "{% for %}"}, "chat template", id="broken-template"),
    ],
)
def test_directory_that_cannot_be_used_is_refused(
    files: dict[str, Any], message: str, tmp_path: Path, copy_tokenizer: CopyTokenizer, put: Put
) -> None:
    """The message says which file is at fault."""
    copy_tokenizer(tmp_path)
    for name, value in files.items():
        (tmp_path / name).unlink(missing_ok=True)
        if value is not None:
            put(tmp_path, name, value)

    with pytest.raises(TokenizerLoadError, match=message):
        load_tokenizer(tmp_path, str)


async def test_tokenizers_can_be_loaded_ahead(tmp_path: Path, tokenizer_directory: str) -> None:
    """A broken one doesn't keep the others from loading."""
    pool = TokenPool(
        {"bad": str(tmp_path), "tiny": tokenizer_directory},
        workers=1,
        cache_bytes=0,
        strftime_now=str,
    )

    await pool.load()

    shape = TextShape(texts=("hi",))
    assert len((await pool.encode("tiny", shape)).tokens) == 1
    with pytest.raises(UnscorableError):
        await pool.encode("bad", shape)
    pool.close()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({"chat_template.jinja": b"\xff"}, "chat_template.jinja", id="no-text"),
        pytest.param({"tokenizer_config.json": b"\xff"}, "tokenizer_config", id="no-json"),
    ],
)
def test_file_that_cannot_be_read_is_named(
    files: dict[str, bytes], message: str, tmp_path: Path, copy_tokenizer: CopyTokenizer
) -> None:
    """Whatever is in it."""
    copy_tokenizer(tmp_path)
    for name, value in files.items():
        (tmp_path / name).write_bytes(value)

    with pytest.raises(TokenizerLoadError, match=message):
        load_tokenizer(tmp_path, str)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param({"add_bos_token": True, "bos_token": "<|im_start|>"}, [4092], id="bos"),
        pytest.param({"add_bos_token": True, "bos_token": "no such token"}, [], id="unknown"),
        pytest.param({"add_bos_token": True}, [], id="unnamed"),
        pytest.param({"add_bos_token": False, "bos_token": "<|im_start|>"}, [], id="off"),
    ],
)
def test_ends_are_what_the_configuration_says(
    tokens: dict[str, Any],
    expected: list[int],
    tmp_path: Path,
    tokens_of: TokensOf,
    copy_tokenizer: CopyTokenizer,
    put: Put,
) -> None:
    """Where it says anything; else the tokenizer's own."""
    copy_tokenizer(tmp_path)
    put(tmp_path, "tokenizer_config.json", tokens)
    text = TextShape(texts=("hi",))

    (ids,) = load_tokenizer(tmp_path, str).encode(text)

    assert list(ids) == [*expected, *tokens_of(str(tmp_path), "hi")]
