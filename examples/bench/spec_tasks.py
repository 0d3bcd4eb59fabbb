"""What `bench_spec.py` asks for: texts to be copied with one change, and open questions.

The copy tasks stand in `copy_tasks.json`: passages of others' texts by question and number of words (the
texts are in the folder `PEGBOARD_SHARED`, else `../shared` of the checkout), and functions of this
repository as they once were. They were committed before anything was measured with them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("PEGBOARD_SHARED", HERE.parents[2] / "shared"))
QUESTIONS = Path("fixtures") / "text" / "spec_bench.jsonl"
TASKS = HERE / "copy_tasks.json"
OPEN_CHAT = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
"""Categories of the questions: ten each."""

SUMMARIZE = "Summarize: "
"""Stands before the passages of one category."""


@dataclass(frozen=True, slots=True)
class CopyTask:
    """A text that is asked for again, with one change.

    Attributes:
        prompt: what is asked.
        text: what is to be copied.
        replace, by: the change.
    """

    prompt: str
    text: str
    replace: str
    by: str


def copy_tasks(shared: Path = SHARED) -> list[CopyTask]:
    """All copy tasks.

    Raises:
        SystemExit: the folder has no questions.
    """
    told = json.loads(TASKS.read_text())
    questions = {one["question_id"]: one for one in _questions(shared)}
    found = []
    for task in told["tasks"]:
        if "function" in task:
            kind, text = "function", "\n".join(task["code"])
        else:
            kind, turn = "passage", questions[task["question"]]["turns"][0]
            text = " ".join(turn.removeprefix(SUMMARIZE).split()[: task["num_words"]])
        change = {"replace": task["replace"], "by": task["by"]}
        found.append(CopyTask(told[kind].format(text=text, **change), text, **change))
    return found


def chat_prompts(shared: Path = SHARED) -> list[str]:
    """First turns of the open questions.

    Raises:
        SystemExit: the folder has no questions.
    """
    return [one["turns"][0] for one in _questions(shared) if one["category"] in OPEN_CHAT]


def _questions(shared: Path) -> Sequence[dict[str, Any]]:
    file = shared / QUESTIONS
    if not file.exists():
        raise SystemExit(
            f"no questions at {file}; set PEGBOARD_SHARED to the folder of its fixtures"
        )
    return [json.loads(line) for line in file.read_text().splitlines()]
