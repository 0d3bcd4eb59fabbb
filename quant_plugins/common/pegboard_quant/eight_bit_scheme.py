"""Weights in codes of 8 bits, one an element, with scales of the whole, of rows, groups or blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard.errors import CheckpointError
from pegboard.interfaces.quantizer import LinearWeight, WeightSpec
from pegboard_quant.checks import GET_AGAIN, check_no_nan, check_positive, check_range
from pegboard_quant.eight_bit_layers import (
    INPUT_SCALE,
    INPUT_ZERO,
    ORDER,
    ZERO,
    EightBitLayer,
)
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.schemes import StoredScheme, finite_scales


class EightBitScheme(StoredScheme):
    """Each code less its block's zero, times its scale.

    Args:
        weight: whose scheme it is.
        layer: how the weight is kept.
        options: how inputs are taken.
    """

    def __init__(
        self, weight: WeightSpec, layer: EightBitLayer, options: CheckpointOptions
    ) -> None:
        weight_format = layer.rule.weight_format(layer.codes.kind, options)
        super().__init__(weight, layer.parameters, weight_format)
        self._layer = layer
        self._activations = layer.rule.activations(options)

    def canonical(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        name, layer, activations = self.weight.name, self._layer, self._activations
        check_no_nan(f"{name}.weight", parameters["weight"])
        scales = finite_scales(f"{name}.{layer.scale}", parameters[layer.scale])
        input_scale, input_zero = self._input_numbers(parameters)
        static, dynamic = activations == "static", activations == "dynamic"
        order = self._order(parameters)
        return LinearWeight(
            self.format,
            self.weight.shape,
            codes=parameters["weight"],
            scales=layer.blocks.spread(scales),
            zeros=self._zeros(parameters),
            group_map=order,
            group_size=layer.blocks.group_size if order is None else None,
            activations=activations,
            input_scale=input_scale if static else None,
            input_zero=input_zero if static else None,
            input_group=layer.rule.inputs.group if dynamic else None,
        )

    def _zeros(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        zeros = parameters.get(ZERO)
        if zeros is None or not bool(zeros.any()):
            return None
        if not self._layer.rule.zeros:
            raise self._not_symmetric(ZERO)
        return self._layer.blocks.spread(zeros)

    def _order(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        order = parameters.get(ORDER)
        if order is not None:
            last = self._layer.blocks.num_groups - 1
            check_range(f"{self.weight.name}.{ORDER}", order, 0, last)
        return order

    def _input_numbers(
        self, parameters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scale and zero of static inputs, float32 [1] each; no zero where it is 0."""
        scale, zero = parameters.get(INPUT_SCALE), parameters.get(INPUT_ZERO)
        if scale is None:
            return None, None
        check_positive(f"{self.weight.name}.{INPUT_SCALE}", scale)
        if zero is None or not bool(zero.any()):
            return scale.float().reshape(1), None
        if not self._layer.rule.inputs.zeros:
            raise self._not_symmetric(INPUT_ZERO)
        return scale.float().reshape(1), zero.float().reshape(1)

    def _not_symmetric(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"tensor {self.weight.name}.{name}",
            "is not 0, and quantization_config says symmetric",
            fix=GET_AGAIN,
        )
