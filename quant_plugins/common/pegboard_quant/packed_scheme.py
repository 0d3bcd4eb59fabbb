"""Weights in the layout `pack-quantized` of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard.errors import CheckpointError
from pegboard.interfaces.quantizer import LinearWeight, WeightSpec
from pegboard_quant.bitstream import pack, unpack, unpack_apart
from pegboard_quant.checks import GET_AGAIN
from pegboard_quant.codes import UnsignedCodes, canonical, group_map_of
from pegboard_quant.options import ActivationOptions
from pegboard_quant.packed_layers import CODES, ZEROS, PackedLayer
from pegboard_quant.planning import code_format
from pegboard_quant.schemes import StoredScheme, finite_scales


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
            values=read(parameters[CODES], layer.bits, shape[1]),
            bits=layer.bits,
            scales=scales.expand(shape[0], 1) if scales.ndim == 1 else scales,
            zeros=self._zeros(parameters),
            group_size=layer.group_size,
            group_map=self._group_map(parameters.get("weight_g_idx")),
        )
        return canonical(codes, self.format)

    def _zeros(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The zeros of unsigned codes: half of their range above the zeros of the signed codes that the
        config means. The file has them so too."""
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


def stored_tensors(
    codes: UnsignedCodes, scale_dtype: torch.dtype, *, symmetric: bool
) -> Mapping[str, torch.Tensor]:
    """The inverse of the scheme: a layer's tensors, by the names that checkpoints give them.

    Args:
        codes: of 2 to 8 bits.
        scale_dtype: that scales are stored in; codes should have been chosen for rounded ones.
        symmetric: all zeros are the middle code, and none is stored.
    """
    tensors = {
        CODES: pack(codes.values, codes.bits),
        "weight_scale": codes.scales.to(scale_dtype).contiguous(),
        "weight_shape": torch.tensor(codes.shape),
    }
    if not symmetric:
        tensors[ZEROS] = pack(codes.zeros.to(torch.uint8), codes.bits, axis=0)
    if codes.group_map is not None:
        tensors["weight_g_idx"] = codes.group_map
    return tensors
