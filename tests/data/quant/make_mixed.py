"""Writes the checkpoint `ct-mixed`, in layouts of four kinds, with compressed-tensors itself.

pip install compressed-tensors==0.20.1 transformers torch
python make_mixed.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "ct-mixed"
NUM_TOKENS = 24


def base_model() -> Any:
    """Weights of std 0.08, every 17th input column three times larger."""
    torch.manual_seed(11)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.float16)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.08)
            parameter.data[:, ::17] *= 3
        else:
            parameter.data.normal_(1, 0.1)
    return model.eval()


def int4_groups() -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)


def rows(kind: str) -> QuantizationArgs:
    return QuantizationArgs(num_bits=8, type=kind, strategy="channel")


def tokens(kind: str) -> QuantizationArgs:
    return QuantizationArgs(num_bits=8, type=kind, strategy="token", dynamic=True)


CONFIG = QuantizationConfig(
    config_groups={
        "attention": QuantizationScheme(
            targets=["re:.*self_attn.*"], weights=rows("int"), input_activations=tokens("int")
        ),
        "down": QuantizationScheme(
            targets=["re:.*down_proj"], weights=rows("float"), input_activations=tokens("float")
        ),
        "mlp": QuantizationScheme(targets=["Linear"], weights=int4_groups()),
    },
    ignore=["lm_head", "model.layers.0.self_attn.v_proj"],
)


def calibrate(module: Any) -> None:
    """Scales of a weight, by its least and largest numbers."""
    scheme = getattr(module, "quantization_scheme", None)
    if scheme is None:
        return
    args, weight = scheme.weights, module.weight.data.float()
    size = args.group_size or weight.shape[1]
    groups = weight.view(weight.shape[0], -1, size)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    module.weight_scale.data.copy_(scale)


def main() -> None:
    model = base_model()
    apply_quantization_config(model, CONFIG)
    model.apply(calibrate)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(FOLDER)
    compressor.update_config(FOLDER)
    write_expected()


def write_expected() -> None:
    """The folder's weights, loaded again by transformers."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    ids = torch.randint(3, 256, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        logits = model(ids[None]).logits[0].float()
    weights = dict(model.named_parameters())  # the forward pass has dequantized them
    kept = [
        f"model.layers.{layer}.{name}.weight"
        for layer, name in (
            (0, "self_attn.k_proj"),
            (0, "mlp.gate_proj"),
            (1, "mlp.up_proj"),
            (1, "mlp.down_proj"),
        )
    ]
    expected = {f"dequant.{name}": weights[name].detach().contiguous() for name in kept}
    save_file({**expected, "input_ids": ids, "logits": logits}, FOLDER / "expected.safetensors")


if __name__ == "__main__":
    main()
