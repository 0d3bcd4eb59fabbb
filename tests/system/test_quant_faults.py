"""Faults with quantized checkpoints that users of other tools and engines have reported.

`POSED` says for each which tests pose it: those of this file, or those that stand where the part at fault
is tested. `NOT_POSED` says why the others cannot be posed here.
"""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegboard import Config
from pegboard.builtin.torch_quantized import torch_quantized_linear
from pegboard.compose import prepare
from pegboard.compose.kv_scales import read_kv_scales
from pegboard.interfaces.kernel import KernelContext
from pegboard.testing.coded_weights import Form, coded_weight
from pegboard.testing.linear_weight import dense, seen_inputs
from pegboard.testing.quantized_checkpoint import (
    changed_checkpoint,
    facts_of,
    refusal,
    source_of,
    tensors_of,
)
from pegboard.testing.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
PLUGINS = "quant_plugins"
AWQ, GPTQ, FP8, GGUF, COMMON = (
    f"{PLUGINS}/{name}/tests" for name in ("awq", "gptq", "fp8", "gguf", "common")
)
CPU = "plugins/cpu/tests"
DAMAGED = "test_damaged.py::test_what_cannot_be_right_is_refused_in_a_line"
TOOLS_WEIGHTS = "test_foreign_checkpoints.py::test_weights_are_those_of_the_tool_bit_for_bit"
NAMED = f"{COMMON}/test_names.py::test_a_module_is_meant_by_name_pattern_class_prefix_or_fused_name"

POSED: dict[str, tuple[str, ...]] = {
    # Groups, zeros, orders.
    "activation order: scales are cut, though any input may be in any group": (
        f"{GPTQ}/test_layers.py::test_groups_are_cut_with_the_inputs_unless_a_map_may_name_any",
    ),
    "zeros of the newer format under the older one's label": (
        f"{GPTQ}/test_zeros.py::test_symmetric_zeros_tell_their_format_whatever_the_label_says",
        f"{GPTQ}/test_damaged.py::test_what_is_odd_and_clear_is_read_as_it_was_meant",
    ),
    "zeros of the newer format read as the older one's": (
        f"{GPTQ}/{TOOLS_WEIGHTS}",
        f"{GPTQ}/test_config.py::test_keys_have_synonyms",
    ),
    "a zero of 0 becomes 15": (
        f"{AWQ}/test_damaged.py::test_zeros_are_as_they_are_stored_0_and_15_included",
    ),
    "codes that are not symmetric in the older format, which has no zero of 0": (
        f"{COMMON}/test_rtn.py::test_symmetric_zeros_are_stored_less_one_and_others_as_they_are",
        f"{GPTQ}/test_zeros.py::test_zeros_of_0_that_borrowed_from_their_neighbours_are_restored",
    ),
    "zeros that were stored unpacked": (f"{GPTQ}/{DAMAGED}", f"{AWQ}/{DAMAGED}"),
    "a map of groups that was never filled in is believed": (
        f"{GPTQ}/test_damaged.py::test_what_is_odd_and_clear_is_read_as_it_was_meant",
    ),
    "blocks that a weight does not fill": (
        f"{FP8}/test_plan.py::test_blocks_are_counted_up",
        f"{FP8}/test_weights.py::test_a_code_is_multiplied_by_the_scale_of_its_block",
    ),
    "blocks are rounded up part by part, and not once": (
        f"{FP8}/test_plan.py::test_blocks_are_counted_up",
    ),
    # Numbers too large for their type.
    "scaled weights beyond float16 while quantizing": (
        f"{AWQ}/test_calibrator.py::test_inputs_of_very_different_sizes_keep_all_finite",
    ),
    "residuals beyond float16": ("test_half_precision_checkpoints_run_in_float32_on_a_cpu",),
    "products beyond float16": (
        "test_products_that_half_precision_cannot_hold_on_the_way_are_right",
    ),
    # One definition, biases, names.
    "prefill dequantizes otherwise than decoding": (
        f"{CPU}/test_codes.py::test_bits_of_a_row_depend_on_nothing_else",
        "tests/system/test_quant_invariance.py::test_many_at_once_preempted_with_cached_prefixes",
    ),
    "a bias is dropped on the way of one format": (
        f"{FP8}/test_logits.py::test_checkpoints_written_by_formulas_give_their_logits",
    ),
    "biases that only the tensors show": (
        "core/tests/plugins/test_inspect.py::test_biases_that_only_the_tensors_show_are_used",
    ),
    "layers in floats that the config does not mention": (
        f"{AWQ}/test_damaged.py::test_layers_in_floats_need_no_mention",
    ),
    "ignored names with another prefix": (
        NAMED,
        f"{FP8}/test_plan.py::test_a_layer_is_ignored_by_any_spelling_of_its_name",
    ),
    "ignored names that are matched too late, or without dots": (NAMED,),
    "ignored names in the spelling of fused layers": (
        f"{COMMON}/test_names.py::test_attention_is_known_by_its_fused_names",
        NAMED,
    ),
    "parts of a fused layer in different schemes": (
        f"{GPTQ}/test_layers.py::test_layers_of_one_input_may_differ_in_bits_and_order",
    ),
    "a head beside a tied embedding, the same or another, and a head that is missing": (
        "test_a_head_beside_a_tied_embedding_must_be_the_same",
        "test_a_head_that_is_its_own_must_be_there",
    ),
    "a head in codes is read by value and its scale dropped": (
        f"{FP8}/test_damaged.py::test_a_head_in_codes_that_the_config_leaves_in_floats",
    ),
    "a quantized embedding's bytes are taken for floats": (
        f"{GGUF}/test_foreign_files.py::test_logits_are_those_of_the_dequantized_model",
    ),
    "settings of single modules are passed over": (
        f"{GPTQ}/test_config.py"
        "::test_modules_have_settings_of_their_own_and_the_first_pattern_wins",
    ),
    # Scales.
    "one scale of a weight that was fused before": (
        f"{FP8}/test_weights.py::test_one_scale_of_an_already_fused_weight_is_of_all_its_rows",
    ),
    "scales of q, k and v are merged into the largest": (
        f"{FP8}/test_logits.py::test_an_engine_computes_what_a_straight_decoder_does",
    ),
    "a kernel and its reference both invert the scale": (
        f"{FP8}/test_weights.py::test_weights_are_the_tools_bit_for_bit",
        "tests/system/test_quantized_checkpoints.py::test_the_tools_logits",
    ),
    "scales of KV that are all 1": ("test_kv_scales_that_nobody_calibrated_are_told_of",),
    "scales of KV of 1 clip values": ("test_kv_scales_that_nobody_calibrated_are_told_of",),
    "what e4m3 cannot hold becomes NaN": (
        f"{FP8}/test_e4m3.py::test_what_is_too_large_is_the_largest",
    ),
    "e4m3 saturates early, and rounds halves up": (
        f"{FP8}/test_e4m3.py::test_a_middle_goes_to_the_even_code_and_the_next_number_does_not",
        f"{CPU}/test_float8.py::test_inputs_are_rounded_as_torch_rounds_them",
    ),
    # GGUF.
    "rows of q and k in GGUF's order": (
        f"{GGUF}/test_packed.py::test_rows_of_q_and_k_are_those_that_transformers_reads",
        f"{GGUF}/test_packed.py::test_rows_of_other_architectures_stay_where_they_are",
    ),
    "fused layers of several GGUF types": (
        f"{GGUF}/test_foreign_files.py::test_logits_are_those_of_the_dequantized_model",
    ),
    "rows that fill no GGUF blocks": (
        f"{GGUF}/test_header.py::test_tensors_lie_in_the_file_and_apart",
        f"{GGUF}/test_plan.py"
        "::test_rows_that_fill_no_blocks_come_in_other_types_and_their_bits_are_told",
    ),
    # Processors.
    "int8 products saturate at the ends of the range": (
        f"{CPU}/test_w8a8.py::test_sums_at_the_ends_of_the_range_are_exact",
        f"{CPU}/test_codes.py::test_extremes_are_summed_exactly",
    ),
    "wrong on an instruction set that no test runs on": (
        f"{CPU}/test_instruction_sets.py::test_all_of_linear_layers_with_instruction_set",
    ),
    # Calibration.
    "a Hessian that is not positive definite": (
        f"{GPTQ}/test_calibrator.py"
        "::test_inputs_that_tell_nothing_are_rounded_to_nearest_and_reported",
    ),
    "static scales of inputs with outliers": (
        f"{PLUGINS}/smoothquant/tests/test_calibrator.py"
        "::test_static_inputs_are_chosen_only_where_they_are_as_good",
    ),
}

NOT_POSED: dict[str, str] = {
    "groups that a cut over devices does not divide": (
        "no layer is cut over devices yet; plans say which axes may be"
    ),
    "scales of KV measured on warm-up, padding or the first batch alone": (
        "scales of KV are of the checkpoint or of a token and head: none is measured while serving"
    ),
}

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


@cache
def _functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_what_is_said_to_pose_a_report_exists() -> None:
    for test in (test for tests in POSED.values() for test in tests):
        path, _, name = test.rpartition("::")
        assert name in _functions(ROOT / path if path else Path(__file__)), test


@pytest.mark.parametrize("name", ["ct-w8a8-int8-static", "ct-w4a16-g32-sym", "ct-fp8-dynamic"])
def test_half_precision_checkpoints_run_in_float32_on_a_cpu(quant_data: Path, name: str) -> None:
    folder = quant_data / name
    stored = {str(tensor.dtype) for key, tensor in tensors_of(folder).items() if "norm" in key}
    assert stored <= {"torch.float16", "torch.bfloat16"}
    assert prepare(Config.from_values({"model": str(folder)})).composition.dtype == "float32"


@pytest.mark.parametrize("format", ["uint4", "int8", "int8:grouped", "int8:dynamic", "float8"])
def test_products_that_half_precision_cannot_hold_on_the_way_are_right(format: str) -> None:
    """Half of the sum alone is beyond 65504; the whole is not."""
    weight = coded_weight(format, (8, 2048), Form(32 if "grouped" in format else None), "cpu")
    kernel = torch_quantized_linear(KernelContext("linear", format, "float16", "cpu", 1))
    signs = dense(weight)[0].sign()
    x = (signs * torch.cat([torch.full((1024,), 200.0), torch.full((1024,), -200.0)])).half()[None]
    expected = seen_inputs(x, weight) @ dense(weight).T
    assert float((x[:, :1024].double() * dense(weight)[:1, :1024]).sum()) > 65504
    got = kernel.linear(x, kernel.prepare(weight))
    inside = expected.abs() < 60000
    assert bool(inside[0, 0]) and bool(got.isfinite()[inside].all())
    assert bool(((got - expected).abs() <= 2e-3 * expected.abs().clamp(min=64))[inside].all())


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda head: head.clone(), None),
        (lambda head: head * 1.5, "lm_head.weight: differs from model.embed_tokens.weight"),
        (lambda head: head.half(), "lm_head.weight: differs from model.embed_tokens.weight"),
    ],
)
def test_a_head_beside_a_tied_embedding_must_be_the_same(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], line: str | None
) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=True)
    tensors = tensors_of(folder)
    save_file(tensors | {HEAD: change(tensors[EMBEDDING])}, folder / "model.safetensors")
    said = refusal({"model": str(folder), "kernels": "torch", "attention": "torch"})
    assert said is None if line is None else line in str(said)


def test_a_head_that_is_its_own_must_be_there(quant_data: Path, tmp_path: Path) -> None:
    def drop(tensors: Tensors, config: dict[str, Any]) -> None:
        del tensors[HEAD]

    folder = changed_checkpoint(quant_data / "gptq-4b-g32-sym", tmp_path / "m", drop)
    said = refusal({"model": str(folder), "kernels": "torch", "attention": "torch"})
    assert said is not None and HEAD in said and "missing" in said
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert refusal({"model": str(folder), "kernels": "torch", "attention": "torch"}) is None


@pytest.mark.parametrize(("scale", "told"), [(1.0, True), (0.5, False)])
def test_kv_scales_that_nobody_calibrated_are_told_of(
    quant_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, scale: float, told: bool
) -> None:
    def set_scales(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith(("k_scale", "v_scale")):
                tensors[name] = torch.full_like(tensors[name], scale)

    folder = changed_checkpoint(quant_data / "ct-fp8-static-kv", tmp_path / "m", set_scales)
    config = Config.from_values({"model": str(folder), "kernels": "torch", "attention": "torch"})
    with caplog.at_level(logging.WARNING):
        read_kv_scales(prepare(config).composition.target, source_of(facts_of(folder)))
    assert ("it seems not to be calibrated" in caplog.text) == told
