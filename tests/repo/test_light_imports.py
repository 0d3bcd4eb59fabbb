"""Commands that answer in a second do not load torch, and every start imports little."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY_MODULES = sorted({point.value.split(":")[0] for point in entry_points(group="pegboard")})
HEAVY = {"torch", "transformers", "numpy", "gguf", "safetensors", "tokenizers", "triton"}

RUN = """
import sys
from pegboard.cli import main
sys.argv = ["pegboard", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    print("status", end.code)
print("torch", "torch" in sys.modules)
"""

# The clock starts when what every plugin imports, the hook marker, is there.
TIME = """
import importlib, sys, time
from pegboard import hookimpl
before = set(sys.modules)
start = time.perf_counter()
importlib.import_module(sys.argv[1])
print(time.perf_counter() - start, *(set(sys.modules) - before))
"""


def python(code: str, *arguments: str) -> str:
    argv = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_pegboard_does_not_import_torch() -> None:
    assert python("import sys, pegboard; print('torch' in sys.modules)").strip() == "False"


def test_asking_for_the_public_names_that_need_none_does_not_import_torch() -> None:
    code = "import sys; from pegboard import Config, SamplingParams, errors, hookimpl;"
    assert python(f"{code} print('torch' in sys.modules)").strip() == "False"


@pytest.mark.parametrize(
    "arguments",
    [
        ("plugins",),
        ("plugins", "--json"),
        ("check", "--config", "examples/configs/quickstart.yaml"),
        ("check", "--config", "examples/configs/quickstart.yaml", "--set", "modle=x"),
        ("check", "--config", "examples/configs/quickstart.yaml", "--set", "prefix_cache=nope"),
        ("--help",),
    ],
    ids=" ".join,
)
def test_commands_that_start_nothing_do_not_import_torch(arguments: tuple[str, ...]) -> None:
    assert python(RUN, *arguments).splitlines()[-1] == "torch False"


@pytest.mark.timing
@pytest.mark.parametrize("module", ENTRY_MODULES)
def test_entry_modules_import_nothing_heavy_and_quickly(module: str) -> None:
    seconds, *names = python(TIME, module).split()
    assert not {name.split(".")[0] for name in names} & HEAVY
    if float(seconds) >= 0.05:
        # On a slow or busy machine the standard library's own import says how slow it is.
        assert _quickest(module) < max(0.05, _quickest("asyncio"))


def _quickest(module: str) -> float:
    """Seconds of the quickest import of five."""
    return min(float(python(TIME, module).split()[0]) for _ in range(5))
