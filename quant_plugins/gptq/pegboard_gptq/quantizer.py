"""The `gptq` quantizer: layers in integer codes, by GPTQ's tools or by compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard.errors import CheckpointError
from pegboard.interfaces.quantizer import (
    LinearWeight,
    Quantizer,
    QuantizerContext,
    Scheme,
    WeightSpec,
)
from pegboard_gptq.gptq_plan import CODES, GPTQLayer
from pegboard_gptq.packed_plan import CODES as PACKED_CODES
from pegboard_gptq.packed_plan import ZEROS, PackedLayer
from pegboard_gptq.plan import stored_layer
from pegboard_gptq.zeros import zeros_of
from pegboard_quant.bitstream import unpack, unpack_apart
from pegboard_quant.checks import GET_AGAIN
from pegboard_quant.codes import UnsignedCodes, canonical, group_map_of
from pegboard_quant.options import ActivationOptions
from pegboard_quant.planning import code_format, plain_parameters
from pegboard_quant.schemes import FloatScheme, StoredScheme, finite_scales


class GPTQQuantizer(Quantizer):
    """Reads layers in codes; those that the checkpoint keeps in floats stay so."""

    def __init__(self, context: QuantizerContext, options: ActivationOptions) -> None:
        self._facts = context.facts
        self._dtype: torch.dtype = getattr(torch, context.dtype)
        self._options = options

    def scheme(self, weight: WeightSpec) -> Scheme:
        found = stored_layer(weight, self._facts)
        if found is None:
            return FloatScheme(weight, plain_parameters(weight), self._dtype)
        if isinstance(found, GPTQLayer):
            return GPTQScheme(weight, found, self._options)
        return PackedScheme(weight, found, self._options)


class GPTQScheme(StoredScheme):
    """`qweight`, `qzeros`, `scales` and perhaps `g_idx`, all with the outputs last."""

    def __init__(self, weight: WeightSpec, layer: GPTQLayer, options: ActivationOptions) -> None:
        weight_format = code_format(layer.bits, options.activations)
        super().__init__(weight, layer.parameters, weight_format)
        self._layer = layer

    def canonical(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        layer, name = self._layer, self.weight.name
        out_features, in_features = self.weight.shape
        values = unpack(parameters[CODES], layer.bits, in_features, axis=0)
        zeros = zeros_of(parameters["qzeros"], out_features, layer.settings, f"{name}.qzeros")
        codes = UnsignedCodes(
            values=values.T,
            bits=layer.bits,
            scales=finite_scales(f"{name}.scales", parameters["scales"]).T,
            zeros=zeros.T,
            group_size=layer.group_size,
            group_map=self._group_map(parameters.get("g_idx")),
        )
        return canonical(codes, self.format)

    def _group_map(self, stored: torch.Tensor | None) -> torch.Tensor | None:
        """The groups of inputs, where they are not consecutive. One that is zero throughout was never
        filled in."""
        if stored is None or self._layer.num_groups == 1:
            return None
        name = f"{self.weight.name}.g_idx"
        if not bool(stored.any()):
            if self._layer.settings.reordered:
                raise CheckpointError(
                    f"tensor {name}",
                    "is zero throughout, and desc_act says that groups are not consecutive",
                    fix=GET_AGAIN,
                )
            return None
        grouped = self.format.endswith(":grouped")
        return group_map_of(name, stored, self._layer.group_size, blocks=grouped)


class PackedScheme(StoredScheme):
    """`weight_packed`, `weight_scale` and their kin, with the outputs first."""

    def __init__(self, weight: WeightSpec, layer: PackedLayer, options: ActivationOptions) -> None:
        weight_format = code_format(layer.bits, options.activations)
        super().__init__(weight, layer.parameters, weight_format)
        self._layer = layer

    def canonical(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        layer, name, shape = self._layer, self.weight.name, self.weight.shape
        stored_shape = tuple(parameters["weight_shape"].tolist())
        if stored_shape != shape:
            raise CheckpointError(
                f"tensor {name}.weight_shape",
                f"says {list(stored_shape)}",
                allowed=f"{list(shape)}",
                fix=GET_AGAIN,
            )
        read = unpack_apart if layer.codes_apart else unpack
        scales = finite_scales(f"{name}.weight_scale", parameters["weight_scale"])
        codes = UnsignedCodes(
            values=read(parameters[PACKED_CODES], layer.bits, shape[1]),
            bits=layer.bits,
            scales=scales.expand(shape[0], 1) if scales.ndim == 1 else scales,
            zeros=self._zeros(parameters),
            group_size=layer.group_size,
            group_map=self._group_map(parameters.get("weight_g_idx")),
        )
        return canonical(codes, self.format)

    def _zeros(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of unsigned codes: half of their range above those of the signed ones that the config
        means, which is how the file has them too."""
        layer, out_features = self._layer, self.weight.shape[0]
        if layer.args.symmetric:
            return torch.full((out_features, layer.num_groups), 1 << (layer.bits - 1))
        read = unpack_apart if layer.zeros_apart else unpack
        return read(parameters[ZEROS], layer.bits, out_features, axis=0)

    def _group_map(self, stored: torch.Tensor | None) -> torch.Tensor | None:
        """The groups of inputs, where they are not consecutive; -1 throughout was never filled in."""
        if stored is None or self._layer.num_groups == 1:
            return None
        name = f"{self.weight.name}.weight_g_idx"
        if not self._layer.args.reordered and bool((stored == -1).all()):
            return None
        grouped = self.format.endswith(":grouped")
        return group_map_of(name, stored, self._layer.group_size, blocks=grouped)
