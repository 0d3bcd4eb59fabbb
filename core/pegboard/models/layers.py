"""The layers that decoders are made of, and the builder that reads their weights.

A layer joins a kernel with a weight in that kernel's own layout. `LayerBuilder` reads the tensors of
a checkpoint as layers are built, one at a time, so that no two copies of a model are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch.nn import functional as F

from pegboard.errors import CheckpointError
from pegboard.interfaces.attention import AttentionBackend, RotaryTable
from pegboard.interfaces.checkpoint import CheckpointSource
from pegboard.interfaces.decoder_layer import DecoderLayerKernel, DecoderLayerParts
from pegboard.interfaces.kernel import (
    Kernel,
    LinearKernel,
    PackedWeight,
    RMSNormKernel,
    SiluMulKernel,
)
from pegboard.interfaces.model import ModelShape, ParameterShape
from pegboard.interfaces.quantizer import LinearWeight, Quantizer, Scheme, WeightSpec
from pegboard.models.rope import rotary_table

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Activation dtypes by the names that configs use."""


class Linear:
    """y = x·Wᵀ + bias."""

    def __init__(
        self, kernel: LinearKernel, weight: PackedWeight, bias: torch.Tensor | None
    ) -> None:
        self.kernel = kernel
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, in_features] -> [num_rows, out_features], both in the activation dtype."""
        y = self.kernel.linear(x, self.weight)
        return y if self.bias is None else y + self.bias


class Linears:
    """Linear layers of one input: those whose weights were joined are one product.

    Args:
        layers: one joined layer, or one a part.
        sizes: out_features of each part.
    """

    def __init__(self, layers: Sequence[Linear], sizes: Sequence[int]) -> None:
        self.layers = layers
        self.sizes = list(sizes)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x: [num_rows, in_features] -> for each part [num_rows, out_features], maybe a view."""
        if len(self.layers) == 1:
            return torch.split_with_sizes(self.layers[0](x), self.sizes, dim=1)
        return tuple(layer(x) for layer in self.layers)


class Embedding:
    """Rows of a weight by token id.

    Args:
        gather: int64 [num_tokens] -> [num_tokens, hidden_size] in the activation dtype.
    """

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.gather = gather

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: int64 [num_tokens] -> [num_tokens, hidden_size], a new tensor."""
        return self.gather(token_ids)


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last axis (arXiv 1910.07467)."""

    def __init__(self, kernel: RMSNormKernel, weight: torch.Tensor, eps: float) -> None:
        self.kernel = kernel
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., n] in the activation dtype -> the same shape."""
        return self.kernel.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual). `x` and `residual` are void afterwards."""
        return self.kernel.add_rms_norm(x, residual, self.weight, self.eps)


class Rotary:
    """A model's rotary embedding: one table, shared by its layers."""

    def __init__(self, table: RotaryTable) -> None:
        self.table = table


class Attention:
    """One decoder layer's attention over paged KV; `rotary` None: no rotation."""

    def __init__(self, backend: AttentionBackend, layer: int, rotary: Rotary | None) -> None:
        self.backend = backend
        self.layer = layer
        self.table = None if rotary is None else rotary.table

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Rotates, writes k and v into the KV blocks, attends.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim], all before
        rotation -> [num_tokens, num_heads * head_dim].
        """
        return self.backend.forward(self.layer, q, k, v, self.table).flatten(1)


class JointLayers:
    """A model's decoder layers, which a kernel runs in one call."""

    def __init__(self, kernel: DecoderLayerKernel, layers: Sequence[PackedWeight]) -> None:
        self.kernel = kernel
        self.layers = layers

    def __call__(
        self, first: int, stop: int, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs layers [first, stop) on the normed residual and the residual, [num_tokens, hidden_size]
        each -> both after them. The arguments are void afterwards."""
        self.kernel.decoder_layers(self.layers[first:stop], hidden, residual)
        return hidden, residual


@dataclass(frozen=True)
class LayerBuilder:
    """Makes layers and reads their weights; a model's factory gets one.

    Attributes:
        shape: the model.
        source: the open checkpoint.
        quantizer: decides how each weight is stored.
        linear_kernels: by weight format, for operation `linear`.
        kernels: by operation, for the others.
        attention: the worker's attention backend.
        dtype: activation dtype, a key of `DTYPES`.
        device: where the weights go, `cpu` or `cuda`.
        on_tensor: told each tensor's name as it is read.
        max_positions: positions that rotary tables cover; None: the model's whole context.
    """

    shape: ModelShape
    source: CheckpointSource
    quantizer: Quantizer
    linear_kernels: Mapping[str, LinearKernel]
    kernels: Mapping[str, Kernel]
    attention: AttentionBackend
    dtype: str
    device: str
    on_tensor: Callable[[str], None]
    max_positions: int | None = None
    _heads: dict[str, Linear] = field(default_factory=dict, init=False, repr=False)

    def linear(self, name: str) -> Linear:
        """The linear layer of that name, with its bias where the shape has one.

        Raises:
            CheckpointError: a tensor that is missing or wrong, or a format without a kernel.
        """
        kernel, weight, bias = self._read_linear(name)
        return Linear(kernel, kernel.prepare(weight), bias)

    def linears(self, names: Sequence[str]) -> Linears:
        """The linear layers of those names, which have one input. Where their weights are stored
        alike they become one: a kernel is faster on one large weight than on several small ones.

        Raises:
            CheckpointError: as `linear`.
        """
        parts = [self._read_linear(name) for name in names]
        kernels, weights, biases = zip(*parts, strict=True)
        sizes = [weight.shape[0] for weight in weights]
        joined = _joined(weights) if len({id(kernel) for kernel in kernels}) == 1 else None
        if joined is None or len({bias is None for bias in biases}) > 1:
            layers = [
                Linear(kernel, kernel.prepare(weight), bias) for kernel, weight, bias in parts
            ]
            return Linears(layers, sizes)
        bias = None if biases[0] is None else torch.cat(biases)
        return Linears([Linear(kernels[0], kernels[0].prepare(joined), bias)], sizes)

    def embedding(self, name: str) -> Embedding:
        """The embedding of that name. Its weight is shared with a head of the same name where the
        kernel serves both uses; else the embedding keeps a plain copy of its own.

        Raises:
            CheckpointError: as `linear`.
        """
        spec, scheme = self._scheme(name)
        kernel = self._linear_kernel(scheme, name)
        if kernel.gathers or self.shape.tied_embeddings:
            packed = kernel.prepare(self._load(spec, scheme))
            self._heads[name] = Linear(kernel, packed, None)
            if kernel.gathers:
                return Embedding(partial(kernel.gather_rows, packed))
        rows = scheme.dequantize(self._stored(spec, scheme)).to(self._torch_device, self._dtype)
        _check_finite(f"{name}.weight", rows)
        return Embedding(lambda token_ids: F.embedding(token_ids, rows))

    def head(self, name: str) -> Linear:
        """The output head: hidden states to logits. A tied one is asked for by the name of the
        embedding, after it.

        Raises:
            CheckpointError: as `linear`.
        """
        return self._heads[name] if name in self._heads else self.linear(name)

    def values(self, name: str) -> torch.Tensor:
        """float32 [out_features, in_features] of a linear layer's, an embedding's or the head's
        weight, however it is stored.

        Raises:
            CheckpointError: a tensor that is missing or wrong.
        """
        spec, scheme = self._scheme(name)
        return scheme.dequantize(self._stored(spec, scheme))

    def norm(self, name: str) -> RMSNorm:
        """The RMSNorm of that name.

        Raises:
            CheckpointError: its weight is missing or wrong.
        """
        kernel = cast(RMSNormKernel, self.kernels["rms_norm"])
        return RMSNorm(kernel, self._vector(f"{name}.weight"), self.shape.norm_eps)

    def rotary(self) -> Rotary:
        """The model's rotary embedding; make one and share it."""
        num_positions = self.max_positions or self.shape.max_position
        table = rotary_table(self.shape.rope, num_positions, self._dtype, self._torch_device)
        return Rotary(table)

    def attention_layer(self, layer: int, rotary: Rotary | None) -> Attention:
        """Attention of one decoder layer."""
        return Attention(self.attention, layer, rotary)

    def joint_layer(
        self,
        layer: int,
        attention: Attention,
        linears: tuple[Linears, Linear, Linears, Linear],
        norms: tuple[RMSNorm, RMSNorm],
    ) -> PackedWeight | None:
        """A decoder layer for `joint_layers`; None: its parts must run one by one.

        Args:
            layer: its number.
            attention: between the first two linear layers.
            linears: q, k, v; o; gate, up; down.
            norms: between attention and MLP, and after the layer.
        """
        kernel = self.kernels.get("decoder_layer")
        qkv, o, gate_up, down = linears
        plain = [*qkv.layers, o, *gate_up.layers, down]
        if kernel is None or len(plain) != 4 or any(one.bias is not None for one in plain):
            return None
        norm, next_norm = norms
        return cast(DecoderLayerKernel, kernel).prepare(
            DecoderLayerParts(
                layer,
                self.shape.attention[layer],
                self.attention,
                attention.table,
                qkv=plain[0].weight,
                o=plain[1].weight,
                gate_up=plain[2].weight,
                down=plain[3].weight,
                norm=norm.weight,
                next_norm=next_norm.weight,
                eps=norm.eps,
            )
        )

    def joint_layers(self, layers: Sequence[PackedWeight | None]) -> JointLayers | None:
        """All decoder layers in one call; None where one of them must run by its parts."""
        joint = [layer for layer in layers if layer is not None]
        if len(joint) < len(layers):
            return None
        return JointLayers(cast(DecoderLayerKernel, self.kernels["decoder_layer"]), joint)

    def silu_mul(self) -> SiluMulKernel:
        """The gated MLP's activation, silu(gate) * up."""
        return cast(SiluMulKernel, self.kernels["silu_mul"])

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def _torch_device(self) -> torch.device:
        return torch.device(self.device)

    @cached_property
    def _parameters(self) -> dict[str, ParameterShape]:
        return {parameter.name: parameter for parameter in self.shape.parameters}

    def _read_linear(self, name: str) -> tuple[LinearKernel, LinearWeight, torch.Tensor | None]:
        spec, scheme = self._scheme(name)
        kernel = self._linear_kernel(scheme, name)
        weight = self._load(spec, scheme)
        return kernel, weight, self._bias(name)

    def _bias(self, name: str) -> torch.Tensor | None:
        """None too where it is zero throughout, as tools that quantize write it for every layer: without
        one, layers can be joined."""
        if f"{name}.bias" not in self._parameters:
            return None
        bias = self._vector(f"{name}.bias")
        return bias if bool(bias.any()) else None

    def _scheme(self, name: str) -> tuple[WeightSpec, Scheme]:
        parameter = self._parameters[f"{name}.weight"]
        out_features, in_features = parameter.shape
        spec = WeightSpec(name, (out_features, in_features), parameter.kind)
        return spec, self.quantizer.scheme(spec)

    def _linear_kernel(self, scheme: Scheme, name: str) -> LinearKernel:
        if scheme.format not in self.linear_kernels:
            raise CheckpointError(
                f"weight of {name}",
                f"format {scheme.format!r} has no linear kernel here",
                allowed=", ".join(self.linear_kernels),
            )
        return self.linear_kernels[scheme.format]

    def _load(self, spec: WeightSpec, scheme: Scheme) -> LinearWeight:
        """The canonical weight, on the device, in memory of its own."""
        stored = self._stored(spec, scheme)
        weight = scheme.load(stored)
        if weight.shape != spec.shape:
            raise _misshapen(f"{spec.name}.weight", weight.shape, spec.shape)
        if weight.values is not None:
            _check_finite(f"{spec.name}.weight", weight.values)
        own = partial(_own, device=self._torch_device, stored=stored.values())
        values = {item.name: getattr(weight, item.name) for item in fields(weight)}
        tensors: dict[str, Any] = {
            name: own(value) for name, value in values.items() if isinstance(value, torch.Tensor)
        }
        return replace(weight, **tensors)

    def _stored(self, spec: WeightSpec, scheme: Scheme) -> dict[str, torch.Tensor]:
        names = [parameter.name for parameter in scheme.parameters]
        return {name: self._read(f"{spec.name}.{name}") for name in names}

    def _vector(self, name: str) -> torch.Tensor:
        """A norm's weight or a bias, in the activation dtype."""
        tensor = self._read(name)
        shape = self._parameters[name].shape
        if tuple(tensor.shape) != shape:
            raise _misshapen(name, tuple(tensor.shape), shape)
        if not tensor.is_floating_point():
            raise CheckpointError(f"tensor {name}", f"{tensor.dtype}", allowed="a floating type")
        _check_finite(name, tensor)
        return _own(tensor.to(self._dtype), self._torch_device, [tensor])

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        self.on_tensor(name)
        return tensor


def _joined(weights: Sequence[LinearWeight]) -> LinearWeight | None:
    """The weights of several layers of one input as one, along the output; None where their forms
    do not go together."""
    first = weights[0]
    if not all(_same_inputs(first, weight) for weight in weights):
        return None
    tensors: dict[str, Any] = {}
    for name in ("values", "codes", "scales", "zeros", "minima"):
        parts = [getattr(weight, name) for weight in weights]
        if len({None if part is None else (part.dtype, part.shape[1:]) for part in parts}) > 1:
            return None
        tensors[name] = None if parts[0] is None else torch.cat(parts)
    shape = (sum(weight.shape[0] for weight in weights), first.shape[1])
    return replace(first, shape=shape, **tensors)


def _same_inputs(first: LinearWeight, other: LinearWeight) -> bool:
    """Whether two weights group and quantize their inputs alike."""
    numbers = ("format", "group_size", "activations", "input_group")
    tensors = ("group_map", "input_scale", "input_zero")
    return all(getattr(first, name) == getattr(other, name) for name in numbers) and all(
        _equal(getattr(first, name), getattr(other, name)) for name in tensors
    )


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _own(
    tensor: torch.Tensor, device: torch.device, stored: Iterable[torch.Tensor]
) -> torch.Tensor:
    """The tensor on the device, copied where it is a view of the checkpoint's mapped file: one that
    is rewritten must not reach into a running model."""
    mapped = {other.untyped_storage().data_ptr() for other in stored}
    return tensor.to(device, copy=tensor.untyped_storage().data_ptr() in mapped)


def _check_finite(name: str, values: torch.Tensor) -> None:
    """Raises CheckpointError where floats of any shape hold NaN or infinity. The least and the largest
    tell it in the time of reading them, and in no memory."""
    least, most = values.aminmax()
    if not bool(least.isfinite() & most.isfinite()):
        raise CheckpointError(
            f"tensor {name}", "holds numbers that are not finite", fix="get the checkpoint again"
        )


def _misshapen(name: str, was: tuple[int, ...], allowed: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"tensor {name}",
        f"shape {list(was)}",
        allowed=f"{list(allowed)}",
        fix="config and weights are of different models: get both from one checkpoint",
    )
