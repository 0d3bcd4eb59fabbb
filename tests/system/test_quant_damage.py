"""Damage in a quantized checkpoint, of every tool and layout, is refused in a line that names
it. GGUF files, which are one stream of bytes, are damaged in the tests of their plugin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegboard.testing.quantized_checkpoint import refusal, tensors_of

Tensors = dict[str, torch.Tensor]

OF_EACH_TOOL = ("awq-4b-g32", "gptq-4b-g32-desc-act", "ct-fp8-static-kv", "fp8-block-inv")
OTHERS = (
    *("ct-w4a16-g32-asym", "ct-w8a8-int8-static", "ct-fp8-block-ragged", "ct-mixed"),
    *("fp8-tensor-static",),
    *("gptq-3b-g32-sym", "gptq-4b-g32-asym-v1", "gptq-4b-g32-asym-v2", "gptq-4b-g32-sym"),
    *("gptq-8b-g32-sym", "ct-w3a16-g32", "ct-w4a16-g32-sym", "ct-w8a8-int8-dynamic"),
    *("ct-fp8-block", "ct-fp8-dynamic"),
)
CHECKPOINTS = (
    *OF_EACH_TOOL,
    *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
)
LAYER = "model.layers.0.mlp.down_proj"
BESIDE = ("model.norm.weight", *(f"model.layers.0.self_attn.{kv}_scale" for kv in ("k", "v", "kv")))
"""Tensors that are damaged beside those of the layer, where a checkpoint has them."""

UNUSED = (
    *(f"{LAYER}.{name}" for name in ("x_scale", "weight_scale_2", "weight_global_scale")),
    *("lm_head.weight_scale", "model.embed_tokens.scales", "model.layers.7.mlp.up_proj.scales"),
    *("model.layers.0.self_attn.q_scale", "model.norm.weight_scale"),
)


class Damaged:
    """A copy of a checkpoint that is damaged again and again."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.config = json.loads((source / "config.json").read_text())
        self.tensors = tensors_of(source)
        self.names = [
            name for name in self.tensors if name.startswith(f"{LAYER}.") or name in BESIDE
        ]
        self._folder = folder

    def refusal(self, **changed: torch.Tensor | None) -> str:
        """The line with which an engine refuses it, with some tensors changed, or gone.

        Raises:
            AssertionError: it starts.
        """
        kept = {**self.tensors, **changed}
        save_file(
            {name: one.contiguous() for name, one in kept.items() if one is not None},
            self._folder / "model.safetensors",
        )
        return self._line(self.config, str(sorted(changed)))

    def refusal_of_config(self, config: dict[str, Any]) -> str:
        save_file(self.tensors, self._folder / "model.safetensors")
        return self._line(config, str(config))

    def refusal_of_bytes(self, start: int) -> str:
        """Of a file of which only the beginning is there."""
        file = self._folder / "model.safetensors"
        save_file(self.tensors, file)
        file.write_bytes(file.read_bytes()[:start])
        return self._line(self.config, f"cut at {start}")

    def starts(self) -> bool:
        save_file(self.tensors, self._folder / "model.safetensors")
        return self._start(self.config) is None

    def _line(self, config: dict[str, Any], what: str) -> str:
        found = self._start(config)
        assert found is not None, f"started: {what}"
        return found

    def _start(self, config: dict[str, Any]) -> str | None:
        (self._folder / "config.json").write_text(json.dumps(config))
        few = {"kv_cache": {"memory": "4MiB"}, "kernels": "torch", "attention": "torch"}
        return refusal({"model": str(self._folder), **few})


@pytest.fixture(params=CHECKPOINTS)
def damaged(request: pytest.FixtureRequest, quant_data: Path, tmp_path: Path) -> Damaged:
    return Damaged(quant_data / str(request.param), tmp_path)


def test_what_is_damaged_below_starts(damaged: Damaged) -> None:
    assert damaged.starts() and len(damaged.names) >= 3


def test_tensors_that_are_missing(damaged: Damaged) -> None:
    settings = damaged.config["quantization_config"]
    for name in damaged.names:
        # Groups that are consecutive need no map, and KV no scales.
        if name.endswith("kv_scale") or (name.endswith("g_idx") and not settings["desc_act"]):
            continue
        line = damaged.refusal(**{name: None})
        assert "missing" in line and name.rpartition(".")[0] in line


def test_tensors_of_other_shapes(damaged: Damaged) -> None:
    for name in damaged.names:
        tensor = damaged.tensors[name]
        tripled = torch.cat([tensor.reshape(-1, *tensor.shape[1:])] * 3)
        assert name in damaged.refusal(**{name: tripled})


def test_tensors_of_other_types(damaged: Damaged) -> None:
    for name in damaged.names:
        for wrong in _of_other_types(damaged.tensors[name]):
            assert name in damaged.refusal(**{name: wrong})


def _of_other_types(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor saved by value as another kind of number, or by its bits."""
    yield tensor.float().to(torch.int32 if tensor.is_floating_point() else torch.float32)
    yield tensor.float().to(torch.int64 if tensor.dtype != torch.int64 else torch.int32)
    if tensor.element_size() == 1:
        yield tensor.view(torch.uint8)


def test_floats_that_are_not_finite(damaged: Damaged) -> None:
    for name in damaged.names:
        tensor = damaged.tensors[name].clone()
        if tensor.is_floating_point():
            if tensor.element_size() == 1:
                tensor.view(torch.uint8).view(-1)[-1] = 0xFF
            else:
                tensor.view(-1)[-1] = torch.nan
            assert name in damaged.refusal(**{name: tensor})


@pytest.mark.parametrize("scale", [0.0, -0.5, float("inf")])
def test_scales_of_inputs_and_of_kv_that_are_not_positive(damaged: Damaged, scale: float) -> None:
    scales = [name for name in damaged.names if name.endswith("_scale")]
    for name in (name for name in scales if not name.endswith("weight_scale")):
        tensor = torch.full_like(damaged.tensors[name], scale)
        assert name in damaged.refusal(**{name: tensor})


@pytest.mark.parametrize("name", UNUSED)
def test_scales_that_nothing_uses(damaged: Damaged, name: str) -> None:
    assert f"tensor '{name}' is " in damaged.refusal(**{name: torch.ones(1)})


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.999])
def test_files_that_were_cut(damaged: Damaged, part: float) -> None:
    size = sum(tensor.nbytes for tensor in damaged.tensors.values())
    assert "model.safetensors" in damaged.refusal_of_bytes(int(part * size))


def test_methods_that_nobody_knows(damaged: Damaged) -> None:
    config = json.loads(json.dumps(damaged.config))
    settings = config["quantization_config"]
    method = settings["quant_method"]
    settings["format" if method == "compressed-tensors" else "quant_method"] = "unheard-of"
    assert "unheard-of" in damaged.refusal_of_config(config)


def test_groups_of_nothing(damaged: Damaged) -> None:
    config = json.loads(json.dumps(damaged.config))
    settings = config["quantization_config"]
    if settings["quant_method"] == "compressed-tensors":
        settings["config_groups"]["group_0"]["weights"]["group_size"] = 0
    elif settings["quant_method"] == "fp8":
        settings["weight_block_size"] = [0, 128]
    else:
        settings["group_size"] = 0
    assert "quantization_config." in damaged.refusal_of_config(config)
