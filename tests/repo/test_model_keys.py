"""The tables of keys that other libraries declare are those of the installed versions."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "model_keys", Path(__file__).with_name("model_keys.py")
)
assert _SPEC is not None and _SPEC.loader is not None
model_keys = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(model_keys)

PASSED = model_keys.MODEL_KEYS.with_name("passed_keys.toml")


@pytest.mark.parametrize(
    ("library", "file", "generate"),
    [
        ("transformers", model_keys.MODEL_KEYS, model_keys.model_keys),
        ("gguf", model_keys.GGUF_KEYS, model_keys.gguf_keys),
        ("transformers", model_keys.QUANT_KEYS, model_keys.quant_keys),
        ("compressed-tensors", model_keys.QUANT_KEYS, model_keys.quant_keys),
    ],
)
def test_committed_keys_are_those_that_the_library_declares(
    library: str, file: Path, generate: Callable[[], str]
) -> None:
    committed, installed = tomllib.loads(file.read_text()), tomllib.loads(generate())
    missing = _keys(installed) - _keys(committed)
    assert not missing, "run tests/repo/model_keys.py, and decide on each new key"
    if installed[library] == committed[library]:
        assert file.read_text() == generate()


def test_keys_that_pass_are_declared() -> None:
    """A pattern that means nothing is a misspelt one, or one whose key has gone."""
    declared = _keys(tomllib.loads(model_keys.MODEL_KEYS.read_text()))
    passed = tomllib.loads(PASSED.read_text())
    patterns = [*passed["neutral"], *(p for group in passed["harmless"].values() for p in group)]
    unused = [p for p in patterns if not any(fnmatchcase(key, p) for key in declared)]
    # of every old file, and of no class
    assert set(unused) <= {"_name_or_path", "auto_map", "quantization_config", "compression_config"}


def _keys(table: dict[str, Any]) -> set[str]:
    return {key for value in table.values() if isinstance(value, list) for key in value}
