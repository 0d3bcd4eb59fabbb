"""The tests of linear layers for each instruction set that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard_cpu.library import instruction_set

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["avx512_vnni", "avx512", "avx2", "portable"])
def test_products_with_instruction_set(name: str) -> None:
    _run(name, "test_linear_memory.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["avx512_vnni", "avx512", "avx2", "portable"])
def test_all_of_linear_layers_with_instruction_set(name: str) -> None:
    _run(
        *(name, "test_linear.py", "test_codes.py", "test_w8a8.py", "test_float8.py"),
        "test_contract_linear.py",
    )


def _run(name: str, *files: str) -> None:
    """Runs tests in a process whose library uses that set."""
    if name == instruction_set():
        pytest.skip("the tests of this process use it")
    environment = {**os.environ, "PEGBOARD_CPU_ISA": name}
    tell = "from pegboard_cpu.library import instruction_set; print(instruction_set())"
    named = subprocess.run(
        [sys.executable, "-c", tell], env=environment, capture_output=True, text=True, check=True
    )
    if named.stdout.strip() != name:
        pytest.skip(f"this processor has no {name}")
    command = [sys.executable, "-m", "pytest", "-q", *(str(HERE / file) for file in files)]
    run = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
