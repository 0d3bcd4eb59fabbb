"""`make serve` starts the embedded default, on the kernels of pegboard-cpu."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard.cli import main

PEGBOARD = Path(sys.executable).parent / "pegboard"
QUICKSTART = Path(__file__).parents[2] / "examples" / "configs" / "quickstart.yaml"


def test_it_runs_on_the_cpu_plugin_and_check_says_which_kernel_each_layer_gets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--config", str(QUICKSTART), "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    found = json.loads(said.out)
    names = {kernel["operation"]: kernel["name"] for kernel in found["kernels"]}
    assert names == dict.fromkeys(
        ("linear", "rms_norm", "rotary", "silu_mul", "sample", "decoder_layer"), "cpu"
    )
    [joint] = [kernel for kernel in found["kernels"] if kernel["operation"] == "decoder_layer"]
    assert joint["why"].startswith("joins linear, rms_norm, silu_mul and attention")
    assert {k["inputs"] for k in found["kernels"] if k["operation"] == "linear"} == {
        "inputs as they are"
    }
    [attention] = [part for part in found["parts"] if part["interface"] == "attention"]
    assert attention["name"] == "cpu"
    assert (found["numerics"], found["not_promised"]) == ("invariant", [])


@pytest.mark.slow
def test_it_knows_the_capital_of_france() -> None:
    question = ["--chat", "--prompt", "What is the capital of France?", "--temperature", "0"]
    run = subprocess.run(
        [PEGBOARD, "generate", "--config", QUICKSTART, *question, "--max-tokens", "16"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Paris" in run.stdout
