"""Templates that do too much are stopped."""

import pytest

from balancer.core.prompt.chat_template import ChatInputs, ChatTemplate, TemplateRefusedError
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
        pytest.param("{{ 'x' * 1000000000 }}", id="product"),
        pytest.param("{{ 1000000000 * [1] }}", id="product-of-lists"),
        pytest.param("{{ 10 ** 1000000000 }}", id="power"),
        pytest.param("{{ '%1000000000d' % 1 }}", id="wide-format"),
        pytest.param("{{ '%*d' % (1000000000, 1) }}", id="wide-format-elsewhere"),
        pytest.param("{{ 'x'.ljust(1000000000) }}", id="padding"),
        pytest.param("{{ 'x'.zfill(width=1000000000) }}", id="padding-by-name"),
        pytest.param(
            "{% set n = namespace(s='xx') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}"
            "{% endfor %}",
            id="doubled",
        ),
        pytest.param(
            "{% set n = namespace(s='xx') %}{% for a in range(60) %}{% set n.s = n.s + n.s %}"
            "{% endfor %}",
            id="added-to-itself",
        ),
    ],
)
def test_endless_template_is_stopped(source: str) -> None:
    """Whatever it loops with."""
    with pytest.raises(TemplateEndlessError):
        template(source).render(HI)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'ab' * 3 }}{{ 2 * 3 }}{{ 1.5 * 2 }}", "ababab63.0"),
        ("{{ 2 ** 10 }}{{ 7 % 4 }}{{ '%02d' % 7 }}", "1024307"),
        ("{{ 'a' + 'b' }}{{ 1 + 2 }}{{ [1] + [2] }}{{ 'a' ~ 1 ~ none }}", "ab3[1, 2]a1None"),
        ("{{ 'a'.ljust(3) }}|{{ 'a-b'.split('-', 1) }}", "a  |['a', 'b']"),
    ],
)
def test_small_steps_are_as_ever(source: str, expected: str) -> None:
    """Bounds change nothing within them."""
    assert template(source).render(HI) == expected


def test_there_is_no_lipsum() -> None:
    """A million paragraphs take a minute, in one step."""
    with pytest.raises(TemplateRefusedError):
        template("{{ lipsum(n=1000000) }}").render(HI)


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
