"""The tests of kernels for each instruction set that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard_cpu.library import INSTRUCTION_SETS, instruction_set

HERE = Path(__file__).parent


def test_attention_contract_with_the_plainest_instruction_set() -> None:
    _run("portable", "test_contract_attention.py")


@pytest.mark.parametrize(
    "name",
    [
        name if name == "portable" else pytest.param(name, marks=pytest.mark.slow)
        for name in INSTRUCTION_SETS
    ],
)
def test_products_with_instruction_set(name: str) -> None:
    _run(name, "test_linear_memory.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_all_of_attention_with_instruction_set(name: str) -> None:
    _run(name, "test_contract_attention.py", "test_attention.py", "test_attention_bits.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
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
