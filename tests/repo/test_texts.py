"""Texts of the repository speak of no machine, and no package registry."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = "/" + "home/"
PATTERNS = {
    "a user's home": re.compile(rf"{HOME}\w|/(?:root|Users)/\w"),
    "the folder of a checkout": re.compile(rf"{re.escape(str(ROOT))}\b"),
    "the folder of shared material": re.compile(rf"{re.escape(str(ROOT.parent / 'shared'))}\b"),
    "a package registry": re.compile(
        r"index-url|find-links|https?://[a-z0-9.-]+/(?:simple|packages)/"
    ),
}
PROSE = {".md", ".py", ".toml", ".yaml", ".yml", ".txt", ".json", ".cfg", ""}


def texts() -> dict[str, str]:
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in names.splitlines()]
    return {
        file.relative_to(ROOT).as_posix(): file.read_text(errors="replace")
        for file in files
        if file.is_file() and file.suffix in PROSE and file != Path(__file__)
    }


def test_no_machine_and_no_registry_is_named() -> None:
    found = [
        f"{name}: {what}"
        for name, text in texts().items()
        for what, pattern in PATTERNS.items()
        if pattern.search(text)
    ]
    assert found == []


def test_every_distribution_has_a_readme_with_limits() -> None:
    for project in ROOT.glob("*plugins/*/pyproject.toml"):
        text = (project.parent / "README.md").read_text()
        assert "pip install" in text and "```yaml" in text and "Limits" in text, project.parent.name
