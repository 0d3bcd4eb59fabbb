"""The benchmark of speculation: its tasks are what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "bench"))

from spec_tasks import chat_prompts, copy_tasks  # noqa: E402


def test_copy_tasks_change_one_word_that_they_hold(shared_folder: Path) -> None:
    tasks = copy_tasks(shared_folder)
    assert len({task.prompt for task in tasks}) == len(tasks) >= 40
    for task in tasks:
        assert re.search(rf"\b{task.replace}\b", task.text)
        assert not re.search(rf"\b{task.by}\b", task.text)
        assert task.text in task.prompt


def test_open_chat_is_ten_questions_of_eight_kinds(shared_folder: Path) -> None:
    prompts = chat_prompts(shared_folder)
    assert len(set(prompts)) == len(prompts) == 80


def test_without_the_shared_material_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="PEGBOARD_SHARED"):
        copy_tasks(tmp_path)
