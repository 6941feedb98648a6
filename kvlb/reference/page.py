"""Renders the reference as Markdown: the page docs/configuration.md, or one section of it."""

import re
import textwrap

from jinja2 import Environment, PackageLoader, StrictUndefined

from balancer.core.settings.errors import nearest
from kvlb.errors import SettingsError
from kvlb.reference.keys import sections, transfer_sections
from kvlb.settings import KvlbSettings

WIDTH = 130
DOCUMENT = re.compile(r"\bdocs/([a-z-]+\.md)")


def render_page() -> str:
    """All of it."""
    instances, top, *others = sections()
    page = _environment().get_template("configuration.md.j2")
    return page.render(
        instances=instances,
        transfers=transfer_sections(),
        top=top,
        sections=others,
        reloadable=KvlbSettings.reloadable(),
    )


def render_section(name: str) -> str:
    """What stands under one key of the top of the file. Raises SettingsError if there is none."""
    known = {each.name: each for each in (*sections(), *transfer_sections()) if each.name}
    if name not in known:
        raise SettingsError(f"no section `{name}`{nearest(name, list(known))}")
    macros = _environment().get_template("section.md.j2")
    rendered: str = macros.make_module().section(known[name])  # type: ignore[attr-defined]
    return rendered


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvlb.reference", "."),
        autoescape=False,  # noqa: S701 - Markdown, made of our own words
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters.update(cell=_cell, heading=_heading, prose=_prose)
    return environment


def _cell(text: str) -> str:
    """As it can stand in a table."""
    return _linked(text).replace("|", "\\|")


def _heading(title: str) -> str:
    """A sentence as the second half of a line; a name such as OpenTelemetry keeps its capital."""
    first, *_ = title.split()
    shown = title if first[1:] != first[1:].lower() else title[0].lower() + title[1:]
    return shown.removesuffix(".")


def _prose(text: str) -> str:
    return textwrap.fill(_linked(text), width=WIDTH, break_long_words=False, break_on_hyphens=False)


def _linked(text: str) -> str:
    """Pages are named by their path in the source, and linked from beside them."""
    return DOCUMENT.sub(r"[\1](\1)", text)
