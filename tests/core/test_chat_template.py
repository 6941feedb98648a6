"""Chat templates render as in the engine."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.prompt.chat_template import (
    ChatInputs,
    ChatTemplate,
    TemplateBrokenError,
    TemplateRefusedError,
)

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}</>{% endfor %}"


def template(source: str) -> ChatTemplate:
    """A template that knows one special token and a date."""
    return ChatTemplate(
        source, special_tokens={"bos_token": "<s>"}, strftime_now=lambda form: f"now:{form}"
    )


def say(*texts: Any) -> list[Mapping[str, Any]]:
    """Messages of one user."""
    return [{"role": "user", "content": text} for text in texts]


def render(source: str, *texts: Any, **fields: Any) -> str:
    """Render messages with `source`."""
    return template(source).render(ChatInputs(messages=say(*texts), **fields))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("{{ bos_token }}{{ eos_token }}", "<s>", id="special-tokens"),
        pytest.param("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}', id="tojson-escapes-nothing"),
        pytest.param(
            "{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}",
            json.dumps({"a": 2, "b": 1}, indent=1),
            id="tojson-options",
        ),
        pytest.param("{{ strftime_now('%Y') }}", "now:%Y", id="injected-time"),
        pytest.param(
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "01",
            id="loop-controls",
        ),
        pytest.param("  {% if true %}\nx{% endif %}", "x", id="blocks-are-trimmed"),
        pytest.param(
            "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
            "hi!",
            id="generation-block",
        ),
        pytest.param("{{ tools is none }}{{ documents is none }}", "TrueTrue", id="absent-is-none"),
        pytest.param("{{ add_generation_prompt }}", "True", id="generation-prompt-is-default"),
    ],
)
def test_environment_is_that_of_transformers(source: str, expected: str) -> None:
    """Templates are written for transformers' environment and no other."""
    assert render(source, "hi") == expected


def test_extra_variables_reach_the_template() -> None:
    """`chat_template_kwargs` are plain variables."""
    assert render("{{ enable_thinking }}", "hi", extra={"enable_thinking": False}) == "False"


def test_extra_variables_override_no_field() -> None:
    """A client can't smuggle messages past its own `messages`."""
    assert render(PLAIN, "hi", extra={"messages": say("other")}) == "<user>hi</>"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ raise_exception('no') }}", id="raise-exception"),
        pytest.param("{{ messages[0].content + 1 }}", id="type-error"),
        pytest.param("{{ missing.field }}", id="undefined"),
        pytest.param("{{ ''.__class__.__mro__ }}", id="sandbox"),
        pytest.param("{{ messages.append(1) }}", id="immutable"),
        pytest.param("{{ 1 // 0 }}", id="arithmetic"),
    ],
)
def test_what_a_template_refuses_is_refused(source: str) -> None:
    """The engine would answer 400 for such a chat."""
    with pytest.raises(TemplateRefusedError):
        render(source, "hi")


def test_refusal_does_not_repeat_the_chat() -> None:
    """Error texts end up in logs; prompts must not."""
    with pytest.raises(TemplateRefusedError) as raised:
        render("{{ raise_exception(messages[0].content) }}", "secret words")

    assert "secret" not in str(raised.value)


def test_template_that_does_not_compile_is_broken() -> None:
    """That is found when it is loaded, not at the first request."""
    with pytest.raises(TemplateBrokenError):
        template("{% for %}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(PLAIN, "string", id="content-printed"),
        pytest.param(
            "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "openai",
            id="content-attribute-looped",
        ),
        pytest.param(
            "{% for m in messages %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}",
            "openai",
            id="content-item-looped-through-filter",
        ),
        pytest.param(
            "{% set rest = messages[1:] %}{% set more = rest %}"
            "{% for m in more %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "openai",
            id="messages-renamed-twice",
        ),
        pytest.param(
            "{% set ns.rest = messages %}{% for m in ns.rest %}"
            "{% for c in m.content %}{% endfor %}{% endfor %}",
            "string",
            id="messages-in-a-namespace-are-not-followed",
        ),
        pytest.param(
            "{% for m in messages %}{% for c in m.parts %}{% endfor %}{% endfor %}",
            "string",
            id="other-attribute-looped",
        ),
        pytest.param(
            "{% for m in messages %}{% for c in m['parts'] %}{% endfor %}{% endfor %}",
            "string",
            id="other-item-looped",
        ),
        pytest.param(
            "{% for a, b in messages | items %}{% for c in x.content %}{% endfor %}{% endfor %}",
            "string",
            id="pairs-are-not-followed",
        ),
        pytest.param("{% for i in [1] %}{% endfor %}", "string", id="other-loop"),
    ],
)
def test_content_format_follows_the_template(source: str, expected: str) -> None:
    """The engine shows content as parts only to templates that loop over it."""
    assert template(source).content_format == expected


def test_variables_are_known() -> None:
    """Which outside names a template reads."""
    assert template("{{ messages }}{{ reasoning_effort }}").variables == {
        "messages",
        "reasoning_effort",
    }


CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


def test_final_message_is_left_open() -> None:
    """Nothing that the template writes after the final text remains."""
    assert render(PLAIN, "a", "b ", **CONTINUED) == "<user>a</><user>b "


def test_final_message_of_a_trimming_template_is_trimmed() -> None:
    """A template that strips messages strips the open one, too."""
    assert render(TRIMMED, "a", "b ", **CONTINUED) == "<user>a</><user>b"


def test_last_text_part_is_left_open() -> None:
    """With content as parts the last text among them is continued."""
    source = (
        "{% for m in messages %}{% for c in m.content %}[{{ c.text or c.type }}]"
        "{% endfor %}{% endfor %}."
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "other"}]

    assert render(source, parts, **CONTINUED) == "[a][b"


@pytest.mark.parametrize(
    ("source", "content", "fields"),
    [
        pytest.param(PLAIN, "a", {"continue_final_message": True}, id="with-generation-prompt"),
        pytest.param("{{ messages | length }}content", "a", CONTINUED, id="content-dropped"),
        pytest.param("{{ messages | length }}", "a", CONTINUED, id="content-not-read"),
        pytest.param(PLAIN, None, CONTINUED, id="nothing-to-continue"),
        pytest.param(PLAIN, [{"type": "x"}], CONTINUED, id="no-text-to-continue"),
    ],
)
def test_final_message_that_cannot_be_continued(
    source: str, content: Any, fields: dict[str, Any]
) -> None:
    """The engine refuses these."""
    with pytest.raises(TemplateRefusedError):
        render(source, content, **fields)


def test_empty_chat_cannot_be_continued() -> None:
    """There is no final message."""
    with pytest.raises(TemplateRefusedError):
        render(PLAIN, **CONTINUED)


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_continuing_is_the_beginning_of_rendering(texts: list[str]) -> None:
    """Law: an open chat is a prefix of the closed one that ends with the final text."""
    opened = render(PLAIN, *texts, **CONTINUED)

    assert render(PLAIN, *texts, add_generation_prompt=False).startswith(opened)
    assert opened.endswith(texts[-1])
