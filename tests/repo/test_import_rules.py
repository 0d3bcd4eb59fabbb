"""The import table as data, held against syntax trees, TYPE_CHECKING included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE_ROOT = ROOT / "core"
PLUGIN_ROOTS = sorted(
    path.parent
    for folder in ("plugins", "quant_plugins", "spec_plugins")
    for path in (ROOT / folder).glob("*/pyproject.toml")
)


class Torch(Enum):
    """The places in which a package may import torch."""

    NEVER = "never"
    ANNOTATIONS = "under TYPE_CHECKING"
    LAZILY = "inside functions, and under TYPE_CHECKING"
    ANYWHERE = "anywhere"


@dataclass(frozen=True)
class Row:
    """The modules that a package may import, beside itself.

    Attributes:
        ours: prefixes of our modules; `pegboard` alone means its public names.
        torch: where torch may be imported.
        third_party: the only ones allowed beside the standard library; None: what is declared.
        never: prefixes of our modules that `ours` would allow.
    """

    ours: tuple[str, ...]
    torch: Torch = Torch.NEVER
    third_party: tuple[str, ...] | None = None
    never: tuple[str, ...] = ()


FILES = "pegboard.regular_files"
MESSAGES = ("pegboard.request", "pegboard.step", "pegboard.errors")
CONTRACTS = ("pegboard.interfaces", *MESSAGES)
PLUGIN = ("pegboard", *CONTRACTS, "pegboard.models.layers", FILES)
CONFIG = (
    *("pegboard.errors", "pegboard.config", "pegboard.config_text", "pegboard.config_values"),
    FILES,
)
CORE = ("pegboard", "pegboard.*")

TABLE: dict[str, Row] = {
    "pegboard.errors": Row((), third_party=()),
    FILES: Row((), third_party=()),
    "pegboard.request": Row(("pegboard.errors",), third_party=("numpy", "msgspec")),
    "pegboard.step": Row(("pegboard.errors",), third_party=("numpy", "msgspec")),
    "pegboard.interfaces": Row(
        MESSAGES, torch=Torch.ANNOTATIONS, third_party=("numpy", "msgspec", "torch")
    ),
    "pegboard.config": Row(CONFIG),
    "pegboard.config_text": Row(CONFIG),
    "pegboard.config_values": Row(CONFIG),
    "pegboard.checkpoint_ref": Row(CONFIG),
    "pegboard.tokenizer": Row(("pegboard.errors", "pegboard.interfaces", "pegboard.chat", FILES)),
    "pegboard.chat": Row(("pegboard.errors", "pegboard.lifeline")),
    "pegboard.lifeline": Row(()),
    "pegboard.life": Row(("pegboard.interfaces",)),
    "pegboard.logs": Row(("pegboard.errors",)),
    "pegboard.sampling_defaults": Row((*CONFIG, "pegboard.request")),
    "pegboard.plugins": Row(("pegboard.interfaces", *CONFIG)),
    "pegboard.planner": Row(("pegboard.interfaces", "pegboard.plugins", *CONFIG)),
    "pegboard.engine": Row(CONTRACTS),
    "pegboard.models": Row(CONTRACTS, torch=Torch.ANYWHERE),
    "pegboard.runner": Row((*CONTRACTS, "pegboard.models.layers"), torch=Torch.ANYWHERE),
    "pegboard.builtin": Row((*PLUGIN, "pegboard.models"), torch=Torch.ANYWHERE),
    "pegboard.compose": Row(
        CORE, torch=Torch.LAZILY, never=("pegboard.server", "pegboard.cli", "pegboard.builtin")
    ),
    "pegboard.llm": Row(
        CORE, torch=Torch.LAZILY, never=("pegboard.server", "pegboard.cli", "pegboard.builtin")
    ),
    "pegboard.runner_main": Row(
        CORE, torch=Torch.LAZILY, never=("pegboard.server", "pegboard.cli", "pegboard.builtin")
    ),
    "pegboard.bench": Row(
        ("pegboard.progress", "pegboard.lifeline", "pegboard.server", "pegboard.cli", *CONFIG)
    ),
    "pegboard.eval": Row(
        (
            *CONTRACTS,
            *CONFIG,
            *("pegboard.bench", "pegboard.compose", "pegboard.llm", "pegboard.tokenizer"),
        ),
        torch=Torch.LAZILY,
    ),
    "pegboard.server": Row(CORE, torch=Torch.LAZILY, never=("pegboard.builtin",)),
    "pegboard.cli": Row(CORE, torch=Torch.LAZILY, never=("pegboard.builtin",)),
    "pegboard.testing": Row(
        (*PLUGIN, "pegboard.models"), torch=Torch.LAZILY, never=("pegboard.builtin",)
    ),
    "pegboard": Row(CORE, torch=Torch.LAZILY, never=("pegboard.builtin",)),
}
"""The longest prefix of a module's name is its row; a package may import itself."""

TORCH_FREE = (
    "pegboard.models.shape",
    "pegboard.models.rope_shape",
    "pegboard.models.config_values",
    "pegboard.builtin.paged_allocator",
    "pegboard.builtin.no_cache",
    "pegboard.builtin.fcfs",
    "pegboard.builtin.fixed_policy",
    "pegboard.builtin.metrics_observer",
    "pegboard.builtin.log_observer",
    "pegboard.builtin.processor_params",
    "pegboard.builtin.safetensors_describe",
    "pegboard.builtin.torch_attention_layout",
    "pegboard.builtin.unquantized_plan",
    "pegboard.builtin",
)
"""Modules of packages that may import torch, which must not, themselves or through others."""

PLUGIN_ROW = Row(PLUGIN, torch=Torch.ANYWHERE)
QUANTIZER_ROW = Row((*PLUGIN, "pegboard_quant"), torch=Torch.ANYWHERE)
PLUGIN_TESTS = ("pegboard.testing",)


@dataclass(frozen=True)
class Import:
    """One import: the module, and where it stands.

    `place` is `module` (runs at import), `annotations` (under TYPE_CHECKING) or `function`.
    """

    module: str
    line: int
    place: str


def imports_of(source: str) -> Iterator[Import]:
    """Every import of a source text, `import_module("...")` of a constant included."""
    yield from _walk(ast.parse(source), "module")


def _walk(node: ast.AST, place: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = "function"
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            inner = "annotations"
        elif isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, place) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module, "imports are absolute"
            for alias in child.names:
                yield Import(_imported(child.module, alias.name), child.lineno, place)
        elif isinstance(child, ast.Call) and _is_import_module(child):
            argument = child.args[0]
            assert isinstance(argument, ast.Constant)
            yield Import(str(argument.value), child.lineno, place)
        yield from _walk(child, inner)


def _is_import_module(call: ast.Call) -> bool:
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    return name == "import_module" and bool(call.args) and isinstance(call.args[0], ast.Constant)


def _imported(module: str, name: str) -> str:
    """The module that `from module import name` imports: `name` may be one itself."""
    if module.split(".")[0] != "pegboard":
        return module
    path = CORE_ROOT.joinpath(*module.split("."), name)
    return f"{module}.{name}" if path.is_dir() or path.with_suffix(".py").is_file() else module


def row_of(module: str) -> tuple[str, Row]:
    """The package that a module belongs to, and its row."""
    return max(
        ((name, row) for name, row in TABLE.items() if module == name or _under(module, name)),
        key=lambda item: len(item[0]),
    )


def _under(module: str, prefix: str) -> bool:
    return module.startswith(prefix + ".")


def _allowed(module: str, prefixes: Sequence[str]) -> bool:
    """Whether a module of ours is under one of the prefixes; `pegboard` is its public names alone."""
    for prefix in prefixes:
        if prefix == "pegboard.*" and _under(module, "pegboard"):
            return True
        if module == prefix or (prefix != "pegboard" and _under(module, prefix)):
            return True
    return False


def violations(package: str, row: Row, source: str) -> list[str]:
    """A line for each import of a source text that its package's row forbids."""
    found = []
    for one in imports_of(source):
        top = one.module.split(".")[0]
        if top == "torch" and not _torch_allowed(row.torch, one.place):
            found.append(f"line {one.line}: torch at {one.place}, allowed: {row.torch.value}")
        elif top == "pegboard" or top.startswith("pegboard_"):
            own = package != "pegboard" and _allowed(one.module, (package,))
            if not (own or _allowed(one.module, row.ours)) or _allowed(one.module, row.never):
                found.append(f"line {one.line}: {one.module}")
        elif row.third_party is not None and top not in {
            *sys.stdlib_module_names,
            *row.third_party,
        }:
            found.append(f"line {one.line}: {one.module}")
    return found


def _torch_allowed(rule: Torch, place: str) -> bool:
    return {
        Torch.NEVER: False,
        Torch.ANNOTATIONS: place == "annotations",
        Torch.LAZILY: place != "module",
        Torch.ANYWHERE: True,
    }[rule]


def _module_name(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


CORE_FILES = sorted((CORE_ROOT / "pegboard").rglob("*.py"))
PLUGIN_FILES = [(root, file) for root in PLUGIN_ROOTS for file in sorted(root.rglob("*.py"))]


@pytest.mark.parametrize("file", CORE_FILES, ids=lambda file: _module_name(CORE_ROOT, file))
def test_core_imports_what_it_may(file: Path) -> None:
    package, row = row_of(_module_name(CORE_ROOT, file))
    assert violations(package, row, file.read_text()) == [], package


@pytest.mark.parametrize(
    ("root", "file"), PLUGIN_FILES, ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_plugins_import_what_they_may(root: Path, file: Path) -> None:
    package = f"pegboard_{root.name}"
    row = QUANTIZER_ROW if root.parent.name == "quant_plugins" else PLUGIN_ROW
    if "tests" in file.relative_to(root).parts:
        row = Row((*row.ours, *PLUGIN_TESTS), torch=Torch.ANYWHERE)
    assert violations(package, row, file.read_text()) == []


def circle_of(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules each of which is imported by the next, the first one by itself at the end; empty: a drawing
    of who imports whom has no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_a_drawing_of_imports_has_no_circle() -> None:
    """Imports within functions and for annotations count: who has to be read to understand a module."""
    names = {_module_name(CORE_ROOT, file): file for file in CORE_FILES}
    imports = {
        name: {one.module for one in imports_of(file.read_text())} & names.keys() - {name}
        for name, file in names.items()
    }
    assert circle_of(imports) == []


def test_a_circle_is_seen() -> None:
    assert circle_of({"a": {"b"}, "b": {"c", "d"}, "c": {"d"}, "d": set()}) == []
    circle = circle_of({"a": {"b"}, "b": {"c", "d"}, "c": {"d"}, "d": {"b"}})
    assert circle[0] == circle[-1] and {"b", "d"} <= set(circle) <= {"b", "c", "d"}


@pytest.mark.parametrize("file", CORE_FILES, ids=lambda file: _module_name(CORE_ROOT, file))
def test_nobody_names_the_builtins(file: Path) -> None:
    """They are found by their entry point, as everybody's are; a text would be a hidden import."""
    if "builtin" in file.parts:
        return
    texts = [
        node.value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [text for text in texts if text.startswith("pegboard.builtin")] == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_host_modules_load_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"{module} imports torch"


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("pegboard.engine", "import torch"),
        ("pegboard.engine", "from pegboard.config import Config"),
        ("pegboard.engine", "def f():\n    from pegboard import plugins"),
        ("pegboard.interfaces", "import torch"),
        ("pegboard.interfaces", "import pydantic"),
        ("pegboard.errors", "import numpy"),
        ("pegboard.server", "import torch"),
        ("pegboard.compose", "from pegboard.builtin.fcfs import FCFS"),
        ("pegboard.compose", "import_module('pegboard.builtin.fcfs')"),
        ("pegboard.planner", "if TYPE_CHECKING:\n    import torch"),
        ("pegboard.testing", "from pegboard.compose import prepare"),
        ("pegboard.runner", "from pegboard.models.llama import build"),
    ],
)
def test_the_walk_sees_what_is_forbidden(package: str, source: str) -> None:
    assert len(violations(package, TABLE[package], source)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("pegboard.interfaces", "if TYPE_CHECKING:\n    import torch"),
        ("pegboard.compose", "def f():\n    import torch"),
        ("pegboard.testing", "from pegboard import Engine"),
        ("pegboard.runner", "from pegboard.models import layers"),
        ("pegboard.engine", "import json, numpy\nfrom pegboard.engine.queue import Queue"),
    ],
)
def test_the_walk_lets_pass_what_is_allowed(package: str, source: str) -> None:
    assert violations(package, TABLE[package], source) == []
