"""The plan of a file's weights before they are read: formats, settled options, notes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from pydantic import ValidationError

from pegboard import Engine
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard_gguf.describe import describe
from pegboard_gguf.options import GGUFOptions
from pegboard_gguf.plan import alternatives, formats, notes

INT8 = GGUFOptions(mode="packed", activations="int8")
FLOAT = GGUFOptions(mode="packed", activations="float")
DEQUANTIZE = GGUFOptions(mode="dequantize", activations="float")


@pytest.fixture
def mixed(write_model: Any, mixed_model: Any) -> CheckpointFacts:
    return describe(write_model(mixed_model.config, mixed_model.tensors, kinds=mixed_model.kinds))


@pytest.fixture
def without_packed_form(write_model: Any, mixed_model: Any) -> CheckpointFacts:
    """All matrices in two bits."""
    kind = GGMLQuantizationType.Q2_K
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    tensors = {
        name: tensor.new_zeros(len(tensor), block_bytes) if tensor.ndim == 2 else tensor
        for name, tensor in mixed_model.tensors.items()
    }
    kinds = dict.fromkeys(mixed_model.kinds, kind)
    return describe(write_model(mixed_model.config, tensors, kinds=kinds))


def test_formats_are_those_of_the_matrices(mixed: CheckpointFacts, tiny_file: Path) -> None:
    assert formats(mixed, INT8) == ("int8:grouped", "uint4:grouped")
    assert formats(mixed, FLOAT) == ("int8", "uint4")
    assert formats(mixed, DEQUANTIZE) == ("float",)
    assert formats(describe(tiny_file), FLOAT) == ("float", "int8", "uint4")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [INT8, DEQUANTIZE]),
        ({"activations": "int8"}, [INT8]),
        ({"activations": "float"}, [FLOAT, DEQUANTIZE]),
        ({"mode": "packed"}, [INT8, FLOAT]),
        ({"mode": "packed", "activations": "float"}, [FLOAT]),
        ({"mode": "dequantize"}, [DEQUANTIZE]),
    ],
)
def test_nothing_that_is_said_is_given_up(
    mixed: CheckpointFacts, options: dict[str, Any], expected: list[GGUFOptions]
) -> None:
    assert list(alternatives(mixed, GGUFOptions(**options))) == expected


def test_a_file_without_packed_forms_is_dequantized(without_packed_form: CheckpointFacts) -> None:
    assert alternatives(without_packed_form, GGUFOptions()) == (DEQUANTIZE,)


def test_rounding_inputs_of_float_weights_is_refused() -> None:
    with pytest.raises(ValidationError, match="for packed weights, and mode is dequantize"):
        GGUFOptions(mode="dequantize", activations="int8")


def test_notes_say_types_bits_and_that_inputs_are_rounded(mixed: CheckpointFacts) -> None:
    packed, rounded = notes(mixed, INT8)
    assert packed.startswith("matrices that stay packed: 4 of Q4_K, 1 of Q5_K, 3 of Q6_K")
    # 896 rows in 4 + 64/32 bits, 256 in 8 + 64/32, 672 in 8 + 32/16
    assert packed.endswith(f"; {(896 * 6 + 928 * 10) / 1824:.1f} bits a weight")
    assert "rounded to int8" in rounded and "activations: float" in rounded
    assert notes(mixed, FLOAT) == (packed,)
    assert notes(mixed, DEQUANTIZE) == ()


def test_rows_that_fill_no_blocks_come_in_other_types_and_their_bits_are_told(
    write_model: Any, mixed_model: Any, random_blocks: Any
) -> None:
    """Tools fall back to larger types: such a file has more bits a weight than its name says."""
    q4_k = GGMLQuantizationType.Q4_K
    kinds, layer = dict.fromkeys(mixed_model.kinds, q4_k), "model.layers.0.mlp"
    shapes = {f"{layer}.gate_proj.weight": (96, 256), f"{layer}.up_proj.weight": (96, 256)}
    tensors = {
        name: torch.from_numpy(random_blocks(shapes.get(name, (len(one), 256)), q4_k, 1))
        if name in kinds
        else one
        for name, one in mixed_model.tensors.items()
    }
    down = f"{layer}.down_proj.weight"
    tensors[down] = torch.randn(256, 96, generator=torch.Generator().manual_seed(2))
    kinds[down] = GGMLQuantizationType.Q8_0
    config = {**mixed_model.config, "intermediate_size": 96}
    path = write_model(config, tensors, kinds=kinds)
    packed = notes(describe(path), FLOAT)[0]
    others, bits = (288 + 256 + 128 + 128 + 256 + 2 * 96) * 256, 4 + 2 * 32 / 32
    expected = (others * bits + 256 * 96 * (8 + 32 / 32)) / (others + 256 * 96)
    assert packed == (
        f"matrices that stay packed: 7 of Q4_K, 1 of Q8_0; {expected:.1f} bits a weight"
    )
    Engine({"model": str(path), "threads": 1, "kv_cache": {"memory": "8MiB"}}).close()


def test_notes_name_what_becomes_float(
    write_model: Any, tiny_config: dict[str, Any], tiny_tensors: dict[str, torch.Tensor]
) -> None:
    kind = GGMLQuantizationType.IQ4_NL
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    name = "model.layers.1.mlp.down_proj.weight"
    blocks = torch.zeros((64, 96 // 32 * block_bytes), dtype=torch.uint8)
    tensors = tiny_tensors | {name: blocks}
    kinds = {name: kind, "model.embed_tokens.weight": GGMLQuantizationType.Q8_0}
    said = notes(describe(write_model(tiny_config, tensors, kinds=kinds)), INT8)
    assert said[0] == "matrices that stay packed: 1 of Q8_0; 9.0 bits a weight"
    assert said[-1] == f"IQ4_NL has no packed form and becomes float: {name}"


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_check_says_what_packed_weights_do(tiny_file: Path, activations: str) -> None:
    options = f"{{mode: packed, activations: {activations}}}"
    command = ["check", str(tiny_file), "--quantization", "gguf"]
    program = Path(sys.executable).with_name("pegboard")
    done = subprocess.run(
        [program, *command, "--set", f"quantizer.options={options}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "matrices that stay packed: " in done.stdout, done.stderr
    assert ("rounded to int8 in groups of 32" in done.stdout) == (activations == "int8")
    assert (f"linear ({'int8:grouped' if activations == 'int8' else 'int8'})") in done.stdout
