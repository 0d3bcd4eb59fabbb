"""One version for everything of ours, and ranges that fit it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import pegboard

ROOT = Path(__file__).parents[2]
PROJECTS = sorted([ROOT / "core" / "pyproject.toml", *ROOT.glob("*plugins/*/pyproject.toml")])
PLUGINS = [path for path in PROJECTS if path.parent.name != "core"]


def project(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(path.read_text())["project"]
    return table


FOLDERS = {"pegboard-quant": "common"}
"""Folders of the distributions that are not named by theirs."""


def name(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def short_name(path: Path) -> str:
    """A plugin's distribution, as the core's extras say it."""
    return str(project(path)["name"]).removeprefix("pegboard-").replace("-", "_")


@pytest.mark.parametrize("path", PROJECTS, ids=name)
def test_a_distribution_has_the_version_of_the_core(path: Path) -> None:
    assert project(path)["version"] == pegboard.__version__


@pytest.mark.parametrize("path", PROJECTS, ids=name)
def test_a_distribution_asks_for_the_python_of_the_core(path: Path) -> None:
    core = project(ROOT / "core" / "pyproject.toml")
    assert project(path)["requires-python"] == core["requires-python"]


@pytest.mark.parametrize("path", PLUGINS, ids=name)
def test_a_plugin_asks_for_a_range_of_the_core(path: Path) -> None:
    requirements = [Requirement(text) for text in project(path)["dependencies"]]
    (core,) = [one for one in requirements if one.name == "pegboard"]
    version = Version(pegboard.__version__)
    next_minor = f"{version.major}.{version.minor + 1}.0"
    assert version in core.specifier
    assert Version(next_minor) not in core.specifier, "a minor version may break interfaces"


@pytest.mark.parametrize("path", PLUGINS, ids=name)
def test_a_plugin_is_an_extra_of_the_core(path: Path) -> None:
    extras = project(ROOT / "core" / "pyproject.toml")["optional-dependencies"]
    (requirement,) = [Requirement(text) for text in extras[short_name(path)]]
    assert requirement.name == project(path)["name"]
    assert Version(pegboard.__version__) in requirement.specifier
    assert f"pegboard[{short_name(path)}]" in extras["all"]


@pytest.mark.parametrize("path", PROJECTS, ids=name)
def test_a_distribution_carries_the_license(path: Path) -> None:
    assert (path.parent / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("path", PLUGINS, ids=name)
def test_a_plugin_is_found_by_its_entry_point(path: Path) -> None:
    table = project(path)
    assert path.parent.name == FOLDERS.get(table["name"], short_name(path))
    assert list(table["entry-points"]) == ["pegboard"]
    for module in table["entry-points"]["pegboard"].values():
        assert (path.parent / module / "plugin.toml").is_file()


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == pegboard.__version__
