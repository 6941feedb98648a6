"""Templates that do too much are stopped."""

import pytest

from balancer.core.prompt.chat_template import ChatInputs, ChatTemplate
from balancer.core.prompt.template_limits import MAX_CHARS, TemplateEndlessError, joined

HI = ChatInputs(messages=[{"role": "user", "content": "hi"}])


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={}, strftime_now=str)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            id="loops",
        ),
        pytest.param(
            "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}"
            "{% endmacro %}{{ twice(40) }}",
            id="recursion",
        ),
        pytest.param("{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}", id="much-text"),
    ],
)
def test_endless_template_is_stopped(source: str) -> None:
    """Whatever it loops with."""
    with pytest.raises(TemplateEndlessError):
        template(source).render(HI)


def test_steps_are_counted_anew_each_time() -> None:
    """A template that does much is not stopped for having done it often."""
    much = template("{% for a in range(99999) %}{% endfor %}done")

    assert {much.render(HI) for _ in range(11)} == {"done"}


def test_counting_shows_nowhere() -> None:
    """Loops know their place, macros their arguments."""
    source = (
        "{% macro m(a) %}[{{ a }}]{% endmacro %}"
        "{% for x in 'abc' %}{{ loop.index }}{{ m(x) }}{% if not loop.last %}, {% endif %}{% endfor %}"
    )

    assert template(source).render(HI) == "1[a], 2[b], 3[c]"


def test_text_at_the_limit_is_no_fault() -> None:
    """One character more is."""
    assert len(joined(["x" * MAX_CHARS])) == MAX_CHARS
    with pytest.raises(TemplateEndlessError):
        joined(["x" * MAX_CHARS, "y"])
