"""docs/ says what the code says."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"

_SPEC = importlib.util.spec_from_file_location(
    "reference_pages", Path(__file__).with_name("reference_pages.py")
)
assert _SPEC is not None and _SPEC.loader is not None
reference_pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference_pages)


@pytest.mark.parametrize(
    ("page", "generate"),
    [
        (reference_pages.INTERFACES, reference_pages.interfaces_page),
        (reference_pages.MANIFEST, reference_pages.manifest_page),
    ],
    ids=["interfaces", "manifest"],
)
def test_a_reference_page_is_what_the_code_says(page: Path, generate: Callable[[], str]) -> None:
    same = page.read_text(encoding="utf-8") == generate()
    assert same, f"docs/{page.name} is out of date: run python tests/repo/reference_pages.py"


def test_files_that_the_architecture_names_exist() -> None:
    """By their path from `core/pegboard` on."""
    named = re.findall(r"`(\w[\w/]*\.py)`", ARCHITECTURE.read_text(encoding="utf-8"))
    assert len(named) > 20
    missing = [name for name in named if not (ROOT / "core" / "pegboard" / name).exists()]
    assert not missing, "docs/architecture.md names files that are not there"


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    broken = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not _leads_somewhere(page, link)
    ]
    assert not broken


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path) if path else page
    if not target.exists():
        return False
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M) if anchor else []
    return not anchor or anchor in {_anchor(heading) for heading in headings}


def _anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
