"""A checkpoint that cannot be right is refused in a line before a request, or mended where one can tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pegboard import Engine
from pegboard.testing.quantized_checkpoint import (
    changed_checkpoint,
    facts_of,
    largest_logprob_error,
    refusal,
    tensors_of,
)
from pegboard_quant import gptq_layout
from pegboard_quant.bitstream import pack_apart, unpack
from pegboard_quant.rounding import round_to_nearest

UP = "model.layers.0.mlp.up_proj"
Q = "model.layers.1.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, Any]], object]


@pytest.fixture
def changed(root: Path, tmp_path: Path) -> Callable[[str, Change], dict[str, Any]]:
    """`changed(name, change) -> config`: of an engine on a copy of a foreign checkpoint, after
    `change(tensors, quantization_config)`."""

    def make(name: str, change: Change) -> dict[str, Any]:
        source = root / "tests" / "data" / "quant" / name
        path = changed_checkpoint(source, tmp_path / "model", change)
        return {"model": str(path), "dtype": "float32", "kv_cache": {"memory": "16MiB"}}

    return make


def _set(name: str, index: Any, value: Any) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name][index] = value

    return change


def _replace(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name] = make(tensors[name])

    return change


def _drop(*names: str) -> Change:
    return lambda tensors, config: [tensors.pop(name) for name in names]


def _say(**said: Any) -> Change:
    return lambda tensors, config: config.update(said)


DAMAGES: list[tuple[str, Change, str]] = [
    (
        "gptq-4b-g32-sym",
        _replace(f"{UP}.qweight", lambda words: words[:-1]),
        f"'{UP}.qweight' has shape [7, 128], not [8, 128]",
    ),
    (
        # Zeros that another writer did not pack.
        "gptq-4b-g32-sym",
        _replace(f"{UP}.qzeros", lambda words: torch.full((2, 128), 7, dtype=torch.int32)),
        f"'{UP}.qzeros' has shape [2, 128], not [2, 16]",
    ),
    (
        "gptq-4b-g32-sym",
        _replace(f"{UP}.qweight", lambda words: words.float()),
        f"'{UP}.qweight' is float32, not int32",
    ),
    (
        "gptq-4b-g32-sym",
        _set(f"{Q}.scales", (1, 3), torch.inf),
        f"{Q}.scales: holds numbers that are not finite",
    ),
    (
        "gptq-8b-g32-sym",
        _set(f"{Q}.scales", (1, 3), torch.nan),
        f"{Q}.scales: holds numbers that are not finite",
    ),
    ("gptq-4b-g32-sym", _drop(f"{UP}.scales"), f"tensor '{UP}.scales' is missing"),
    ("gptq-4b-g32-sym", _drop(f"{UP}.qweight"), f"tensor {UP}.weight: missing in"),
    (
        "gptq-4b-g32-desc-act",
        _drop(f"{UP}.g_idx"),
        f"tensor {UP}.g_idx: is missing, and desc_act says that groups are not consecutive",
    ),
    (
        "gptq-4b-g32-desc-act",
        _set(f"{UP}.g_idx", slice(None), 0),
        f"tensor {UP}.g_idx: is zero throughout, and desc_act says",
    ),
    (
        "gptq-4b-g32-desc-act",
        _set(f"{UP}.g_idx", 5, 2),
        f"tensor {UP}.g_idx: holds numbers from 0 to 2; allowed: 0 to 1",
    ),
    ("gptq-4b-g32-sym", _say(group_size=0), "group_size of model.layers.0.mlp"),
    ("gptq-4b-g32-sym", _say(bits=8), "has shape [16, 64], not [32, 64]"),
    ("gptq-4b-g32-asym-v1", _say(sym=True), "and the config says sym"),
    ("gptq-4b-g32-sym", _say(quant_method="quip"), "the checkpoint is quantized by quip/gptq"),
    (
        "gptq-4b-g32-sym",
        _say(dynamic={f"-:{UP}": {}}),
        f"tensor {UP}.qweight: is there, though the config's `dynamic` leaves",
    ),
    (
        "gptq-4b-g32-sym",
        lambda tensors, config: tensors.update({f"{UP}.weight_scale": torch.ones(1)}),
        f"tensor '{UP}.weight_scale' is unknown",
    ),
    (
        "gptq-4b-g32-sym",
        lambda tensors, config: tensors.update({"lm_head.scales": torch.ones(2, 512)}),
        "tensor 'lm_head.scales' is unknown",
    ),
    (
        "ct-w4a16-g32-asym",
        _drop(f"{UP}.weight_zero_point"),
        f"tensor '{UP}.weight_zero_point' is missing",
    ),
    (
        "ct-w4a16-g32-sym",
        lambda tensors, config: tensors.update(
            {f"{UP}.weight_zero_point": torch.zeros(16, 2, dtype=torch.int32)}
        ),
        f"tensor '{UP}.weight_zero_point' is unknown",
    ),
    (
        "ct-w4a16-g32-asym",
        _replace(f"{UP}.weight_zero_point", lambda words: torch.zeros(128, 2, dtype=torch.int8)),
        f"'{UP}.weight_zero_point' has shape [128, 2], not [16, 2]",
    ),
    (
        "ct-w4a16-g32-sym",
        _set(f"{UP}.weight_shape", 1, 63),
        f"tensor {UP}.weight_shape: says [128, 63]; allowed: [128, 64]",
    ),
    (
        "ct-w4a16-g32-sym",
        _set(f"{UP}.weight_scale", (0, 0), torch.nan),
        f"tensor {UP}.weight_scale: holds numbers that are not finite",
    ),
    (
        "ct-w4a16-g32-sym",
        _say(ignore=["lm_head", "model.layers.0.mlp.gate_up_proj"]),
        ".weight_packed: is there, though the config leaves the layer unquantized",
    ),
    (
        "ct-w4a16-g32-sym",
        _say(format="marlin-24"),
        "the checkpoint is quantized by compressed-tensors/marlin-24",
    ),
    (
        "ct-w4a16-g32-sym",
        lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(
            actorder="group"
        ),
        "weight_g_idx: is missing, and actorder says that groups are not consecutive",
    ),
]


@pytest.mark.parametrize(("name", "change", "line"), DAMAGES, ids=[line for *_, line in DAMAGES])
def test_what_cannot_be_right_is_refused_in_a_line(
    changed: Callable[[str, Change], dict[str, Any]], name: str, change: Change, line: str
) -> None:
    said = refusal(changed(name, change))
    assert said is not None and line in said


def _head_in_codes(tensors: Tensors, config: dict[str, Any]) -> None:
    head = tensors.pop("lm_head.weight").float()
    codes = round_to_nearest(head, 4, 32, "middle", torch.float16)
    for name, tensor in gptq_layout.stored(codes, minus_one=True).items():
        tensors[f"lm_head.{name}"] = tensor
    config["lm_head"] = True


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_codes_is_one_of_its_own(
    changed: Callable[[str, Change], dict[str, Any]], tied: bool
) -> None:
    """Some tools quantize the head of a model that ties it, and leave the config as it was."""
    config = changed("gptq-4b-g32-sym", _head_in_codes)
    file = Path(config["model"]) / "config.json"
    model = json.loads(file.read_text())
    file.write_text(json.dumps({**model, "tie_word_embeddings": tied}))
    said = refusal(config)
    assert (said is None) is not tied
    assert said is None or said.endswith(
        "tensor 'lm_head.g_idx' is of an output head in codes, and tie_word_embeddings says that head"
        " and embedding are one; fix: tie_word_embeddings: false in config.json"
    )


def test_a_file_that_was_cut_is_refused(
    changed: Callable[[str, Change], dict[str, Any]],
) -> None:
    config = changed("gptq-4b-g32-sym", _say())
    file = Path(config["model"]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    said = refusal(config)
    assert said is not None and "model.safetensors: damaged or not safetensors" in said


@pytest.mark.parametrize(
    ("name", "change"),
    [
        # A map that was never filled in, as one tool writes it.
        ("gptq-4b-g32-sym", _set(f"{UP}.g_idx", slice(None), 0)),
        ("gptq-4b-g32-sym", _drop(f"{UP}.g_idx", f"{Q}.g_idx")),
        # Labels of the other format, which the zeros of a symmetric checkpoint disprove.
        ("gptq-4b-g32-sym", _say(checkpoint_format="gptq_v2", format="gptq_v2")),
        ("gptq-8b-g32-sym", _say(checkpoint_format="gptq_v2", format="gptq_v2")),
        ("gptq-4b-g32-desc-act", _say(static_groups=True)),
        # Biases that are zero, of every layer, as old tools wrote them.
        (
            "gptq-4b-g32-sym",
            lambda tensors, config: tensors.update(
                {
                    key.replace(".scales", ".bias"): torch.zeros(scales.shape[1])
                    for key, scales in tensors.items()
                    if key.endswith(".scales")
                }
            ),
        ),
    ],
)
def test_what_is_odd_and_clear_is_read_as_it_was_meant(
    changed: Callable[[str, Change], dict[str, Any]], root: Path, name: str, change: Change
) -> None:
    expected = load_file(root / "tests" / "data" / "quant" / name / "expected.safetensors")
    ids = expected["input_ids"][0].tolist()
    assert largest_logprob_error(changed(name, change), ids, expected["logits"][0]) <= 5e-3


def test_three_bits_that_stay_in_their_words_are_told_by_their_width(
    changed: Callable[[str, Change], dict[str, Any]], root: Path
) -> None:
    """As older versions of compressed-tensors packed them: ten codes a word."""

    def repack(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("weight_packed")]:
            shape = tensors[name.replace("weight_packed", "weight_shape")].tolist()
            tensors[name] = pack_apart(unpack(tensors[name], 3, shape[1]), 3)

    expected = load_file(root / "tests/data/quant/ct-w3a16-g32/expected.safetensors")
    config = changed("ct-w3a16-g32", repack)
    ids = expected["input_ids"][0].tolist()
    assert largest_logprob_error(config, ids, expected["logits"][0]) <= 1e-2


def test_layers_that_stay_in_floats_and_a_head_in_codes_are_read_as_they_are(
    changed: Callable[[str, Change], dict[str, Any]], root: Path
) -> None:
    """A mixed checkpoint: up_proj in floats though nothing says so, and lm_head in codes."""
    from pegboard_quant import gptq_layout
    from pegboard_quant.codes import canonical
    from pegboard_quant.rounding import round_to_nearest
    from pegboard_quant.schemes import dequantized

    source = tensors_of(root / "tests/data/quant/gptq-4b-g32-sym")
    codes = round_to_nearest(source["lm_head.weight"].float(), 4, 32, "middle", torch.float16)
    head = gptq_layout.stored(codes, minus_one=True)
    plain = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)) * 0.1

    def mix(tensors: Tensors, config: dict[str, Any]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = plain
        del tensors["lm_head.weight"]
        tensors |= {f"lm_head.{part}": value for part, value in head.items()}
        config["lm_head"] = True

    config = changed("gptq-4b-g32-sym", mix)
    with Engine({"threads": 1, **config}) as engine:
        composition = engine.prepared.composition
        assert {one.format for one in composition.target.kernels if one.operation == "linear"} == {
            "float",
            "uint4",
        }
    weights = _dequantized(Path(config["model"]))
    assert torch.equal(weights[f"{UP}.weight"], plain)
    assert torch.equal(weights["lm_head.weight"], dequantized(canonical(codes, "uint4")))


def _dequantized(folder: Path) -> dict[str, torch.Tensor]:
    from pegboard.interfaces.quantizer import QuantizerContext, WeightSpec
    from pegboard_gptq.quantizer import GPTQQuantizer
    from pegboard_quant.options import ActivationOptions

    facts, tensors = facts_of(folder), tensors_of(folder)
    quantizer = GPTQQuantizer(QuantizerContext(facts, "float32"), ActivationOptions())
    found = {}
    for layer, shape, kind in ((UP, (128, 64), "linear"), ("lm_head", (512, 64), "head")):
        scheme = quantizer.scheme(WeightSpec(layer, shape, kind))  # type: ignore[arg-type]
        stored = {one.name: tensors[f"{layer}.{one.name}"] for one in scheme.parameters}
        found[f"{layer}.weight"] = scheme.dequantize(stored)
    return found
