"""The `awq` quantizer: layers in 4 bit codes, in the version `gemm`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard.errors import CheckpointError
from pegboard.interfaces.quantizer import LinearWeight, Scheme, WeightSpec
from pegboard_awq.packing import unpack_outputs
from pegboard_awq.plan import BITS, CODES, AWQLayer, awq_layer
from pegboard_quant.codes import UnsignedCodes, canonical
from pegboard_quant.options import ActivationOptions
from pegboard_quant.planning import code_format
from pegboard_quant.quantizer import CheckpointQuantizer
from pegboard_quant.schemes import StoredScheme, finite_scales

_MIDDLE = 1 << (BITS - 1)


class AWQQuantizer(CheckpointQuantizer[ActivationOptions]):
    """Reads layers in the version `gemm`."""

    def coded(self, weight: WeightSpec) -> Scheme | None:
        layer = awq_layer(weight, self.facts)
        return None if layer is None else AWQScheme(weight, layer, self.options)


class AWQScheme(StoredScheme):
    """`qweight`, `qzeros` and `scales`, all with the outputs last."""

    def __init__(self, weight: WeightSpec, layer: AWQLayer, options: ActivationOptions) -> None:
        super().__init__(weight, layer.parameters, code_format(BITS, options.activations))
        self._layer = layer

    def canonical(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        name = self.weight.name
        zeros = unpack_outputs(parameters["qzeros"])
        if not self._layer.settings.has_zeros and not bool((zeros == _MIDDLE).all()):
            raise CheckpointError(
                f"tensor {name}.qzeros",
                f"holds zeros from {int(zeros.min())} to {int(zeros.max())}, and zero_point is false",
                allowed=f"{_MIDDLE} everywhere",
                fix="get config and weights from one checkpoint",
            )
        codes = UnsignedCodes(
            values=unpack_outputs(parameters[CODES]).T,
            bits=BITS,
            scales=finite_scales(f"{name}.scales", parameters["scales"]).T,
            zeros=zeros.T,
            group_size=self._layer.group_size,
        )
        return canonical(codes, self.format)
