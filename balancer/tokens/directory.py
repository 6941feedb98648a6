"""Reads a model's own tokenizer and chat templates from a directory. Blocking: for threads only.

Rules:

1. `tokenizer.json` is required, and is the tokenizer. `tokenizer_config.json` tells special tokens, and
   whether texts begin and end with them (`add_bos_token`, `add_eos_token`).
2. Templates as `transformers` finds them: `chat_template.jinja` and `additional_chat_templates/` win over
   `tokenizer_config.json`. A processor's `chat_template.json` is for chats without tools.
3. The operator's own template (`--chat-template`) wins over all.
4. Nothing is fetched from anywhere, and no code of a model is run.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from balancer.core.prompt.chat_template import ChatTemplate, TemplateBrokenError
from balancer.core.prompt.template_inputs import TemplateManner
from balancer.core.settings.control import EngineFlags
from balancer.tokens.local import LocalTokenizer
from balancer.tokens.templates import Templates
from balancer.tokens.text import TextTokenizer

OWN_RENDERERS = frozenset(
    {"deepseek_v32", "deepseek_v4", "deepseek_v41", "gpt_oss", "inkling", "kimi_k3"}
)
"""Model types whose chats vLLM renders with code, not with a template: ask the engine."""
OWN_TOKENIZERS = ("tekken.json",)
"""Files for which vLLM prefers another tokenizer to `tokenizer.json`, and renders with it."""

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerLoadError(Exception):
    """The directory holds no tokenizer that can be used. The message says what is missing."""


def load_tokenizer(
    directory: Path, strftime_now: Callable[[str], str], flags: EngineFlags | None = None
) -> LocalTokenizer:
    """Read `directory`, or raise TokenizerLoadError."""
    flags = flags or EngineFlags()
    config = _read_json(directory / "tokenizer_config.json")
    special = _special_tokens(config)
    tokenizer = _read_tokenizer(directory / "tokenizer.json")
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    _set_ends(tokenizer, config, special)

    def compiled(source: str) -> ChatTemplate:
        return ChatTemplate(
            source,
            special_tokens=special,
            strftime_now=strftime_now,
            content_format=flags.chat_template_content_format,
        )

    sources = _sources(directory, config, flags)
    try:
        templates = {name: compiled(source) for name, source in sources.items()}
    except TemplateBrokenError as error:
        raise TokenizerLoadError(f"{directory}: {error}") from error
    manner = TemplateManner(
        variables=flags.default_chat_template_kwargs,
        drops_tools_that_are_off=flags.exclude_tools_when_tool_choice_none,
    )
    can_be_brought = flags.trust_request_chat_template
    return LocalTokenizer(
        TextTokenizer(tokenizer, str(directory)),
        Templates(templates, manner=manner, compile_=compiled if can_be_brought else None),
    )


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


def _set_ends(tokenizer: Tokenizer, config: Mapping[str, Any], special: Mapping[str, Any]) -> None:
    """What `add_bos_token` and `add_eos_token` say wins over `tokenizer.json`, where they are given."""
    given = [config.get(f"add_{name}_token") for name in ("bos", "eos")]
    if given == [None, None]:
        return
    begins, ends = (
        special.get(f"{name}_token") if wanted else None
        for name, wanted in zip(("bos", "eos"), given, strict=True)
    )
    named = [each for each in (begins, ends) if each is not None]
    ids = [(each, tokenizer.token_to_id(each)) for each in named]
    if any(number is None for _, number in ids):
        return
    single = [f"{begins}:0"] * (begins is not None) + ["$A:0"] + [f"{ends}:0"] * (ends is not None)
    tokenizer.post_processor = TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=ids
    )


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
    """Special tokens by name, as text; absent and null ones are left undefined.

    Those that a model names itself (`image_token`) win, as in transformers 5.
    """
    usual = {name: _token_text(config[name]) for name in SPECIAL_NAMES if config.get(name)}
    return usual | {name: _token_text(each) for name, each in _own_tokens(config).items()}


def _own_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model names beside the usual ones: fields of their own, and tables of them.

    A list (`additional_special_tokens`) has no names: templates aren't shown it.
    """
    own = {
        name: each
        for name, each in config.items()
        if name.endswith("_token") and name not in SPECIAL_NAMES
    }
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    own = _tokens_of(own) | _tokens_of(listed)
    return own or _tokens_of(config.get("model_specific_special_tokens"))


def _tokens_of(table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        return {}
    return {name: each for name, each in table.items() if _is_token(each)}


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, dict) and value.get("__type") == "AddedToken"
    )


def _token_text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _sources(directory: Path, config: Mapping[str, Any], flags: EngineFlags) -> dict[str, str]:
    """Templates by name; `plain` is for chats without tools, `default` for all others."""
    if flags.chat_template is not None:
        return {"default": _read_text(Path(flags.chat_template))}
    if _read_json(directory / "config.json").get("model_type") in OWN_RENDERERS:
        return {}
    if any((directory / name).exists() for name in OWN_TOKENIZERS):
        return {}
    found = _files(directory) or _named(config.get("chat_template"))
    processor = _named(_read_json(directory / "chat_template.json").get("chat_template"))
    return {"plain": processor["default"], **found} if "default" in processor else found


def _files(directory: Path) -> dict[str, str]:
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    found = {path.stem: _read_text(path) for path in more}
    if (directory / "chat_template.jinja").is_file():
        found["default"] = _read_text(directory / "chat_template.jinja")
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerLoadError(f"{path}: {error}") from error


def _named(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {each["name"]: each["template"] for each in value if isinstance(each, dict)}
    return {}
