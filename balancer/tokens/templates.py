"""A model's chat templates, and those that clients bring along where the operator trusts them.

A template that was stopped for doing too much is left alone: it would hold up a thread, and with it the
interpreter, each time again.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Final

from balancer.core.prompt.chat_template import (
    ChatInputs,
    ChatTemplate,
    TemplateBrokenError,
    TemplateRefusedError,
)
from balancer.core.prompt.shape import ChatShape, Unscorable, UnscorableError
from balancer.core.prompt.template_inputs import TemplateManner, template_inputs
from balancer.core.prompt.template_limits import TemplateEndlessError

MAX_ENDLESS: Final = 3
"""Renderings that were stopped before a template is left alone."""
REMEMBERED_TEMPLATES: Final = 32
"""Of clients, compiled."""
_SYSTEM_TWICE: Final = tuple(
    {"role": role, "content": "t"} for role in ("system", "user", "system", "user")
)
_GREETING: Final = ({"role": "user", "content": "Hi"},)
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")


class ReadyTemplate:
    """A compiled template, and how chats are shown to it."""

    def __init__(self, template: ChatTemplate, manner: TemplateManner) -> None:
        self._template = template
        self._endless = 0
        self._own = replace(
            manner,
            content_format=template.content_format,
            knows_developers=template.knows_developers,
        )
        self._manner: TemplateManner | None = None

    @property
    def sees_parts(self) -> bool:
        return self._own.content_format == "openai"

    def render(self, shape: ChatShape) -> str:
        """Raises UnscorableError."""
        if self._endless >= MAX_ENDLESS:
            raise UnscorableError(Unscorable.TEMPLATE_ENDLESS)
        is_plain = not (shape.merges_system or shape.thinking_is_off)
        manner = self._own if is_plain else self._probed()
        try:
            return self._template.render(template_inputs(shape, manner))
        except TemplateRefusedError as error:
            raise UnscorableError(Unscorable.REFUSED) from error
        except TemplateEndlessError as error:
            self._endless += 1
            raise UnscorableError(Unscorable.TEMPLATE_ENDLESS) from error

    def _probed(self) -> TemplateManner:
        """With what only Anthropic's messages need to know, found out as engines do: by trying."""
        if self._manner is None:
            self._manner = replace(
                self._own,
                wants_system_first=self._try(ChatInputs(messages=_SYSTEM_TWICE)) is None,
                effort_without_thinking=self._effort_without_thinking(),
            )
        return self._manner

    def _effort_without_thinking(self) -> str:
        none = self._greet("none")
        is_ignored = none is None or any(self._greet(each) == none for each in _EFFORTS)
        return "low" if is_ignored else "none"

    def _greet(self, effort: str) -> str | None:
        shape = ChatShape(messages=_GREETING, reasoning_effort=effort)
        return self._try(template_inputs(shape, self._own))

    def _try(self, chat: ChatInputs) -> str | None:
        try:
            return self._template.render(chat)
        except (TemplateRefusedError, TemplateEndlessError):
            return None


class Templates:
    """Thread-safe."""

    def __init__(
        self,
        named: Mapping[str, ChatTemplate],
        *,
        manner: TemplateManner,
        compile_: Callable[[str], ChatTemplate] | None,
    ) -> None:
        """`named`: `default`, perhaps `plain` and `tool_use`. `compile_` None: clients bring none."""
        self._manner = manner
        self._named = {name: ReadyTemplate(each, manner) for name, each in named.items()}
        self._compile = compile_
        self._lock = Lock()
        self._brought: OrderedDict[str, ReadyTemplate] = OrderedDict()

    def find(self, shape: ChatShape) -> ReadyTemplate:
        """The template for this chat. Raises UnscorableError."""
        if shape.chat_template:
            return self._find_brought(shape.chat_template)
        names = ("plain", "default") if shape.tools is None else ("tool_use", "default")
        for name in names:
            if name in self._named:
                return self._named[name]
        raise UnscorableError(Unscorable.NO_TOKENIZER)

    def _find_brought(self, source: str) -> ReadyTemplate:
        if self._compile is None:
            raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
        if source in self._named:
            return self._named[source]
        with self._lock:
            known = self._brought.get(source)
            if known is not None:
                self._brought.move_to_end(source)
                return known
        try:
            ready = ReadyTemplate(self._compile(source), self._manner)
        except TemplateBrokenError as error:
            raise UnscorableError(Unscorable.REFUSED) from error
        with self._lock:
            self._brought[source] = ready
            if len(self._brought) > REMEMBERED_TEMPLATES:
                self._brought.popitem(last=False)
        return ready
