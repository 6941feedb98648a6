"""A model's own tokenizer and chat template, read from a directory. Blocking: for threads only.

`tokenizer.json` is required. `chat_template.jinja` wins over the template in
`tokenizer_config.json`, as in `transformers`. Nothing is fetched from anywhere.
"""

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from balancer.core.prompt.chat_template import (
    ChatTemplate,
    TemplateBrokenError,
    TemplateRefusedError,
)
from balancer.core.prompt.media_prefix import (
    MIN_CREDITABLE_TOKENS,
    STAND_INS,
    common_prefix,
    with_stand_in,
)
from balancer.core.prompt.shape import (
    ChatShape,
    TextShape,
    Unscorable,
    UnscorableError,
    check_text_length,
    template_inputs,
)
from balancer.core.prompt.token_cache import Tokens

OWN_RENDERERS = frozenset({"gpt_oss", "deepseek_v32", "deepseek_v4", "kimi_k3"})
"""Model types whose chats vLLM renders with code, not with a template: ask the engine."""

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
)


class TokenizerLoadError(Exception):
    """The directory holds no tokenizer that can be used. The message says what is missing."""


class LocalTokenizer:
    """Turns text and chats into ids as the engine would."""

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, ChatTemplate]) -> None:
        """`templates` holds `default`, perhaps `tool_use`; empty: chats can't be rendered."""
        self._tokenizer = tokenizer
        self._templates = templates

    def encode(self, shape: TextShape | ChatShape) -> Tokens:
        """Ids of each prompt, of a chat with media those before the first. Raises UnscorableError."""
        if isinstance(shape, ChatShape) and shape.has_media:
            return (self._encode_before_media(shape),)
        texts = shape.texts if isinstance(shape, TextShape) else (self._render(shape),)
        tokens = self._encode(texts, add_special_tokens=shape.add_special_tokens)
        for each in tokens:
            check_text_length(len(each), shape.truncation)
        return tokens

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> Tokens:
        try:
            encodings = self._tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except BaseException as error:  # a panic of the native library is not an Exception
            raise UnscorableError(Unscorable.TOKENIZER_FAILED) from error
        return tuple(array("I", encoding.ids) for encoding in encodings)

    def _encode_before_media(self, shape: ChatShape) -> "array[int]":
        if shape.truncation is not None:
            raise UnscorableError(Unscorable.TRUNCATED)
        sees_parts = self._template_for(shape).content_format == "openai"
        shapes = [with_stand_in(shape, text, keeps_order=sees_parts) for text in STAND_INS]
        if sees_parts:
            shapes.append(shape)
        texts = [self._render(each) for each in shapes]
        tokens = self._encode(texts, add_special_tokens=shape.add_special_tokens)
        creditable = common_prefix(tokens)
        if creditable < MIN_CREDITABLE_TOKENS:
            raise UnscorableError(Unscorable.MULTIMODAL)
        return tokens[0][:creditable]

    def _template_for(self, shape: ChatShape) -> ChatTemplate:
        if shape.chat_template is not None:
            raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
        template = self._templates.get("tool_use") if shape.tools is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise UnscorableError(Unscorable.NO_TOKENIZER)
        return template

    def _render(self, shape: ChatShape) -> str:
        template = self._template_for(shape)
        try:
            return template.render(template_inputs(shape, template.content_format))
        except TemplateRefusedError as error:
            raise UnscorableError(Unscorable.REFUSED) from error


def load_tokenizer(directory: Path, strftime_now: Callable[[str], str]) -> LocalTokenizer:
    """Read `directory`, or raise TokenizerLoadError."""
    tokenizer = _read_tokenizer(directory / "tokenizer.json")
    config = _read_json(directory / "tokenizer_config.json")
    special = _special_tokens(config)
    try:
        templates = {
            name: ChatTemplate(source, special_tokens=special, strftime_now=strftime_now)
            for name, source in _template_sources(directory, config).items()
        }
    except TemplateBrokenError as error:
        raise TokenizerLoadError(f"{directory}: {error}") from error
    return LocalTokenizer(tokenizer, templates)


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TokenizerLoadError(f"{path} is missing; a directory with tokenizer.json is needed")
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise TokenizerLoadError(f"{path}: {error}") from error
    except Exception as error:  # the library raises bare Exception for bad files
        raise TokenizerLoadError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> Mapping[str, Any]:
    """A missing file is an empty object: not every model ships each of them."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerLoadError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerLoadError(f"{path}: not a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens by name, as text; absent and null ones are left undefined."""
    return {name: _token_text(config[name]) for name in SPECIAL_NAMES if config.get(name)}


def _token_text(token: Any) -> Any:
    if isinstance(token, list):
        return [_token_text(each) for each in token]
    return token.get("content") if isinstance(token, dict) else token


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    if _read_json(directory / "config.json").get("model_type") in OWN_RENDERERS:
        return {}
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        try:
            return {"default": jinja.read_text("utf-8")}
        except (OSError, ValueError) as error:
            raise TokenizerLoadError(f"{jinja}: {error}") from error
    for source in (_read_json(directory / "chat_template.json"), config):
        if templates := _named_templates(source.get("chat_template")):
            return templates
    return {}


def _named_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {each["name"]: each["template"] for each in value if isinstance(each, dict)}
    return {}
