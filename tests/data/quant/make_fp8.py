"""Writes the checkpoints `fp8-block-inv` and `fp8-tensor-static`, and what they mean, with numpy alone.

    python make_fp8.py

Everything is as straight as it can be: e4m3 is a table of its 256 values, a weight is a code's value
times its scale, the model is Qwen2 in float64 with inputs of quantized layers rounded to e4m3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Stored = tuple[str, NDArray[Any]]

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 160, 200, 96, 4, 2, 40, 1
EPS, THETA = 1e-6, 10000.0
BLOCK = 128
NUM_TOKENS = 8
MARGIN = 1e-5
FOLDER = Path(__file__).parent

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "float32",
}
BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
TENSORS = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "ignored_layers": ["lm_head", "model.layers.0.mlp.gate_up_proj"],
}


def e4m3_values() -> F64:
    """The value of each code: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    values = np.empty(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code >> 3) & 0xF, code & 7
        size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        values[code] = np.nan if code & 0x7F == 0x7F else sign * size
    return values


VALUES = e4m3_values()
FINITE = VALUES[:0x7F]  # codes of numbers that are not negative, ascending


def e4m3_codes(numbers: F64) -> NDArray[np.uint8]:
    """The code nearest to each number; of two that are as near, the even one; at most 448."""
    sizes = np.minimum(np.abs(numbers), 448.0)
    upper = np.clip(np.searchsorted(FINITE, sizes), 1, 0x7E)
    below, above = sizes - FINITE[upper - 1], FINITE[upper] - sizes
    up = (above < below) | ((above == below) & (upper % 2 == 0))
    codes = np.where(up, upper, upper - 1)
    return (codes | np.where(np.signbit(numbers), 0x80, 0)).astype(np.uint8)


def safely(numbers: F64) -> NDArray[np.uint8]:
    """Codes of inputs, none of which is so near to the middle of two that a rounding of float32
    somewhere before it would change its code.

    Raises:
        TooNear: one is.
    """
    middles = (FINITE[1:] + FINITE[:-1]) / 2
    sizes = np.abs(numbers).reshape(-1, 1)
    if (np.abs(sizes - middles) < MARGIN * middles).any():
        raise TooNear
    return e4m3_codes(numbers)


class TooNear(Exception):
    """Another text must be tried."""


def in_blocks(weight: F64) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes, and a scale of each block of 128 by 128; the last ones of a row and column are smaller."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    codes, scales = np.empty(weight.shape, np.uint8), np.empty((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = np.abs(weight[part]).max() / 448
            codes[part] = e4m3_codes(weight[part] / scales[i, j])
    return codes, scales


def from_blocks(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Code times scale, each product in float32."""
    weight = np.empty(codes.shape, np.float32)
    for n in range(codes.shape[0]):
        for k in range(codes.shape[1]):
            value = np.float32(VALUES[codes[n, k]])
            weight[n, k] = value * scales[n // BLOCK, k // BLOCK]
    return weight


def block_inputs(x: F64) -> F64:
    """Each token's inputs in runs of 128, rounded to e4m3 by a scale of their own."""
    rounded = np.zeros_like(x)
    for token in range(x.shape[0]):
        for start in range(0, x.shape[1], BLOCK):
            run = x[token, start : start + BLOCK].astype(np.float32)
            scale = np.float32(np.abs(run).max() / np.float32(448))
            codes = safely((run / scale).astype(np.float64))
            rounded[token, start : start + BLOCK] = VALUES[codes] * scale
    return rounded


class Model:
    """Qwen2 in float64, on dequantized weights.

    Args:
        weights: by tensor name.
        round_inputs: inputs of the layer of that name, before its product.
    """

    def __init__(self, weights: Mapping[str, NDArray[Any]], round_inputs: Any) -> None:
        self.weights = {name: weight.astype(np.float64) for name, weight in weights.items()}
        self.round_inputs = round_inputs
        self.seen: dict[str, float] = {}

    def logits(self, ids: NDArray[np.int64]) -> F64:
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(LAYERS):
            name = f"model.layers.{layer}"
            x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
            x = x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))
        logits: F64 = self.norm("model.norm", x) @ self.weights["lm_head.weight"].T
        return logits

    def norm(self, name: str, x: F64) -> F64:
        size = np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
        return np.asarray(x / size * self.weights[f"{name}.weight"])

    def linear(self, name: str, x: F64) -> F64:
        self.seen[name] = max(self.seen.get(name, 0.0), float(np.abs(x).max()))
        y: F64 = self.round_inputs(name, x) @ self.weights[f"{name}.weight"].T
        return y + self.weights.get(f"{name}.bias", np.zeros(1))

    def attention(self, name: str, x: F64) -> F64:
        num = x.shape[0]
        q = self.turned(self.linear(f"{name}.q_proj", x).reshape(num, HEADS, HEAD_DIM))
        k = self.turned(self.linear(f"{name}.k_proj", x).reshape(num, KV_HEADS, HEAD_DIM))
        v = self.linear(f"{name}.v_proj", x).reshape(num, KV_HEADS, HEAD_DIM)
        out = np.zeros((num, HEADS, HEAD_DIM))
        for head in range(HEADS):
            kv_head = head * KV_HEADS // HEADS
            for token in range(num):
                scores = k[: token + 1, kv_head] @ q[token, head] * HEAD_DIM**-0.5
                shares = np.exp(scores - scores.max())
                out[token, head] = shares / shares.sum() @ v[: token + 1, kv_head]
        return self.linear(f"{name}.o_proj", out.reshape(num, -1))

    def turned(self, x: F64) -> F64:
        half = HEAD_DIM // 2
        angles = np.outer(np.arange(x.shape[0]), THETA ** (-np.arange(half) / half))[:, None]
        one, other = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([one * cos - other * sin, other * cos + one * sin], -1)

    def mlp(self, name: str, x: F64) -> F64:
        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * up)


def linear_shapes() -> dict[str, tuple[int, int]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj": (q, HIDDEN),
            f"{name}.self_attn.k_proj": (kv, HIDDEN),
            f"{name}.self_attn.v_proj": (kv, HIDDEN),
            f"{name}.self_attn.o_proj": (HIDDEN, q),
            f"{name}.mlp.gate_proj": (INNER, HIDDEN),
            f"{name}.mlp.up_proj": (INNER, HIDDEN),
            f"{name}.mlp.down_proj": (HIDDEN, INNER),
        }
    return shapes


def float_weights() -> dict[str, NDArray[np.float32]]:
    """Weights of no format: what every checkpoint here begins from."""
    generator = np.random.default_rng(5)

    def normal(*shape: int) -> NDArray[np.float32]:
        return (generator.normal(size=shape) * 0.1).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN) * np.float32(10),
        "lm_head.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": 1 + normal(HIDDEN),
    }
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = 1 + normal(HIDDEN)
    for name, shape in linear_shapes().items():
        weights[f"{name}.weight"] = normal(*shape)
        weights[f"{name}.weight"][:, ::17] *= 3
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            weights[f"{name}.bias"] = normal(shape[0])
    return weights


def block_checkpoint(ids: NDArray[np.int64]) -> None:
    weights = float_weights()
    stored: dict[str, Stored] = {name: ("F32", weight) for name, weight in weights.items()}
    for name in linear_shapes():
        codes, scales = in_blocks(weights[f"{name}.weight"].astype(np.float64))
        stored[f"{name}.weight"] = ("F8_E4M3", codes)
        stored[f"{name}.weight_scale_inv"] = ("F32", scales)
        weights[f"{name}.weight"] = from_blocks(codes, scales)
    quantized = linear_shapes()

    def round_inputs(name: str, x: F64) -> F64:
        return block_inputs(x) if name in quantized else x

    write("fp8-block-inv", BLOCKS, stored, weights, Model(weights, round_inputs).logits(ids), ids)


def tensor_checkpoint(ids: NDArray[np.int64]) -> None:
    """One scale a weight and one for its inputs; layer 0's gate and up are left as they are."""
    weights = float_weights()
    calibration = Model(weights, lambda name, x: x)
    calibration.logits(np.roll(ids, 3))
    stored: dict[str, Stored] = {name: ("F32", weight) for name, weight in weights.items()}
    input_scales: dict[str, np.float32] = {}
    for name in linear_shapes():
        if name.startswith("model.layers.0.mlp.") and "down" not in name:
            continue
        weight = weights[f"{name}.weight"]
        scale = np.float32(np.abs(weight).max() / 448)
        codes = e4m3_codes(weight.astype(np.float64) / scale)
        input_scales[name] = np.float32(calibration.seen[name] / 448)
        stored[f"{name}.weight"] = ("F8_E4M3", codes)
        stored[f"{name}.weight_scale"] = ("F32", np.array(scale))
        stored[f"{name}.input_scale"] = ("F32", np.array(input_scales[name]))
        weights[f"{name}.weight"] = VALUES[codes].astype(np.float32) * scale
    for layer in range(LAYERS):
        stored[f"model.layers.{layer}.self_attn.kv_scale"] = ("F32", np.full(1, 0.25, np.float32))

    def round_inputs(name: str, x: F64) -> F64:
        if name not in input_scales:
            return x
        scaled = x.astype(np.float32) / input_scales[name]
        return VALUES[safely(scaled.astype(np.float64))] * input_scales[name]

    logits = Model(weights, round_inputs).logits(ids)
    write("fp8-tensor-static", TENSORS, stored, weights, logits, ids)


def write(
    name: str,
    quantization: Mapping[str, Any],
    stored: Mapping[str, Stored],
    weights: Mapping[str, NDArray[Any]],
    logits: F64,
    ids: NDArray[np.int64],
) -> None:
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    config = CONFIG | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save(folder / "model.safetensors", stored)
    kept = [f"model.layers.0.{layer}.weight" for layer in ("self_attn.k_proj", "mlp.down_proj")]
    expected: dict[str, Stored] = {f"dequant.{key}": ("F32", weights[key]) for key in kept}
    expected |= {"input_ids": ("I64", ids), "logits": ("F32", logits.astype(np.float32))}
    save(folder / "expected.safetensors", expected)


def save(path: Path, tensors: Mapping[str, Stored]) -> None:
    """A safetensors file: the header's size, the header, the bytes."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, tensor) in tensors.items():
        offsets = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": offsets}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def for_some_text(write_checkpoint: Callable[[NDArray[np.int64]], None]) -> None:
    """Writes a checkpoint, with the first random text all of whose inputs are safe to round."""
    for seed in count():
        ids = np.random.default_rng(seed).integers(0, VOCAB, NUM_TOKENS)
        try:
            return write_checkpoint(ids)
        except TooNear:
            continue


if __name__ == "__main__":
    for_some_text(block_checkpoint)
    for_some_text(tensor_checkpoint)
