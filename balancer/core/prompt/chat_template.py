"""Renders a chat the way the engine does: same template language, same globals, same quirks.

Rules:

1. The template is untrusted text of a model's author: it runs in an immutable sandbox, sees
   plain JSON values only, and gets time through an injected function.
2. The environment is that of `transformers`: trimmed blocks, loop controls, `raise_exception`,
   `tojson` without HTML escapes, `strftime_now`, `{% generation %}` blocks rendered as they are.
3. `content_format` says how the engine hands message content to this template
   (`core.prompt.content_format`).
4. Of what a client adds (`chat_template_kwargs`) the template sees the names it reads, as in the engine.
5. A template that refuses a chat (`raise_exception`) refuses it in the engine, too. One that loops is
   stopped (`core.prompt.template_limits`).

Cost: compiled once; rendering is linear in the chat and holds the GIL.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from balancer.core.prompt.content_format import ContentFormat, find_content_format
from balancer.core.prompt.template_limits import (
    BUDGET,
    BoundedEnvironment,
    StepBudget,
    count_steps,
    joined,
)

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the final message ends. The blank shows whether the template strips messages."""

TAKEN_NAMES: Final = frozenset(
    {
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""What `transformers` takes for its own argument: no template ever sees it."""


_REFUSALS: Final = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateBrokenError(Exception):
    """The template can't be compiled: nothing can be rendered with it."""


class TemplateRefusedError(Exception):
    """The template, or a rule around it, refuses this chat. The engine answers 400 then."""


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training: render it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Replace the block by what it holds, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInputs:
    """Everything a chat template may see, as JSON values in the engine's form."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs` and the like. Never overrides the fields above; may be more than the
    template reads."""


class ChatTemplate:
    """One compiled template with the special tokens it may name."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, Any],
        strftime_now: Callable[[str], str],
        content_format: ContentFormat | None = None,
    ) -> None:
        """Compile `source`, or raise TemplateBrokenError. `content_format` overrides what it looks like."""
        environment = _environment(strftime_now)
        try:
            tree = environment.parse(source)
            variables = meta.find_undeclared_variables(tree)
            self.content_format: ContentFormat = content_format or find_content_format(tree)
            count_steps(environment, tree)
            code = environment.compile(tree)
        except (TemplateError, MemoryError, OverflowError, RecursionError, SyntaxError) as error:
            raise TemplateBrokenError(f"chat template: {error}") from error
        globals_ = environment.make_globals(None)
        self._template: Template = Template.from_code(environment, code, globals_)
        self._special_tokens = dict(special_tokens)
        self._reads_content = "content" in source
        self.variables: frozenset[str] = frozenset(variables - TAKEN_NAMES)
        """Names the template reads from outside."""
        self.knows_developers = "'developer'" in source or '"developer"' in source
        """Engines make a `developer` a `system` for other templates."""

    def render(self, chat: ChatInputs) -> str:
        """Render `chat`. Raises TemplateRefusedError or TemplateEndlessError."""
        messages, final_text = chat.messages, ""
        if chat.continue_final_message:
            messages, final_text = self._marked(chat)
        read = self.variables
        names = dict(self._special_tokens)
        names |= {name: value for name, value in chat.extra.items() if name in read}
        names |= {
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
            BUDGET: StepBudget(),
        }
        try:
            rendered = joined(self._template.generate(names))
        except _REFUSALS as error:
            # What a template does with odd messages is its own affair: any of these is a refusal.
            raise TemplateRefusedError(f"chat template: {type(error).__name__}") from error
        return _cut_at_tag(rendered, final_text) if chat.continue_final_message else rendered

    def _marked(self, chat: ChatInputs) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Append the tag to the last text of the last message."""
        if chat.add_generation_prompt or not chat.messages or not self._reads_content:
            raise TemplateRefusedError("continue_final_message does not fit this chat")
        last = dict(chat.messages[-1])
        content = last.get("content")
        if isinstance(content, str):
            last["content"] = content + CONTINUE_TAG
            return [*chat.messages[:-1], last], content
        parts = [dict(part) for part in content or ()]
        for part in reversed(parts):
            if isinstance(text := part.get("text"), str):
                part["text"] = text + CONTINUE_TAG
                last["content"] = parts
                return [*chat.messages[:-1], last], text
        raise TemplateRefusedError("the final message has no text to continue")


def _cut_at_tag(rendered: str, final_text: str) -> str:
    """End the rendered chat where the final message ends."""
    at = rendered.rfind(CONTINUE_TAG.strip())
    if at < 0 or final_text.strip() not in rendered:
        raise TemplateRefusedError("the template drops the final message")
    if rendered.startswith(CONTINUE_TAG, at):
        return rendered[:at]
    # The template strips messages, so the final one's own trailing space is gone as well.
    return rendered[:at].rstrip()


def _environment(strftime_now: Callable[[str], str]) -> Environment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models were trained on text without that."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
