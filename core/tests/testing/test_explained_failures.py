"""A stranger whose part fails a contract suite is told what was compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
import pytest
from pegboard.interfaces.scheduler import Scheduler
from pegboard.testing.scheduler import SchedulerContract


class Lazy(Scheduler):
    def plan(self, queue, step):
        pass


class TestLazy(SchedulerContract):
    @pytest.fixture
    def make(self):
        return lambda context: Lazy()
"""


def test_the_assertion_of_a_suite_is_explained(tmp_path: Path) -> None:
    (tmp_path / "test_lazy.py").write_text(TEST)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_lazy.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1, run.stdout
    explained = [line for line in run.stdout.splitlines() if line.startswith("E  ")]
    assert explained and explained[0].strip() != "E       AssertionError", run.stdout
    assert any("assert " in line for line in explained)
    assert "PytestAssertRewriteWarning" not in run.stdout


def test_testing_needs_no_pytest() -> None:
    code = "import sys, pegboard.testing.tiny; print('pytest' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize("suite", ["scheduler", "executor", "kv_allocator"])
def test_suites_are_rewritten_here_too(suite: str) -> None:
    module = __import__(f"pegboard.testing.{suite}", fromlist=["x"])
    assert type(module.__loader__).__name__ == "AssertionRewritingHook"
