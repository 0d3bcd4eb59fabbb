"""What `make serve` starts: the embedded default, on the kernels of pegboard-cpu."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "examples" / "configs" / "quickstart.yaml"


def test_it_runs_on_the_cpu_plugin_and_check_says_which_kernel_each_layer_gets() -> None:
    run = subprocess.run(
        [Path(sys.executable).parent / "pegboard", "check", "--config", QUICKSTART, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    found = json.loads(run.stdout)
    names = {kernel["operation"]: kernel["name"] for kernel in found["kernels"]}
    assert names == dict.fromkeys(
        ("linear", "rms_norm", "rotary", "silu_mul", "sample", "decoder_layer"), "cpu"
    )
    [joint] = [kernel for kernel in found["kernels"] if kernel["operation"] == "decoder_layer"]
    assert joint["why"].startswith("joins linear, rms_norm, silu_mul and attention")
    [attention] = [part for part in found["parts"] if part["interface"] == "attention"]
    assert attention["name"] == "cpu"
    assert (found["numerics"], found["not_promised"]) == ("invariant", [])
