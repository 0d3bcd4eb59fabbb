"""Functions that manifests name run before anything is loaded: whatever one does, the error is of its own
kind and names the plugin, its distribution and file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, errors
from pegboard.config import Config
from pegboard.plugins.contracts import CONTRACTS

Configure = Callable[..., Config]

HEADER = """
# /// pegboard
# [plugin]
# name = "mine"
# [[provides]]
# interface = "{interface}"
# version = {version}
# name = "mine"
# summary = "Of the test"
{fields}# ///
from pegboard import hookimpl
from pegboard.builtin.torch_attention_layout import layout
from pegboard.builtin.unquantized_plan import parameters, resident_bytes
from pegboard.models.shape import describe


class Stubborn(Exception):
    def __str__(self):
        raise SystemExit("even when asked what it is")


class Apart(BaseException):
    pass


def deep():
    deep()


def odd(*arguments):
    {body}
"""

QUANTIZER = {
    "methods": '["none"]',
    "formats": '["float"]',
    "parameters": '":parameters"',
    "resident_bytes": '":resident_bytes"',
}
FIELDS: dict[tuple[str, str], tuple[dict[str, str], dict[str, str]]] = {
    ("checkpoint_source", "describe"): ({"files": '["*.safetensors"]', "priority": "9"}, {}),
    ("model", "describe"): ({"architectures": '["LlamaForCausalLM"]', "priority": "9"}, {}),
    ("drafter", "describe"): ({}, {"drafter": "mine"}),
    ("attention", "layout"): ({}, {"attention": "mine"}),
    ("attention", "estimate"): ({"layout": '":layout"'}, {"attention": "mine"}),
    ("quantizer", "formats"): (QUANTIZER, {"quantizer": "mine"}),
    ("quantizer", "parameters"): (QUANTIZER, {"quantizer": "mine"}),
    ("quantizer", "resident_bytes"): (QUANTIZER, {"quantizer": "mine"}),
    ("quantizer", "kv_scales"): (QUANTIZER, {"quantizer": "mine"}),
    ("quantizer", "alternatives"): (QUANTIZER, {"quantizer": "mine"}),
}
BODIES = {
    "raises": "return {}['no such key']",
    "exits": "raise SystemExit(0)",
    "recurses": "deep()",
    "stubborn": "raise Stubborn",
    "apart": "raise Apart('of no Exception')",
    "nothing": "return None",
    "nonsense": "return object()",
    "negative": "return -5",
    "text": "return 'float'",
}


@pytest.mark.parametrize(("interface", "field"), FIELDS)
def test_a_function_that_fails_is_named_with_its_plugin(
    tmp_path: Path, config_of: Configure, interface: str, field: str
) -> None:
    more, values = FIELDS[interface, field]
    (version,) = CONTRACTS[interface].versions
    for name, body in BODIES.items():
        fields = {**more, field: '":odd"'}
        lines = "".join(f"# {key} = {value}\n" for key, value in fields.items())
        file = tmp_path / f"{name}.py"
        file.write_text(
            HEADER.format(interface=interface, version=version, fields=lines, body=body).lstrip()
        )
        with pytest.raises(errors.PluginError) as caught:
            Engine(config_of(plugins={"load": [str(file)]}, **values))
        line = str(caught.value)
        assert f"plugin 'mine' (file, {file})" in line, line
        assert "':odd'" in line and ("; fix: " in line or "; allowed: " in line)
        assert type(caught.value) is errors.ManifestFunctionFailed, name
        if name not in ("nothing", "nonsense", "negative", "text"):
            assert f"({name}.py:" in line, "where it was raised"
            assert caught.value.__cause__ is not None


MODEL = """
from pydantic import BaseModel, field_validator


class Model(BaseModel):
    max_wait: float = 1.0

    @field_validator("max_wait", mode="before")
    @classmethod
    def read(cls, value):
        return {}[value]

    model_config = {"validate_default": True}
"""


@pytest.mark.parametrize(
    ("interface", "version", "field", "values"),
    [
        ("scheduler", 1, "options", {"scheduler": "mine"}),
        ("logits_processor", 1, "params", {"logits_processors": ["mine"]}),
    ],
)
def test_a_model_whose_validators_fail_is_named_with_its_plugin(
    tmp_path: Path,
    config_of: Configure,
    interface: str,
    version: int,
    field: str,
    values: dict[str, Any],
) -> None:
    file = tmp_path / f"model_of_{field}.py"
    hook = f"pegboard_{interface}s"
    code = HEADER.format(
        interface=interface, version=version, fields=f'# {field} = ":Model"\n', body="pass"
    )
    made = f"@hookimpl\ndef {hook}():\n    return {{'mine': lambda *given: None}}\n"
    file.write_text(code.lstrip() + MODEL + made)
    with pytest.raises(errors.ManifestFunctionFailed, match=r"':Model'.*KeyError") as caught:
        Engine(config_of(plugins={"load": [str(file)]}, **values))
    assert f"plugin 'mine' (file, {file})" in str(caught.value)


def test_what_a_source_says_of_a_damaged_checkpoint_stays_its_own_line(
    tmp_path: Path, config_of: Configure
) -> None:
    body = (
        "from pegboard.errors import CheckpointError; raise CheckpointError('x.bin', 'is cut off')"
    )
    file = tmp_path / "source.py"
    lines = '# files = ["*.safetensors"]\n# priority = 9\n# describe = ":odd"\n'
    file.write_text(
        HEADER.format(interface="checkpoint_source", version=1, fields=lines, body=body).lstrip()
    )
    with pytest.raises(errors.CheckpointError, match=r"^x\.bin: is cut off$"):
        Engine(config_of(plugins={"load": [str(file)]}))
