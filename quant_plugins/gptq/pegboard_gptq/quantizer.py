"""The `gptq` quantizer: layers in integer codes, by GPTQ's tools or by compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard.errors import CheckpointError
from pegboard.interfaces.quantizer import LinearWeight, Scheme, WeightSpec
from pegboard_gptq.gptq_plan import CODES, GPTQLayer
from pegboard_gptq.plan import stored_layer
from pegboard_gptq.zeros import zeros_of
from pegboard_quant.bitstream import unpack
from pegboard_quant.checks import GET_AGAIN
from pegboard_quant.codes import UnsignedCodes, canonical, group_map_of
from pegboard_quant.options import ActivationOptions
from pegboard_quant.packed_scheme import PackedScheme
from pegboard_quant.planning import code_format
from pegboard_quant.quantizer import CheckpointQuantizer
from pegboard_quant.schemes import StoredScheme, finite_scales


class GPTQQuantizer(CheckpointQuantizer[ActivationOptions]):
    """Reads layers as GPTQ's tools and compressed-tensors have them."""

    def coded(self, weight: WeightSpec) -> Scheme | None:
        layer = stored_layer(weight, self.facts)
        if layer is None:
            return None
        if isinstance(layer, GPTQLayer):
            return GPTQScheme(weight, layer, self.options)
        return PackedScheme(weight, layer, self.options)


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
