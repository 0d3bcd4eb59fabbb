"""Every hook is documented where its users look, and used by some test."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from pegboard.plugins import hookspecs
from pegboard.plugins.contracts import CONTRACTS

ROOT = Path(__file__).parents[2]
HOOKS = sorted(
    name
    for name, _ in inspect.getmembers(hookspecs, inspect.isfunction)
    if name.startswith("pegboard_")
)
TEST_TEXTS = {
    path: path.read_text()
    for pattern in ("core/tests/**/*.py", "*plugins/*/tests/**/*.py", "tests/**/*.py")
    for path in ROOT.glob(pattern)
    if path != Path(__file__)
}


def test_hooks_are_found() -> None:
    assert "pegboard_schedulers" in HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_says_what_it_is_for(hook: str) -> None:
    text = inspect.getdoc(getattr(hookspecs, hook)) or ""
    assert "called" in text.lower() or "context" in text.lower(), "when, and with which context?"


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_named_for_plugin_authors(hook: str) -> None:
    assert f"`{hook}`" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_used_by_a_test(hook: str) -> None:
    assert [path for path, text in TEST_TEXTS.items() if hook in text], f"no test names {hook}"


def test_each_interface_has_its_hook_and_no_hook_is_without() -> None:
    assert sorted(contract.hook for contract in CONTRACTS.values()) == HOOKS
