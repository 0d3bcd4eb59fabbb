"""The weights that 8-bit plugins read of other tools' checkpoints, run by transformers, inputs rounded in
the tools' own arithmetic, gives the tools' own logits: weights, scales of inputs and of KV are right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from pegboard.compose import prepare
from pegboard.compose.kv_scales import read_kv_scales
from pegboard.config import Config
from pegboard.interfaces.attention import KVScales
from pegboard.interfaces.quantizer import Quantizer, QuantizerContext
from pegboard.testing.quantized_checkpoint import dequantized, facts_of, source_of, tensors_of
from pegboard_fp8.quantizer import FP8Quantizer
from pegboard_quant.options import CheckpointOptions
from pegboard_smoothquant.quantizer import SmoothQuantizer

Round = Callable[[torch.Tensor], torch.Tensor]

SAME = 1e-3  # products of 16 bits, summed in another order


def to_float8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def to_int8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-128, 127).round() * scale


def float8_token(x: torch.Tensor) -> torch.Tensor:
    return to_float8(x, x.abs().amax(-1, keepdim=True) / 448)


def float8_blocks(x: torch.Tensor) -> torch.Tensor:
    return float8_token(x.reshape(-1, 128)).reshape(x.shape)


def int8_token(x: torch.Tensor) -> torch.Tensor:
    return to_int8(x, x.abs().amax(-1, keepdim=True) / 127.5)


class RoundedCache(DynamicCache):
    """Keys and values in float8 by the checkpoint's scales, one a layer."""

    def __init__(self, scales: Mapping[int, KVScales]) -> None:
        super().__init__()
        self._scales = scales

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        k, v = key_states, value_states
        if layer_idx in self._scales:
            scales = self._scales[layer_idx]
            k = to_float8(k, torch.tensor(scales.k[0], dtype=k.dtype))
            v = to_float8(v, torch.tensor(scales.v[0], dtype=v.dtype))
        return super().update(k, v, layer_idx, *args, **kwargs)


@pytest.fixture
def _products_of_torch_itself() -> Iterator[None]:
    """Without oneDNN, whose order of sums in bfloat16 follows the processor's instruction set. A sum
    that is rounded otherwise crosses a step of float8 here and there, and all that follows with it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32")  # said of GPUs where the flags are read
        flags = torch.backends.mkldnn.flags(enabled=False)
        with flags:
            yield


@pytest.mark.usefixtures("_products_of_torch_itself")
@pytest.mark.parametrize(
    ("name", "make", "dynamic", "by_scale"),
    [
        ("ct-fp8-dynamic", FP8Quantizer, float8_token, None),
        ("ct-fp8-block", FP8Quantizer, float8_blocks, None),
        ("ct-fp8-static-kv", FP8Quantizer, None, to_float8),
        ("ct-w8a8-int8-dynamic", SmoothQuantizer, int8_token, None),
        ("ct-w8a8-int8-static", SmoothQuantizer, None, to_int8),
    ],
)
def test_the_tools_logits(
    quant_data: Path,
    name: str,
    make: Callable[[QuantizerContext, CheckpointOptions], Quantizer],
    dynamic: Round | None,
    by_scale: Callable[..., torch.Tensor] | None,
) -> None:
    folder = quant_data / name
    facts = facts_of(folder)
    quantizer = make(QuantizerContext(facts, "float32"), CheckpointOptions())
    stored = tensors_of(folder)
    model = model_of(folder, dequantized(quantizer, facts))
    for layer, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and f"{layer}.weight_scale" in stored:
            rounded = dynamic
            if by_scale is not None:
                rounded = partial(by_scale, scale=stored[f"{layer}.input_scale"])
            assert rounded is not None
            module.register_forward_pre_hook(partial(rounded_input, rounded))
    expected = load_file(folder / "expected.safetensors")
    with torch.no_grad():
        logits = model(expected["input_ids"], cache=RoundedCache(kv_scales(folder)))
    difference = logits.logits.float() - expected["logits"]
    assert difference.square().mean().sqrt() < SAME * expected["logits"].square().mean().sqrt()


def rounded_input(rounded: Round, module: torch.nn.Module, args: Any) -> tuple[torch.Tensor]:
    return (rounded(args[0]),)


def model_of(folder: Path, weights: Mapping[str, torch.Tensor]) -> LlamaForCausalLM:
    """The model in the checkpoint's own dtype, on these weights."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=config.dtype
    ).eval()
    model.load_state_dict(dict(weights), strict=not config.tie_word_embeddings)
    return model


def kv_scales(folder: Path) -> dict[int, KVScales]:
    config = Config.from_values({"model": str(folder), "kernels": "torch", "attention": "torch"})
    return read_kv_scales(prepare(config).composition.target, source_of(facts_of(folder)))


def test_kv_scales_are_offered_for_each_head(quant_data: Path) -> None:
    folder = quant_data / "ct-fp8-static-kv"
    stored, scales = tensors_of(folder), kv_scales(folder)
    assert sorted(scales) == [0, 1]
    for layer, found in scales.items():
        attention = f"model.layers.{layer}.self_attn"
        assert found.codes == "float8"
        assert found.k == (float(stored[f"{attention}.k_scale"]),) * 2
        assert found.v == (float(stored[f"{attention}.v_scale"]),) * 2
    assert kv_scales(quant_data / "ct-fp8-dynamic") == {}


def test_check_says_that_a_batchs_scale_is_taken_for_each_token(tmp_path: Path) -> None:
    from pegboard.cli.check import report
    from pegboard.testing.quantized_checkpoint import write_checkpoint
    from pegboard.testing.tiny import write_tiny_model

    plain = write_tiny_model(tmp_path / "plain")
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    settings = {**facts_of(plain).config, "quantization_config": quantization}
    folder = write_checkpoint(tmp_path / "fp8", settings, tensors_of(plain))
    config = Config.from_values({"model": str(folder), "kernels": "torch", "attention": "torch"})
    prepared = prepare(config)
    (note,) = report(config, prepared.composition, prepared.ledger)["notes"]
    assert "each token" in note
