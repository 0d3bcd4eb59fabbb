"""The benchmark of speculation: its tasks are what it says, and its table says what was measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from pegboard.testing.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "examples" / "bench"
sys.path.insert(0, str(BENCH))

from rounds import bounds  # noqa: E402
from spec_tables import PLAIN, table  # noqa: E402
from spec_tasks import chat_prompts, copy_tasks  # noqa: E402

MARKS = "<!-- bench_spec -->\n", "<!-- /bench_spec -->\n"


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


def test_bounds_hold_the_median_with_95_percent() -> None:
    # Of 6 rounds all are above, or all below, with 2 * 2**-6; of 12 so are 9 of 10 with 3.9 percent.
    assert bounds([6.0, 2.0, 3.0, 1.0, 5.0, 4.0]) == (1.0, 6.0)
    assert bounds([float(value) for value in range(12)]) == (2.0, 9.0)


class TestTable:
    def run(self, seconds: float, **more: Any) -> dict[str, Any]:
        drafts = {"num_rows": 100, "tried_at": [], "accepted_at": []}
        return {"num_decoded": 100, "decode_s": seconds, **drafts, **more}

    def case(self, kind: str, batch: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
        drafts = {"num_rows": 50, "tried_at": [40, 30], "accepted_at": [30, 15]}
        runs = {
            name: [self.run(one, **({} if name == PLAIN else drafts)) for one in of_rounds]
            for name, of_rounds in seconds.items()
        }
        about = {"cpu": "a processor", "threads": 1, "clock": "wall time", "load_before": 0.1}
        about |= {"weights_bytes": 50e6, "machine": {"read_gb_s_1t": 1.0}, "max_tokens": 128}
        return {**about, "kind": kind, "weights": "float32", "batch": batch, "runs": runs}

    def cells(self, case: dict[str, Any]) -> list[str]:
        line = table({"cases": {"a case": case}}, "spec.json").splitlines()[2]
        return line.strip("| ").split(" | ")

    def test_ratios_limits_and_acceptance(self) -> None:
        plain, fixed, auto = [1.0, 2.0, 4.0], [0.5, 0.8, 1.0], [0.25, 0.5, 1.0]
        seconds = {PLAIN: plain, "ngram, 4": fixed, "ngram, auto": auto}
        cells = self.cells(self.case("copy", 1, seconds))
        assert cells[:6] == ["copy", "float32", "1", "43", "20", "ngram"]
        assert cells[6:8] == ["2.500 (2.000 to 4.000)", "4.000 (4.000 to 4.000)"]
        # Two tokens a step; 45 of 60 first ones were right.
        assert cells[8:12] == ["171", "40", "2.00", "0.75, 0.50"]
        assert cells[12] == "1.600 (1.000 to 2.000)"

    def test_what_misses_its_aim_is_bold(self) -> None:
        seconds = {PLAIN: [1.0, 1.0], "suffix, 4": [1.05, 0.9]}
        assert self.cells(self.case("chat", 8, seconds))[6].startswith("**")
        assert not self.cells(self.case("copy", 8, {**seconds, "suffix, 4": [1.0, 0.9]}))[
            6
        ].startswith("**")
        # Copies of one sequence are to be twice as fast.
        assert self.cells(self.case("copy", 1, {**seconds, "suffix, 4": [0.9, 0.6]}))[6].startswith(
            "**"
        )


def test_the_real_run_finds_a_place_for_its_table() -> None:
    page = (BENCH / "README.md").read_text()
    assert all(page.count(mark) == 1 for mark in MARKS)


@pytest.mark.slow
def test_it_runs(shared_folder: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": 4096}
    model = write_tiny_model(tmp_path / "tiny", tokenizer=True, **sizes)
    page, out = tmp_path / "page.md", tmp_path / "spec.json"
    page.write_text("".join(MARKS))
    command: list[str | Path] = [
        sys.executable,
        BENCH / "bench_spec.py",
        "--model",
        model,
        "--out",
        out,
    ]
    command += ["--page", page, "--shared", shared_folder, "--rounds", "2", "--max-tokens", "32"]
    command += ["--weights", "float32", "--batch", "1", "3", "--drafter", "suffix"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--tokens", "3", "auto"], env=environment, check=True, timeout=300)
    cases = json.loads(out.read_text())["cases"]
    assert {(case["kind"], case["batch"]) for case in cases.values()} == {
        (kind, batch) for kind in ("copy", "chat") for batch in (1, 3)
    }
    runs = [run for case in cases.values() for of in case["runs"].values() for run in of]
    for run in runs:
        assert sum(run["verified"].values()) == run["num_rows"]
        compared = list(zip(run["tried_at"], run["accepted_at"], strict=True))
        assert all(tried >= right for tried, right in compared)
        # Each row of a step brings a token, and what was accepted; ends cut some of that off.
        assert run["num_decoded"] <= run["num_rows"] + sum(right for _, right in compared)
    assert any(sum(run["accepted_at"]) for run in runs)
    assert page.read_text().count("suffix") == len(cases)
    ET.parse(out.with_suffix(".svg"))
