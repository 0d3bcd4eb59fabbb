"""The native library under the compiler's sanitizers, in a process with numpy alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from pegboard_cpu.library import INSTRUCTION_SETS

PLUGIN = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("cmake", "ninja", "g++"))), reason="no compiler, CMake or Ninja"
    ),
]


def run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("sanitizers", "runtime", "options"),
    [
        ("address,undefined", "libasan.so", {"ASAN_OPTIONS": "detect_leaks=0"}),
        ("thread", "libtsan.so", {"TSAN_OPTIONS": "halt_on_error=1"}),
    ],
)
def test_calls_of_odd_shapes(
    sanitizers: str, runtime: str, options: dict[str, str], tmp_path: Path
) -> None:
    run(
        *("cmake", "-G", "Ninja", "-S", PLUGIN, "-B", tmp_path, "-DCMAKE_CXX_COMPILER=g++"),
        *("-DCMAKE_BUILD_TYPE=Release", f"-DPEGBOARD_SANITIZE={sanitizers}"),
    )
    run("ninja", "-C", tmp_path)
    preload = subprocess.check_output(["g++", f"-print-file-name={runtime}"], text=True).strip()
    library = tmp_path / "libpegboard_cpu.so"
    options |= {"LD_PRELOAD": preload, "OPENBLAS_NUM_THREADS": "1"}
    for name, calls in product(
        INSTRUCTION_SETS, ("native_calls", "native_codes", "native_bytes", "native_layers")
    ):
        environment = {**options, "PEGBOARD_CPU_ISA": name, "PYTHONPATH": str(PLUGIN)}
        run(sys.executable, "-m", f"tests.{calls}", library, environment=environment)
