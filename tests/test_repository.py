"""What holds for the tree as a whole: sizes, names, documents that point somewhere."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("balancer", "indexer", "kvlb", "simulator", "benchmarks")
SHIPPED = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BANNED_FILES = {"utils.py", "util.py", "common.py", "base.py", "helpers.py", "misc.py"}
BANNED_CLASS = re.compile(r"^class \w*(Manager|Helper|Util|Utils)\b", re.MULTILINE)
ANCHOR = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)#([^)\s]+)\)")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SHIPPED, ids=relative)
def test_module_is_small_and_named_for_what_it_does(path: Path) -> None:
    """A module has at most 400 lines and a docstring; no drawer for leftovers."""
    text = path.read_text()

    assert text.count("\n") <= 400
    assert path.name not in BANNED_FILES
    assert not BANNED_CLASS.search(text)
    assert text.lstrip().startswith(('"""', 'r"""')), "the first line says what the module is for"


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_of_documents_lead_somewhere(path: Path) -> None:
    """A relative link in a document names an existing file."""
    missing = [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()]

    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_anchors_of_links_lead_somewhere(path: Path) -> None:
    """A link into a document names one of its headings."""
    missing = [
        f"{name}#{anchor}"
        for name, anchor in ANCHOR.findall(path.read_text())
        if anchor not in anchors(path.parent / name if name else path)
    ]

    assert missing == []


def anchors(path: Path) -> set[str]:
    """Headings as GitHub spells them in an address."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_glossary_names_existing_modules() -> None:
    """Every module the glossary points at is there."""
    named = re.findall(r"`([a-z]+/[a-z_/]+(?:\.py|/))`", (ROOT / "docs/glossary.md").read_text())

    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_architecture_names_existing_modules() -> None:
    """The newcomer's walk names only files that exist."""
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`((?:balancer|indexer|kvlb|simulator|tests)/[a-z_/]+(?:\.py|/))`", text)

    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_version_is_in_the_changelog_or_unreleased() -> None:
    """The changelog knows the version that pyproject.toml names, or has an Unreleased part."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    text = (ROOT / "CHANGELOG.md").read_text()

    assert f"## {version}" in text or "## Unreleased" in text


def test_nothing_tracked_names_a_registry_or_this_machine() -> None:
    """No lock file, registry address or absolute work path is committed."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    texts = [
        name for name in tracked if name.endswith((".py", ".toml", ".md", ".yml", ".yaml", ".txt"))
    ]
    pattern = re.compile(r"index-url|/simple/|/work/(main|shared)")
    own = "tests/test_repository.py"

    assert [n for n in texts if n != own and pattern.search((ROOT / n).read_text())] == []
    assert "uv.lock" not in tracked
