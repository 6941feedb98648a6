"""What a template is handed as content: text, or parts."""

import pytest
from jinja2 import Environment

from balancer.core.prompt.content_format import find_content_format

PARTS = "{% for part in message.content %}{{ part.text }}{% endfor %}"


def over_messages(body: str, messages: str = "messages", name: str = "message") -> str:
    return f"{{% for {name} in {messages} %}}{body}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(over_messages("{{ message.content }}"), "string", id="text"),
        pytest.param(over_messages(PARTS), "openai", id="loop"),
        pytest.param(over_messages(PARTS.replace(".content", "['content']")), "openai", id="item"),
        pytest.param(over_messages(PARTS, "messages[1:]"), "openai", id="slice"),
        pytest.param(
            "{% set rest = messages[1:] %}{% set more = rest %}" + over_messages(PARTS, "more"),
            "openai",
            id="renamed",
        ),
        pytest.param(
            over_messages(PARTS.replace(".content", ".content | list")), "openai", id="filtered"
        ),
        pytest.param(
            over_messages(PARTS.replace(".content", ".parts")), "string", id="other-field"
        ),
        pytest.param(PARTS, "string", id="not-a-message"),
        pytest.param(
            over_messages("{% for p in message.x.content %}{% endfor %}"), "string", id="deeper"
        ),
        pytest.param(
            over_messages("{% set content = message.content %}{% for p in content %}{% endfor %}"),
            "openai",
            id="variable-named-content",
        ),
        pytest.param(
            over_messages("{% set c = message.content %}{% for p in c %}{% endfor %}"),
            "string",
            id="variable-named-otherwise",
        ),
        pytest.param(
            "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
            + over_messages("{{ show(message.content) }}"),
            "openai",
            id="macro",
        ),
        pytest.param(
            "{% macro show(a, b) %}{% for p in b %}{% endfor %}{% endmacro %}"
            + over_messages("{{ show(1, b=message.content) }}"),
            "openai",
            id="macro-by-name",
        ),
        pytest.param(
            "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
            + over_messages("{{ show(tools) }}{{ other(message.content) }}"),
            "string",
            id="macro-of-something-else",
        ),
        pytest.param(
            "{% macro show(msg) %}{% set c = msg.content %}{% for p in c %}{% endfor %}{% endmacro %}"
            + over_messages("{{ show(message) }}"),
            "string",
            id="macro-with-a-message",
        ),
        pytest.param(
            "{% set ns = namespace() %}{% set ns.rest = messages %}" + over_messages(PARTS),
            "string",
            id="vllm-gives-up-on-attributes",
        ),
        pytest.param(
            over_messages(PARTS) + "{% for a, b in messages %}{% endfor %}",
            "string",
            id="vllm-gives-up-on-pairs",
        ),
    ],
)
def test_content_format_is_the_engines(template: str, expected: str) -> None:
    """Tools that loop over content in their own way are no reason to show parts."""
    assert find_content_format(Environment(autoescape=True).parse(template)) == expected
