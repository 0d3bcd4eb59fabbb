"""Tiny random models of all four families against transformers, from the very same files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from pegboard.builtin.safetensors_describe import describe as describe_checkpoint
from pegboard.builtin.safetensors_source import SafetensorsSource
from pegboard.builtin.torch_kernels import TorchPanelLinear, TorchRMSNorm, torch_kernel
from pegboard.builtin.unquantized import Unquantized
from pegboard.errors import CheckpointError
from pegboard.interfaces.attention import AttentionBackend, AttentionBatch, RotaryTable
from pegboard.interfaces.kernel import Kernel, KernelContext, RotaryKernel
from pegboard.interfaces.model import ModelShape
from pegboard.interfaces.quantizer import (
    LinearWeight,
    Quantizer,
    QuantizerContext,
    Scheme,
    StoredParameter,
    WeightSpec,
)
from pegboard.models.layers import LayerBuilder
from pegboard.models.llama import Llama, build
from pegboard.models.shape import describe

NUM_TOKENS = 48

ODD: dict[str, Any] = {
    "vocab_size": 517,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}
QWEN_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 6}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, head_dim from hidden size": ("llama", {"head_dim": None}),
    "llama, two kv heads": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, yarn rope with mscales": ("llama", {"rope_parameters": YARN | MSCALES}),
    "llama, yarn rope with attention factor": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3}},
    ),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window off": ("qwen2", {"sliding_window": 5, "max_window_layers": 0}),
    "qwen2, window from layer 1": ("qwen2", QWEN_WINDOW | {"max_window_layers": 1}),
    "qwen2, window on and null": ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3, layer types": ("qwen3", QWEN_WINDOW | {"layer_types": QWEN_LAYERS}),
    "qwen3, yarn rope": ("qwen3", {"rope_parameters": YARN}),
}


class DenseAttention(AttentionBackend):
    """Attention of one whole sequence, without blocks: torch's own, under a band mask."""

    def __init__(self, shape: ModelShape, rotary: RotaryKernel) -> None:
        self._shape = shape
        self._rotary = rotary

    def bind(self, kv: Sequence[Mapping[str, torch.Tensor]]) -> None: ...
    def prepare(self, batch: AttentionBatch) -> None: ...
    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None: ...
    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None: ...

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryTable | None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape, positions = self._shape.attention[layer], torch.arange(len(q))
        if rotary is not None:
            q, k = (self._rotary.rotate(x, positions, rotary.cos, rotary.sin) for x in (q, k))
        k, v = (x.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1) for x in (k, v))
        age = positions[:, None] - positions[None, :]
        visible = (age >= 0) & (age < (shape.window or len(q)))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=shape.scale)
        return out.transpose(0, 1)


class NoGather(TorchPanelLinear):
    """A linear kernel whose packed weights cannot serve an embedding."""

    gathers = False

    def gather_rows(self, weight: Any, row_ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("asked for rows of a weight that does not gather")


def save(folder: Path, family: str, overrides: dict[str, Any], shard_size: str = "5GB") -> Any:
    """A seeded random model of transformers', saved by it. Returns the model, float64."""
    config = AutoConfig.for_model(family, **{**ODD, **overrides})
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        scale, offset = 1.5 / math.sqrt(parameter.shape[-1]), 0.0
        if parameter.dim() == 1:
            scale, offset = 0.2, float("norm" in name)
        # representable in bfloat16, so that every dtype holds the same model
        parameter.data = (offset + scale * noise).to(torch.bfloat16).double()
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


class InPlaceRMSNorm(TorchRMSNorm):
    """Uses its right to write into what it adds."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual += x
        x.copy_(self.rms_norm(residual, weight, eps))
        return x, residual


class OtherFormat(Scheme):
    """A scheme under the name of another format."""

    format = "other"

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    @property
    def parameters(self) -> tuple[StoredParameter, ...]:
        return self._scheme.parameters

    def load(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        return replace(self._scheme.load(parameters), format="other")

    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._scheme.dequantize(parameters)


class MixedFormats(Unquantized):
    """Decides differently on layers of one input."""

    def scheme(self, weight: WeightSpec) -> Scheme:
        plain = super().scheme(weight)
        return OtherFormat(plain) if weight.name.endswith(("k_proj", "up_proj")) else plain


def load(
    folder: Path,
    dtype: str,
    quantizer: Callable[[QuantizerContext], Quantizer] = Unquantized,
    **others: Callable[[KernelContext], Kernel],
) -> tuple[Llama, list[str]]:
    """Our model from the folder, and the names of the tensors in the order they were read.

    `others`: operation to a kernel that replaces torch's.
    """
    facts = describe_checkpoint(folder)
    shape = describe(facts.config)

    def kernel(operation: str) -> Any:
        context = KernelContext(operation, "float", dtype, "cpu", 1)
        return others.get(operation, torch_kernel)(context)

    source, read = SafetensorsSource(facts), list[str]()
    model = build(
        LayerBuilder(
            shape=shape,
            source=source,
            quantizer=quantizer(QuantizerContext(facts, dtype)),
            linear_kernels={"float": kernel("linear"), "other": kernel("linear")},
            kernels={operation: kernel(operation) for operation in ("rms_norm", "silu_mul")},
            attention=DenseAttention(shape, kernel("rotary")),
            dtype=dtype,
            device="cpu",
            on_tensor=read.append,
        )
    )
    source.close()
    assert isinstance(model, Llama)
    return model, read


def token_ids() -> torch.Tensor:
    return torch.randint(0, 517, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))


@torch.inference_mode()
def logits(model: Llama) -> torch.Tensor:
    """In the model's own dtype."""
    hidden, _ = model.forward(token_ids(), torch.arange(NUM_TOKENS))
    return model.head(hidden)


@torch.inference_mode()
def reference_logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(token_ids()[None]).logits[0]
    return result


def in_float64(model: Any) -> Any:
    """transformers keeps norms and angles in float32 in every model; here they are float64."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(len(child.weight), eps=1e-5, dtype=torch.float64)
                norm.weight.data = child.weight.data
                setattr(parent, name, norm)
    rotary = model.model.rotary_emb

    def angles(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = position_ids[..., None].double() * rotary.inv_freq.double()
        both = torch.cat((half, half), dim=-1)
        return both.cos() * rotary.attention_scaling, both.sin() * rotary.attention_scaling

    rotary.forward = angles
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    reference = save(tmp_path, *CASES[case])
    expected32 = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32"))
    expected64 = reference_logits(in_float64(reference))
    assert expected64.std() > 0.5  # or closeness would mean nothing
    got32, got64 = (logits(load(tmp_path, dtype)[0]) for dtype in ("float32", "float64"))
    assert got32.dtype == torch.float32
    assert (got32 - expected32).abs().max() < 1e-4
    assert got64.dtype == torch.float64
    assert (got64 - expected64).abs().max() < 1e-9


def test_mistral_with_layer_types_has_its_window_where_they_say(tmp_path: Path) -> None:
    """transformers reads such a config as another family's, whose layers differ."""
    save(tmp_path, "ministral", {"sliding_window": 7, "layer_types": QWEN_LAYERS})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    file.write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    assert (logits(load(tmp_path, "float32")[0]) - reference_logits(theirs)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_is_as_close_as_transformers(
    family: str, dtype: str, tmp_path: Path
) -> None:
    exact = reference_logits(in_float64(save(tmp_path, family, {})))
    theirs = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    ours = logits(load(tmp_path, dtype)[0])
    assert ours.dtype == theirs.dtype

    def error(got: torch.Tensor) -> float:
        return float((got.double() - exact).square().mean().sqrt())

    assert error(ours) < 1.25 * error(theirs)


def test_logits_are_float32(tmp_path: Path) -> None:
    save(tmp_path, "llama", {})
    for dtype in ("bfloat16", "float64"):
        model, _ = load(tmp_path, dtype)
        hidden, _ = model.forward(token_ids(), torch.arange(NUM_TOKENS))
        assert model.logits(hidden[:3]).dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_sharded_checkpoint_loads_the_same(family: str, tmp_path: Path) -> None:
    save(tmp_path / "whole", family, {})
    save(tmp_path / "shards", family, {}, shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, sharded = (logits(load(tmp_path / name, "float32")[0]) for name in ("whole", "shards"))
    assert torch.equal(whole, sharded)


@pytest.mark.parametrize("case", ["llama tied", "llama with biases", "qwen2", "qwen3"])
def test_tensors_are_read_once_and_in_the_order_of_the_shape(case: str, tmp_path: Path) -> None:
    save(tmp_path, *CASES[case])
    facts = describe_checkpoint(tmp_path)
    _, read = load(tmp_path, "float32")
    assert read == [parameter.name for parameter in describe(facts.config).parameters]
    assert sorted(read) == sorted(facts.tensors)


def test_tied_weight_of_a_kernel_that_does_not_gather(tmp_path: Path) -> None:
    save(tmp_path, "llama", {"tie_word_embeddings": True})
    shared = logits(load(tmp_path, "float32")[0])
    copied = logits(load(tmp_path, "float32", linear=NoGather)[0])
    assert torch.equal(shared, copied)


def test_layers_of_one_input_may_be_stored_differently(tmp_path: Path) -> None:
    reference = save(tmp_path, "qwen2", {})
    model, _ = load(tmp_path, "float64", MixedFormats)
    torch.testing.assert_close(logits(model), reference_logits(in_float64(reference)))


@pytest.mark.parametrize("norm", [TorchRMSNorm, InPlaceRMSNorm])
def test_taps_are_the_inputs_of_layers(norm: type[TorchRMSNorm], tmp_path: Path) -> None:
    reference = save(tmp_path, "qwen3", {}).float()
    model, _ = load(tmp_path, "float32", rms_norm=norm)
    with torch.inference_mode():
        hidden, taps = model.forward(token_ids(), torch.arange(NUM_TOKENS), taps=(-1, 0, 2))
        states = reference.model(token_ids()[None], output_hidden_states=True).hidden_states
    assert sorted(taps) == [-1, 0, 2]
    for layer, tapped in taps.items():
        assert torch.allclose(tapped, states[max(layer, 0)][0], atol=1e-5)
    assert torch.allclose(hidden, states[-1][0], atol=1e-4)


def test_running_model_survives_its_file(tmp_path: Path) -> None:
    save(tmp_path, "llama", {})
    model, _ = load(tmp_path, "float64")
    before = logits(model)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_missing_and_misshapen_tensors_are_named(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path, "llama", {})
    tensors = load_file(tmp_path / "model.safetensors")
    whole = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        load(tmp_path, "float32")
    save_file({**tensors, name: whole[:-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}: shape"):
        load(tmp_path, "float32")


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("linear", [TorchPanelLinear, NoGather])
@pytest.mark.parametrize(
    "name",
    [
        *("model.norm.weight", "model.layers.1.self_attn.q_proj.bias", "lm_head.weight"),
        *("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    name: str, linear: Callable[[KernelContext], Kernel], number: float, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path, "qwen2", {})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][3, ...] = number
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}: holds numbers that are not finite"):
        load(tmp_path, "float32", linear=linear)


def test_weights_that_need_a_quantizer_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama", {})
    facts = describe_checkpoint(tmp_path)
    name = "model.layers.0.mlp.up_proj"
    block = replace(facts.tensors[f"{name}.weight"], format="Q4_1", dtype="uint8")
    packed = replace(facts, tensors={**facts.tensors, f"{name}.weight": block})
    weight = WeightSpec(name, (72, 40), "linear")
    with pytest.raises(CheckpointError, match=r"up_proj.weight: stored as Q4_1; .*quantizer"):
        Unquantized(QuantizerContext(packed, "float32")).scheme(weight)
